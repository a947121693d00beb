package httpthrottle

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/sluice-go/sluice/throttle"
)

// Numbers in a field ...-Reset from epochSeconds on are seconds since 1970, from epochMilliseconds
// on milliseconds. Smaller ones are seconds from now, as no limit lasts for 31 years.
const (
	epochSeconds      = 1_000_000_000
	epochMilliseconds = 1_000_000_000_000
)

// remainingFields are the prefixes of fields such as RateLimit-Remaining.
var remainingFields = []string{"RateLimit-", "X-RateLimit-", "X-Rate-Limit-"}

const maxUnits = 32

// refusal is TransportConfig.Refusal's default.
func refusal(resp *http.Response) (time.Duration, bool) {
	retryIn, timed := RetryAfter(resp)
	if !timed {
		for _, r := range remainders(resp.Header, clock(resp), unitsNamed(resp.Header)) {
			if r.units == 0 {
				retryIn = max(retryIn, r.reset)
			}
		}
	}
	switch resp.StatusCode {
	case http.StatusTooManyRequests:
		return retryIn, true
	case http.StatusServiceUnavailable:
		return retryIn, timed
	case http.StatusForbidden: // which GitHub uses like 429, too
		return retryIn, timed || nothingLeft(resp.Header)
	}
	return 0, false
}

// nothingLeft reports whether a field says that nothing is left, even if no field says until when.
func nothingLeft(h http.Header) bool {
	for field := range h {
		if _, ok := remainingSuffix(field); ok && h.Get(field) == "0" {
			return true
		}
	}
	if dict, err := httpsfv.UnmarshalDictionary(h.Values("RateLimit")); err == nil {
		if left, ok := dictionaryInt(dict, "remaining"); ok && left == 0 {
			return true
		}
	}
	list, _ := httpsfv.UnmarshalList(h.Values("RateLimit"))
	for _, member := range list {
		if item, ok := member.(httpsfv.Item); ok {
			if left, ok := paramInt(item.Params, "r"); ok && left == 0 {
				return true
			}
		}
	}
	return false
}

// remainingSuffix returns the end of a field's name, such as "-tokens" of X-RateLimit-Remaining-Tokens, if it is such a field.
func remainingSuffix(field string) (string, bool) {
	for _, prefix := range remainingFields {
		suffix, ok := strings.CutPrefix(strings.ToLower(field), strings.ToLower(prefix)+"remaining")
		if ok && (suffix == "" || suffix[0] == '-') {
			return suffix, true
		}
	}
	return "", false
}

// unitsNamed returns the units that a response names in fields such as X-RateLimit-Remaining-Tokens.
func unitsNamed(h http.Header) map[string]bool {
	units := map[string]bool{throttle.Requests: true}
	for _, unit := range quotaUnits(h) {
		units[unit] = true
	}
	for field := range h {
		if suffix, _ := remainingSuffix(field); suffix != "" && len(units) < maxUnits {
			units[suffix[1:]] = true
		}
	}
	return units
}

// RetryAfter returns how long a response asks to wait, 0 or more. It reads Retry-After-Ms, in milliseconds, or else
// Retry-After: seconds, or a date by the upstream's clock. It returns false without a valid field, and for nil.
func RetryAfter(resp *http.Response) (time.Duration, bool) {
	if resp == nil {
		return 0, false
	}
	if wait, ok := number(resp.Header.Get("Retry-After-Ms"), time.Millisecond); ok {
		return wait, true
	}
	value := strings.TrimSpace(resp.Header.Get("Retry-After"))
	if date, err := http.ParseTime(value); err == nil {
		return max(0, date.Sub(clock(resp))), true
	}
	return number(value, time.Second)
}

// number parses a number of units of time, 0 or more, with or without a fraction. A time above twice
// throttle.MaxPeriod becomes that.
func number(value string, unit time.Duration) (time.Duration, bool) {
	n, err := strconv.ParseFloat(value, 64)
	if err != nil || math.IsNaN(n) || n < 0 {
		return 0, false
	}
	return time.Duration(math.Ceil(min(n*float64(unit), 2*float64(throttle.MaxPeriod)))), true
}

// A remainder is the number of units that the upstream grants until it resets.
type remainder struct {
	unit  string
	units int64
	reset time.Duration // above 0
}

// remainders returns the upstream's remaining units, by the first of these fields that a response has:
//
//   - RateLimit, as in draft-ietf-httpapi-ratelimit-headers-07 and later;
//   - RateLimit-Remaining and -Reset, as in earlier drafts;
//   - X-RateLimit-Remaining and -Reset, or X-Rate-Limit-...
//
// The last two may name a unit, as in X-RateLimit-Remaining-Tokens. Malformed fields are ignored.
func remainders(h http.Header, now time.Time, units map[string]bool) []remainder {
	if all := structured(h, units); len(all) > 0 {
		return all
	}
	for _, prefix := range remainingFields {
		var all []remainder
		add := func(unit, suffix string) {
			left, err := strconv.ParseInt(h.Get(prefix+"Remaining"+suffix), 10, 64)
			reset, ok := resetIn(h.Get(prefix+"Reset"+suffix), now)
			if err == nil && ok {
				all = appendValid(all, remainder{unit, left, reset})
			}
		}
		if units[throttle.Requests] {
			add(throttle.Requests, "")
		}
		for unit := range units {
			add(unit, "-"+unit)
		}
		if len(all) > 0 {
			return all
		}
	}
	return nil
}

func appendValid(all []remainder, r remainder) []remainder {
	if r.units < 0 || r.units > throttle.MaxLimit || r.reset <= 0 || r.reset > throttle.MaxPeriod {
		return all
	}
	return append(all, r)
}

// structured parses the RateLimit field, with the units of RateLimit-Policy.
func structured(h http.Header, units map[string]bool) []remainder {
	values := h.Values("RateLimit")
	if len(values) == 0 {
		return nil
	}
	list, err := httpsfv.UnmarshalList(values)
	if err != nil {
		return dictionary(values)
	}
	var all []remainder
	unitOf := quotaUnits(h)
	for _, member := range list {
		item, ok := member.(httpsfv.Item)
		if !ok {
			continue
		}
		unit, known := unitOf[nameOf(item)]
		if !known {
			unit = throttle.Requests
		}
		left, hasLeft := paramInt(item.Params, "r")
		reset, hasReset := paramInt(item.Params, "t")
		if hasLeft && hasReset && units[unit] {
			all = appendValid(all, remainder{unit, left, seconds(reset)})
		}
	}
	return all
}

// dictionary parses the RateLimit field of draft 07: limit=100, remaining=50, reset=5.
func dictionary(values []string) []remainder {
	dict, err := httpsfv.UnmarshalDictionary(values)
	if err != nil {
		return nil
	}
	left, hasLeft := dictionaryInt(dict, "remaining")
	reset, hasReset := dictionaryInt(dict, "reset")
	if !hasLeft || !hasReset {
		return nil
	}
	return appendValid(nil, remainder{throttle.Requests, left, seconds(reset)})
}

// seconds returns n seconds. Numbers that would overflow become 31 years, and negative ones 0: appendValid refuses both.
func seconds(n int64) time.Duration { return time.Duration(max(0, min(n, 1e9))) * time.Second }

func dictionaryInt(dict *httpsfv.Dictionary, key string) (int64, bool) {
	found, _ := dict.Get(key)
	item, ok := found.(httpsfv.Item)
	if !ok {
		return 0, false
	}
	n, ok := item.Value.(int64)
	return n, ok
}

// quotaUnits returns the units in RateLimit-Policy, by the name of the policy.
func quotaUnits(h http.Header) map[string]string {
	list, err := httpsfv.UnmarshalList(h.Values("RateLimit-Policy"))
	if err != nil {
		return nil
	}
	units := map[string]string{}
	for _, member := range list {
		if item, ok := member.(httpsfv.Item); ok {
			if unit, ok := item.Params.Get("qu"); ok {
				units[nameOf(item)], _ = unit.(string)
			}
		}
	}
	return units
}

func nameOf(item httpsfv.Item) string {
	switch name := item.Value.(type) {
	case string:
		return name
	case httpsfv.Token:
		return string(name)
	}
	return ""
}

func paramInt(params *httpsfv.Params, key string) (int64, bool) {
	value, _ := params.Get(key)
	n, ok := value.(int64)
	return n, ok
}

// resetIn parses the time until the upstream resets, which fields give as seconds from now, as seconds
// or milliseconds since 1970, or as a duration such as 6m0s.
func resetIn(value string, now time.Time) (time.Duration, bool) {
	value = strings.TrimSpace(value)
	if d, err := time.ParseDuration(value); err == nil && d > 0 {
		return d, true
	}
	n, err := strconv.ParseFloat(value, 64)
	switch {
	case err != nil || math.IsNaN(n) || n <= 0 || n >= 1000*epochMilliseconds:
		return 0, false
	case n >= epochMilliseconds:
		return time.UnixMilli(int64(n)).Sub(now), true
	case n >= epochSeconds:
		return time.UnixMilli(int64(n * 1000)).Sub(now), true
	}
	return number(value, time.Second)
}

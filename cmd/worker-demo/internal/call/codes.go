package call

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Codes are HTTP status codes.
type Codes struct{ spans []span }

type span struct{ from, to int }

// What counts as success, and what is worth another try, unless it is said otherwise.
const (
	DefaultSuccess = "2xx,3xx"
	DefaultRetry   = "408,425,429,5xx"
)

// ParseCodes reads a list such as "2xx,404,500-503".
func ParseCodes(text string) (Codes, error) {
	var c Codes
	for part := range strings.SplitSeq(text, ",") {
		part = strings.TrimSpace(part)
		from, to, ranged := strings.Cut(part, "-")
		if class, all := strings.CutSuffix(part, "xx"); all {
			from, to, ranged = class+"00", class+"99", true
		}
		if !ranged {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil || first < 100 || last > 599 || first > last {
			return c, fmt.Errorf("%q: must be codes from 100 to 599, such as 404, 2xx or 500-503, with commas between them", part)
		}
		c.spans = append(c.spans, span{first, last})
	}
	return c, nil
}

// mustParse is for the defaults.
func mustParse(text string) Codes {
	c, err := ParseCodes(text)
	if err != nil {
		panic(err)
	}
	return c
}

// Has reports whether the code is one of them.
func (c Codes) Has(code int) bool {
	return slices.ContainsFunc(c.spans, func(s span) bool { return s.from <= code && code <= s.to })
}

// An Outcome says what becomes of a job by the code of its answer. What is neither success nor worth
// a retry fails at once.
type Outcome struct{ success, retry Codes }

// NewOutcome makes an outcome of two lists; an empty one stands for its default. A code of a list that
// was given is no longer in the default of the other. Lists that both were given must not overlap.
func NewOutcome(success, retry string) (Outcome, error) {
	o := Outcome{mustParse(DefaultSuccess), mustParse(DefaultRetry)}
	var err error
	if success != "" {
		if o.success, err = ParseCodes(success); err != nil {
			return o, fmt.Errorf("--success %w", err)
		}
	}
	if retry != "" {
		if o.retry, err = ParseCodes(retry); err != nil {
			return o, fmt.Errorf("--retry %w", err)
		}
	}
	for code := 100; code < 600; code++ {
		if success != "" && retry != "" && o.success.Has(code) && o.retry.Has(code) {
			return o, fmt.Errorf("--success %s and --retry %s: %d is in both: must be in one", success, retry, code)
		}
	}
	if retry != "" {
		o.success = o.success.without(o.retry)
	} else {
		o.retry = o.retry.without(o.success)
	}
	return o, nil
}

func (c Codes) without(other Codes) Codes {
	var left Codes
	for code := 100; code < 600; code++ {
		if c.Has(code) && !other.Has(code) {
			left.spans = append(left.spans, span{code, code})
		}
	}
	return left
}

package httpthrottle

import (
	"context"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// A learner reports the upstream's remaining units to Redis, unless Redis knows as much already.
type learner struct {
	logger *slog.Logger

	mu       sync.Mutex
	reported map[string]gap // by policy, unit and scopes
}

// A gap is how many more units our windows could grant than the upstream had left when that was reported. Redis
// subtracts what we grant from the reported units, so a gap that stays the same is not reported again.
type gap struct {
	units int64
	until time.Time // when the upstream resets
}

// freshFor is how long a job's calls are dated by its grant. Later answers already count what others were granted.
const freshFor = 5 * time.Second

// maxReported bounds the memory of a learner, as there may be any number of tenants.
const maxReported = 10_000

// learn reports the refusal that the response to a call is, or else the remaining units that it tells of.
func (t *Transport) learn(
	ctx context.Context, resp *http.Response, caller *throttle.Caller, d throttle.Decision, sentAt time.Time,
) {
	retryIn, refused := t.c.Refusal(resp)
	if !refused {
		caller.Answered(d.Policy, sentAt)
		if d.FailedOpen == nil { // a decision that failed open has no windows to compare with
			t.learner.report(ctx, resp, d)
		}
		return
	}
	if retryIn <= 0 {
		retryIn = t.c.Pause // 0 leaves it to the policy
	}
	if policy, ok := t.c.Limiter.Lookup(d.Policy); ok {
		retryIn = min(retryIn, policy.MaxPause)
	}
	caller.Refused(d.Policy, retryIn)
	cause := strconv.Itoa(resp.StatusCode)
	pause := func(ctx context.Context) {
		if _, err := d.Reservation.Pause(ctx, retryIn, cause); err != nil {
			t.c.Logger.Warn("httpthrottle: a refusal could not be stored: its policy does not pause",
				"policy", d.Policy, "error", err)
		}
	}
	if d.FailedOpen != nil { // Redis did not answer, and may not do so yet
		go detached(ctx, pause)
		return
	}
	detached(ctx, pause)
}

// report reports the upstream's remaining units where these are news: see isNews.
func (l *learner) report(ctx context.Context, resp *http.Response, d throttle.Decision) {
	if age, _ := number(resp.Header.Get("Age"), time.Second); age > 0 {
		return // a cache sent it: its numbers are old
	}
	units := map[string]bool{}
	for _, w := range d.Windows {
		units[w.Unit] = true
	}
	scopes := []string{d.Policy}
	for _, w := range d.Windows {
		scopes = append(scopes, w.Scope.Values...)
	}
	type reading struct {
		remainder
		gap int64
	}
	widest := map[string]reading{} // by unit
	for _, r := range remainders(resp.Header, clock(resp), units) {
		ours, ok := grantable(d, r)
		units := max(0, ours-r.units)
		if other, seen := widest[r.unit]; ok && (!seen || units > other.gap) {
			widest[r.unit] = reading{r, units}
		}
	}
	for unit, r := range widest {
		key := unit + "\x00" + strings.Join(scopes, "\x00")
		if !l.isNews(key, r.gap, r.reset) {
			continue
		}
		detached(ctx, func(ctx context.Context) {
			if err := d.Reservation.ReportRemaining(ctx, unit, r.units, r.reset); err != nil {
				l.logger.Warn("httpthrottle: the upstream's remaining units could not be stored",
					"policy", d.Policy, "error", err)
				return
			}
			l.note(key, r.gap, r.reset)
		})
	}
}

// grantable returns how much our windows can grant until the upstream resets: what is left, and the limit for each period.
func grantable(d throttle.Decision, r remainder) (least int64, ok bool) {
	for _, w := range d.Windows {
		var refills int64 // none before the upstream resets
		switch {
		case w.Unit != r.unit || w.Algorithm.Leases():
			continue
		case w.Period > 0:
			refills = int64(r.reset / w.Period)
		case d.At.Add(r.reset).After(w.ResetsAt):
			refills = 1
		}
		if units := w.Remaining + refills*w.Limit; !ok || units < least {
			least, ok = units, true
		}
	}
	return least, ok
}

// isNews reports whether a gap of units must be reported: it has grown, or has halved, or is of a new reset.
func (l *learner) isNews(key string, units int64, reset time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, ok := l.reported[key]
	if !ok || !time.Now().Before(last.until) {
		return units > 0
	}
	// A reset that has moved belongs to another period of the upstream.
	moved := time.Now().Add(reset).Sub(last.until).Abs() > max(2*time.Second, reset/10)
	return units > last.units || units < last.units/2 || moved && units > 0
}

func (l *learner) note(key string, units int64, reset time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.reported) >= maxReported {
		clear(l.reported)
	}
	l.reported[key] = gap{units, time.Now().Add(reset)}
}

// clock returns the time by the upstream's clock, from the field Date, or else our own time.
func clock(resp *http.Response) time.Time {
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		return date
	}
	return time.Now()
}

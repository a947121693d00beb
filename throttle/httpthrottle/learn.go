package httpthrottle

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// A learner passes on what the upstream says of how much is left, if that is news.
type learner struct {
	logger *slog.Logger

	mu     sync.Mutex
	drifts map[string]drift // by policy, unit and scopes
}

// A drift is by how many units the upstream was behind our windows when that was passed on. Redis takes
// off what we grant since: as long as the drift stays the same there is nothing new to say.
type drift struct {
	units int64
	until time.Time // when the upstream resets
}

// maxDrifts bounds what is remembered: tenants are data.
const maxDrifts = 10_000

// learn takes the answer to a call in.
func (t *Transport) learn(ctx context.Context, resp *http.Response, job *throttle.Job, d throttle.Decision) {
	retryIn, refused := t.c.Refusal(resp)
	if retryIn <= 0 {
		retryIn = t.c.Pause // 0 if nobody says
	}
	if policy, ok := t.c.Limiter.Lookup(d.Policy); ok {
		retryIn = min(retryIn, policy.MaxPause)
	}
	switch {
	case job != nil && refused:
		job.Refused(d.Policy, retryIn)
	case job != nil:
		job.Answered()
	}
	switch {
	case d.FailedOpen != nil: // nobody to tell, and nothing to compare with
	case refused:
		afterward(ctx, func(ctx context.Context) {
			r := d.Reservation
			begun, err := r.Pause(ctx, retryIn)
			if err != nil {
				t.c.Logger.Warn("httpthrottle: a refusal could not be passed on", "policy", d.Policy, "error", err)
			} else if begun > 0 {
				t.c.Logger.Warn("httpthrottle: the upstream refused a call: its policy pauses", "policy", d.Policy, "tenant", r.Tenant, "for", begun)
			}
		})
	default:
		t.learner.left(ctx, resp, d)
	}
}

// left passes on how much the upstream has left, where that is less than our windows let out.
func (l *learner) left(ctx context.Context, resp *http.Response, d throttle.Decision) {
	if fromCache(resp.Header) {
		return
	}
	units := map[string]bool{}
	for _, w := range d.Windows {
		units[w.Unit] = true
	}
	worst := map[string]remainder{}
	most := map[string]int64{}
	for _, r := range remainders(resp.Header, clock(resp), units) {
		lets, ok := letsOut(d, r)
		if !ok {
			continue
		}
		if behind, seen := most[r.unit]; !seen || lets-r.left > behind {
			most[r.unit], worst[r.unit] = lets-r.left, r
		}
	}
	for unit, r := range worst {
		key := keyOf(d, unit)
		if !l.news(key, most[unit], r.reset) {
			continue
		}
		afterward(ctx, func(ctx context.Context) {
			if err := d.Reservation.ReportRemaining(ctx, throttle.Remaining{Unit: unit, Units: r.left, Reset: r.reset}); err != nil {
				l.logger.Warn("httpthrottle: what is left could not be passed on", "policy", d.Policy, "error", err)
				return
			}
			l.note(key, most[unit], r.reset)
		})
	}
}

// letsOut is an upper bound of how much our windows of the unit let out until the upstream resets.
func letsOut(d throttle.Decision, r remainder) (least int64, ok bool) {
	for _, w := range d.Windows {
		var refills int64
		switch {
		case w.Unit != r.unit || w.Algorithm == throttle.Concurrency:
			continue
		case w.Period > 0:
			refills = int64(r.reset / w.Period)
		case d.At.Add(r.reset).After(w.ResetsAt):
			refills = 1
		}
		if lets := w.Remaining + refills*w.Limit; !ok || lets < least {
			least, ok = lets, true
		}
	}
	return least, ok
}

// news reports whether a drift has to be passed on: it has grown, or what was passed on has become far
// too strict.
func (l *learner) news(key string, behind int64, reset time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, ok := l.drifts[key]
	if !ok || !time.Now().Before(before.until) {
		return behind > 0
	}
	// A reset that moved is another period of the upstream.
	moved := time.Now().Add(reset).Sub(before.until).Abs() > max(2*time.Second, reset/10)
	return behind > before.units || behind < before.units/2 || moved && behind > 0
}

func (l *learner) note(key string, behind int64, reset time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.drifts) >= maxDrifts {
		clear(l.drifts)
	}
	l.drifts[key] = drift{behind, time.Now().Add(reset)}
}

func keyOf(d throttle.Decision, unit string) string {
	parts := []string{d.Policy, unit}
	for _, w := range d.Windows {
		parts = append(parts, w.Scope.Values...)
	}
	return strings.Join(parts, "\x00")
}

// clock is the upstream's, which its times of day are by; or ours, if it does not tell.
func clock(resp *http.Response) time.Time {
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		return date
	}
	return time.Now()
}

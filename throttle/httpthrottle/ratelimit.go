package httpthrottle

import (
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/sluice-go/sluice/throttle"
)

func setRateLimit(h http.Header, d throttle.Decision) {
	if len(d.Windows) == 0 {
		return
	}
	policies, limits := httpsfv.List{}, httpsfv.List{}
	tightest := d.Windows[0]
	for _, w := range d.Windows {
		if tighter(w, tightest) {
			tightest = w
		}
		policy, limit := httpsfv.NewItem(w.Name), httpsfv.NewItem(w.Name)
		units, seconds := quota(w)
		policy.Params.Add("q", units)
		limit.Params.Add("r", w.Remaining)
		switch {
		case w.Algorithm.Leases() && w.Unit == throttle.Requests:
			policy.Params.Add("qu", "concurrent-requests")
		case w.Unit != throttle.Requests:
			policy.Params.Add("qu", w.Unit)
		}
		if seconds > 0 {
			policy.Params.Add("w", seconds)
		}
		if !w.Algorithm.Leases() {
			limit.Params.Add("t", wholeSeconds(resetsIn(d, w)))
		}
		policies, limits = append(policies, policy), append(limits, limit)
	}
	// Names and units are of A-Z a-z 0-9 _ . - and numbers are at most 1e12: nothing can be wrong.
	if field, err := httpsfv.Marshal(policies); err == nil {
		h.Set("RateLimit-Policy", field)
	}
	if field, err := httpsfv.Marshal(limits); err == nil {
		h.Set("RateLimit", field)
	}
	units, _ := quota(tightest)
	h.Set("X-RateLimit-Limit", strconv.FormatInt(units, 10))
	h.Set("X-RateLimit-Remaining", strconv.FormatInt(tightest.Remaining, 10))
	reset := d.At.Add(resetsIn(d, tightest)).UnixMicro()
	h.Set("X-RateLimit-Reset", strconv.FormatInt((reset+999_999)/1_000_000, 10))
}

// quota returns how many units a window allows at most, and in how many seconds, 0 for unknown. For
// a burst above the limit these are the burst and the time in which it drains, as more units than
// the limit can remain.
func quota(w throttle.WindowState) (units, seconds int64) {
	if w.Burst <= w.Limit {
		return w.Limit, wholeSeconds(w.Period)
	}
	drains := w.Period.Seconds() * float64(w.Burst) / float64(w.Limit)
	return w.Burst, int64(math.Ceil(min(drains, 1e12)))
}

// tighter reports whether the first window limits the client more than the second: it denied for
// longer, or a smaller part of it remains.
func tighter(a, b throttle.WindowState) bool {
	if a.Denied || b.Denied {
		return a.RetryIn > b.RetryIn
	}
	return float64(a.Remaining)/float64(a.Burst) < float64(b.Remaining)/float64(b.Burst)
}

// resetsIn returns the time until the window has more room than now.
func resetsIn(d throttle.Decision, w throttle.WindowState) time.Duration {
	if w.Denied {
		return w.RetryIn
	}
	return max(0, w.ResetsAt.Sub(d.At))
}

func wholeSeconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

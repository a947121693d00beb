package modeltest

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// An adaptModel is the controller of upstream.lua in Go. Its times are microseconds, its rates
// parts of the published one. Both are rounded as they are stored.
type adaptModel struct {
	cycle    float64 // how long the window takes for all that it holds
	capacity float64

	cut, peak  float64 // when the rate was cut last, and around which it grows slowly; 0 before
	from       float64 // since when it grows
	next       float64 // when the next unit may go
	free       float64 // until when grants are spread
	last, wait float64 // the last refusal, and the pause after it
}

const (
	adaptKeep    = 15. / 16 // of a refused rate, for the peak
	adaptDip     = 1. / 15  // of the peak, below which the rate begins
	adaptGrowth  = 1e-4     // of the rate, in the third power of a unit of time
	adaptFloor   = 1. / 64  // of the published rate
	adaptHold    = 60.      // units of time
	adaptLongest = 60e6     // of all that goes by the cycle
	adaptFirst   = 1e6      // the longest first pause
	adaptLate    = 20e3     // with which a late request catches up
	adaptParts   = 1e12     // of the published rate, in which rates are stored
)

func (m *adaptModel) span() float64 { return math.Min(m.cycle, adaptLongest) }

// unit is the time of ten calls.
func (m *adaptModel) unit() float64 {
	return math.Min(math.Max(10*m.cycle/m.capacity, 1e6), adaptLongest)
}

func (m *adaptModel) rateAt(now float64) float64 {
	if m.peak == 0 {
		return 1
	}
	k := math.Pow(m.peak*adaptDip/adaptGrowth, 1./3)
	return math.Max(adaptFloor, math.Min(1, m.peak+adaptGrowth*math.Pow(math.Max(0, now-m.from)/m.unit()-k, 3)))
}

func (m *adaptModel) fitsAt(now float64) float64 {
	if now >= m.free {
		return now
	}
	return math.Max(now, math.Min(m.next, m.free))
}

// take spreads grants. A server that asks late may catch up with a few of them.
func (m *adaptModel) take(now float64) {
	if now >= m.free {
		return
	}
	rate := m.rateAt(now)
	spacing, late := m.cycle/m.capacity/rate, adaptLate
	if rate < 1 {
		late = math.Min(late, 1e8/spacing)
	}
	m.next = math.Ceil(math.Max(m.next, now-late) + spacing)
}

// refused notes that what was granted at `at` was refused, for `retryAfter`, or 0 for an unknown time, and returns the
// pause.
func (m *adaptModel) refused(now, at, retryAfter float64) float64 {
	known := now < m.free
	if known && at <= m.last {
		return retryAfter // of one moment with the last
	}
	wait := retryAfter
	switch {
	case retryAfter > 0:
	case known && now < m.last+m.wait+m.span()/2:
		wait = math.Min(2*m.wait, m.span())
	default:
		wait = math.Min(m.span()/8, adaptFirst)
	}
	wait = math.Ceil(wait)
	switch {
	case !known:
		*m = adaptModel{cycle: m.cycle, capacity: m.capacity, cut: now}
	case at > m.cut+m.span()/2:
		m.peak, m.cut, m.from = math.Floor(m.rateAt(now)*adaptKeep*adaptParts)/adaptParts, now, now+wait
	}
	m.last, m.wait = now, wait
	m.next = math.Max(m.next, now+wait)
	m.free = math.Ceil(now + wait + adaptHold*m.unit())
	return wait
}

// The scripts adapt as the simulated model does, whatever is granted and refused when.
func TestLuaAdaptsAsTheModel(t *testing.T) {
	client := limitertest.RedisClient(t)
	rapid.Check(t, func(t *rapid.T) {
		expect.Must(t, client.FlushDB(t.Context()).Err())
		period := rapid.SampledFrom([]time.Duration{time.Second, 2050 * time.Millisecond, 100 * time.Second, time.Hour}).Draw(t, "period")
		limit := rapid.SampledFrom([]int64{5, 20, 1000}).Draw(t, "limit")
		l, c := limitertest.NewWithClock(t, client, throttle.Policy{
			Name: "p", Windows: []throttle.Window{{Name: "w", Limit: limit, Period: period, Shared: true}},
		})
		model := &adaptModel{cycle: toUS(period), capacity: float64(limit)}
		spacing := period / time.Duration(limit)
		var now, paused time.Duration
		var log []limitertest.LoggedGrant
		var granted []throttle.Reservation
		var times []time.Duration
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += time.Duration(rapid.IntRange(0, 3000).Draw(t, "step")) * spacing / 1000
			if rapid.IntRange(0, 40).Draw(t, "long") == 0 {
				now += time.Duration(rapid.IntRange(1, 200).Draw(t, "break")) * time.Second
			}
			now = now.Truncate(time.Microsecond)
			c.Set(now)
			if len(granted) > 0 && rapid.IntRange(0, 3).Draw(t, "refused") == 0 {
				i := rapid.IntRange(max(0, len(granted)-5), len(granted)-1).Draw(t, "which")
				retryAfter := rapid.SampledFrom([]time.Duration{0, 0, time.Second}).Draw(t, "said")
				expect.Must(t, expect.ErrOf(granted[i].Pause(t.Context(), retryAfter, "")))
				if wait := model.refused(toUS(now), toUS(times[i]), toUS(retryAfter)); wait > 0 {
					paused = max(paused, now+ofUS(math.Ceil(wait)))
				}
				continue
			}
			d := expect.Got(l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "a"}))(t)
			fits := max(now, paused, ofUS(math.Ceil(model.fitsAt(toUS(now)))))
			const rounding = time.Microsecond // the last digits of a cube root may differ
			switch {
			case d.Granted && fits > now+rounding:
				t.Fatalf("granted at %v, by the model at %v", now, fits)
			case d.Granted:
				model.take(toUS(now))
				granted, times = append(granted, d.Reservation), append(times, now)
				log = append(log, limitertest.LoggedGrant{At: d.At.UnixMicro(), Units: 1})
			case d.Windows[0].Used < limit && (now+d.RetryIn-fits).Abs() > rounding:
				t.Fatalf("at %v denied until %v, by the model until %v", now, now+d.RetryIn, fits)
			}
		}
		over := limitertest.MostOver(throttle.Window{Limit: limit, Period: period}, log)
		expect.Require(t, over <= 0, over, "units above the limit")
	})
}

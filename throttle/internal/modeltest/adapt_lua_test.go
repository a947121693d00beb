package modeltest

import (
	"math"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// The scripts adapt as the simulated model does, whatever is granted and refused when.
func TestLuaAdaptsAsTheModel(t *testing.T) {
	client := limitertest.Redis(t)
	rapid.Check(t, func(rt *rapid.T) { adaptLike(rt, client) })
}

func adaptLike(t *rapid.T, client *redis.Client) {
	limitertest.Must(t, client.FlushDB(t.Context()).Err())
	period := rapid.SampledFrom([]time.Duration{time.Second, 2050 * time.Millisecond, 100 * time.Second, time.Hour}).Draw(t, "period")
	limit := rapid.SampledFrom([]int64{5, 20, 1000}).Draw(t, "limit")
	adapt := rapid.SampledFrom([]throttle.Adapt{throttle.AdaptFull, throttle.AdaptSpread}).Draw(t, "adapt")
	l, c := limitertest.NewWithClock(t, client, throttle.Policy{
		Name: "p", Adapt: adapt, Windows: []throttle.Window{{Name: "w", Limit: limit, Period: period, Scope: throttle.ScopeShared}},
	})
	model := &adaptModel{cycle: toUS(period), capacity: float64(limit), full: adapt == throttle.AdaptFull}
	spacing := period / time.Duration(limit)
	var now, paused time.Duration
	var log []limitertest.Grant
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
			said := rapid.SampledFrom([]time.Duration{0, 0, time.Second}).Draw(t, "said")
			limitertest.Must(t, limitertest.Err(granted[i].Pause(t.Context(), said, "")))
			if wait := model.refused(toUS(now), toUS(times[i]), toUS(said)); wait > 0 {
				paused = max(paused, now+ofUS(math.Ceil(wait)))
			}
			continue
		}
		d, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "a"})
		limitertest.Must(t, err)
		fits := max(now, paused, ofUS(math.Ceil(model.fitsAt(toUS(now)))))
		const rounding = time.Microsecond // the last digits of a cube root may differ
		switch {
		case d.Granted && fits > now+rounding:
			t.Fatalf("granted at %v, by the model at %v", now, fits)
		case d.Granted:
			model.take(toUS(now))
			granted, times = append(granted, d.Reservation), append(times, now)
			log = append(log, limitertest.Grant{At: d.At.UnixMicro(), Units: 1})
		case d.Windows[0].Used < limit && (now+d.RetryIn-fits).Abs() > rounding:
			t.Fatalf("at %v denied until %v, by the model until %v", now, now+d.RetryIn, fits)
		}
	}
	over := limitertest.MostOver(throttle.Window{Limit: limit, Period: period}, log)
	limitertest.Require(t, over <= 0, over, "units above the limit")
}

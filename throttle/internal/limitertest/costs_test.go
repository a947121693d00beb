package limitertest

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// remaining is by window.
func remaining(d throttle.Decision) []int64 {
	var units []int64
	for _, w := range d.Windows {
		units = append(units, w.Remaining)
	}
	return units
}

func TestCostsPerUnit(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := NewWithClock(t, client, Policy(
			throttle.Window{Name: "calls", Limit: 3, Period: m},
			throttle.Window{Name: "spend", Limit: 1000, Period: m, Unit: "tokens"},
			throttle.Window{Name: "rate", Algorithm: throttle.AlgorithmGCRA, Limit: 600, Burst: 700, Period: m, Unit: "tokens"},
			throttle.Window{Name: "files", Algorithm: throttle.AlgorithmFixed, Limit: 2, Period: m, Unit: "files"},
		))
		for i, step := range []struct {
			cost      map[string]int64
			remaining []int64
			retryIn   time.Duration
		}{
			{nil, []int64{2, 1000, 700, 2}, 0},
			{map[string]int64{"tokens": 400}, []int64{1, 600, 300, 2}, 0},
			{map[string]int64{"tokens": 310, "files": 1}, []int64{1, 600, 300, 2}, 1 * s},
			{map[string]int64{"tokens": 601, "files": 1}, []int64{1, 600, 300, 2}, m},
			{map[string]int64{"tokens": 300, "files": 1, "requests": 0}, []int64{1, 300, 0, 1}, 0},
			{map[string]int64{"requests": 0}, []int64{1, 300, 0, 1}, 0}, // what costs nothing is granted
			{map[string]int64{"requests": 1}, []int64{0, 300, 0, 1}, 0},
			{map[string]int64{"requests": 1}, []int64{0, 300, 0, 1}, m},
			{map[string]int64{"requests": 0, "files": 1}, []int64{0, 300, 0, 0}, 0},
		} {
			c.Set(0)
			d := Reserve(t, l, throttle.Request{Policy: "p", Tenant: "acme", Cost: step.cost})
			got := remaining(d)
			expect.That(t, slices.Equal(got, step.remaining) && d.RetryIn == step.retryIn &&
				d.Granted == (step.retryIn == 0),
				"step", i, "granted", d.Granted, "remaining", got, "retry in", d.RetryIn, "want", step.remaining, step.retryIn)
		}
	})
}

func TestRequestsThatCanNeverBeGranted(t *testing.T) {
	windows := []throttle.Window{
		{Name: "calls", Limit: 5, Period: m},
		{Name: "spend", Algorithm: throttle.AlgorithmGCRA, Limit: 1000, Burst: 10, Period: m, Unit: "tokens", Per: []string{"tenant", "user"}},
	}
	p := Policy(windows...)
	p.Tenants = map[string]throttle.Tenant{"small": {Windows: map[string]throttle.Override{"calls": {Limit: 2}}}}
	client := RedisClient(t)
	l, _ := NewWithClock(t, client, p)
	good := throttle.Request{Policy: "p", Tenant: "acme", Attributes: map[string]string{"user": "bob"}}
	Reserve(t, l, good)
	before := Dump(t, client)
	for name, tc := range map[string]struct {
		change func(*throttle.Request)
		want   string
	}{
		"cost above the limit": {func(r *throttle.Request) { r.Cost = map[string]int64{"requests": 6} },
			`throttle: policy "p", window "calls": cost requests 6: never fits: the window grants 5 at most`},
		"cost above the tenant's limit": {func(r *throttle.Request) { r.Tenant, r.Cost = "small", map[string]int64{"requests": 3} },
			`throttle: policy "p", window "calls": cost requests 3: never fits: the window grants 2 at most`},
		"cost above the burst": {func(r *throttle.Request) { r.Cost = map[string]int64{"tokens": 11} },
			`throttle: policy "p", window "spend": cost tokens 11: never fits: the window grants 10 at most`},
		"unknown unit": {func(r *throttle.Request) { r.Cost = map[string]int64{"bytes": 1} },
			`throttle: policy "p": cost bytes 1: no window counts this unit, but requests, tokens`},
		"unit that breaks lines": {func(r *throttle.Request) { r.Cost = map[string]int64{"a\nb": 1} },
			`throttle: policy "p": cost "a\nb" 1: no window counts this unit, but requests, tokens`},
		"negative": {func(r *throttle.Request) { r.Cost = map[string]int64{"tokens": -1} },
			`throttle: policy "p": cost tokens -1: must be 0 to 1000000000000`},
		"huge": {func(r *throttle.Request) { r.Cost = map[string]int64{"tokens": math.MaxInt64} },
			`throttle: policy "p": cost tokens 9223372036854775807: must be 0 to 1000000000000`},
		"no tenant": {func(r *throttle.Request) { r.Tenant = "" },
			`throttle: policy "p": tenant "": must be 1 to 512 bytes: a window is counted by it`},
		"long tenant": {func(r *throttle.Request) { r.Tenant = strings.Repeat("x", 513) },
			`throttle: policy "p": tenant "` + strings.Repeat("x", 64) + `...": must be 1 to 512 bytes: a window is counted by it`},
		"no user": {func(r *throttle.Request) { r.Attributes = nil },
			`throttle: policy "p": attribute user "": must be 1 to 512 bytes: a window is counted by it`},
		"hold below 0": {func(r *throttle.Request) { r.MaxHold = -s },
			`throttle: policy "p": max hold -1s: must not be below 0`},
		"ticket without an ID": {func(r *throttle.Request) { r.Ticket.Queue = "q" },
			`throttle: policy "p": ticket "": must have an ID`},
		"unknown policy": {func(r *throttle.Request) { r.Policy = "q" },
			`throttle: unknown policy "q"`},
	} {
		r := good
		tc.change(&r)
		_, err := l.Reserve(t.Context(), r)
		_, peeked := l.Peek(t.Context(), r)
		expect.That(t, err != nil && err.Error() == tc.want && peeked != nil && peeked.Error() == tc.want,
			name, err, peeked, "want", tc.want)
		expect.That(t, errors.As(err, new(*throttle.RequestError)) || errors.Is(err, throttle.ErrUnknownPolicy),
			name, err, "is of no class")
	}
	expect.Equal(t, Dump(t, client), before)
}

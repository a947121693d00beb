package throttle_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

const (
	us = time.Microsecond
	ms = time.Millisecond
	s  = time.Second
	m  = time.Minute
	h  = time.Hour
)

// The whole of it in one policy: a request takes from all windows or none, and a denied one learns when it will fit.
func TestReserveTakesFromAllWindowsOrNone(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, clock := limitertest.NewWithClock(t, client, limitertest.Policy(
			throttle.Window{Name: "per-minute", Limit: 4, Period: m},
			throttle.Window{Name: "burst", Limit: 2, Period: 3 * s},
		))
		first := limitertest.Reserve(t, l, limitertest.Acme(2))
		expect.Require(t, first.Granted && slices.Equal(limitertest.Used(first), []int64{2, 2}), "the first 2 of 2", first)

		denied := limitertest.Reserve(t, l, limitertest.Acme(1))
		expect.That(t, !denied.Granted && denied.RetryIn == 3*s &&
			slices.Equal(limitertest.Used(denied), []int64{2, 2}),
			"the third within 3 s takes nothing, and fits in 3 s", denied)
		expect.Equal(t, denied.Reason(), "throttled: p/burst, tenant acme, 3s")

		other := limitertest.Acme(1)
		other.Tenant = "initech"
		expect.Equal(t, limitertest.Reserve(t, l, other).Granted, true, "each tenant has a count of its own")

		clock.Set(3*s - us)
		expect.Equal(t, limitertest.Reserve(t, l, limitertest.Acme(1)).Granted, false, "1 microsecond early")
		clock.Set(3 * s)
		second := limitertest.Reserve(t, l, limitertest.Acme(2))
		expect.That(t, second.Granted && slices.Equal(limitertest.Used(second), []int64{4, 2}),
			"at the time that the denial named", second)

		clock.Set(6 * s)
		limitertest.WantDenied(t, limitertest.Peek(t, l, limitertest.Acme(1)), 54*s)
		expect.Equal(t, limitertest.Used(limitertest.Cancel(t, l, second.Reservation)), []int64{2, 0})
		expect.Equal(t, limitertest.Peek(t, l, limitertest.Acme(2)).Granted, true)
	})
}

// A step is one request at a time after midnight, and the answer that it must get.
type step struct {
	at        time.Duration
	cost      int64
	deniedBy  string        // the windows that deny, or "" if granted
	remaining []int64       // by window
	retryIn   time.Duration // 0 if granted
}

// run sends the steps one after the other, and asks Peek before each.
func run(t *testing.T, l *throttle.Limiter, c *limitertest.Clock, policy string, steps []step) {
	t.Helper()
	for i, want := range steps {
		c.Set(want.at)
		r := limitertest.Acme(want.cost)
		r.Policy = policy
		peeked := limitertest.Peek(t, l, r)
		d := limitertest.Reserve(t, l, r)
		expect.That(t, peeked.Granted == d.Granted && peeked.RetryIn == d.RetryIn,
			"step", i, "at", want.at, "Peek says", peeked.Granted, peeked.RetryIn, "Reserve", d.Granted, d.RetryIn)
		var denied []string
		var remaining []int64
		for _, w := range d.Windows {
			if w.Denied {
				denied = append(denied, w.Name)
			}
			remaining = append(remaining, w.Remaining)
		}
		expect.Equal(t, step{want.at, want.cost, strings.Join(denied, " "), remaining, d.RetryIn}, want, "step", i)
		expect.That(t, d.Granted == (want.deniedBy == "") && d.At.Equal(limitertest.At(want.at)), "step", i, want.at, d)
	}
}

// countdown is n steps of cost 1 at one time, whose remaining units go down from what first says.
func countdown(n int, first step) []step {
	var steps []step
	for i := range n {
		next := first
		next.remaining = slices.Clone(first.remaining)
		for j := range next.remaining {
			next.remaining[j] -= int64(i)
		}
		steps = append(steps, next)
	}
	return steps
}

func TestDecisionsStepByStep(t *testing.T) {
	const burst, minute = "burst", "per-minute"
	type table struct {
		windows []throttle.Window
		steps   []step
	}
	limitertest.EachCase(t, map[string]table{
		"20 a minute and 5 per 3 seconds": {
			[]throttle.Window{{Name: minute, Limit: 20, Period: m}, {Name: burst, Limit: 5, Period: 3 * s}},
			slices.Concat(
				countdown(5, step{0, 1, "", []int64{19, 4}, 0}),
				slices.Repeat([]step{{0, 1, burst, []int64{15, 0}, 3 * s}}, 3),
				[]step{{3*s - us, 1, burst, []int64{15, 0}, us}},
				countdown(5, step{3 * s, 1, "", []int64{14, 4}, 0}),
				[]step{{3 * s, 1, burst, []int64{10, 0}, 3 * s}},
				countdown(5, step{6 * s, 1, "", []int64{9, 4}, 0}),
				countdown(5, step{9 * s, 1, "", []int64{4, 4}, 0}),
				[]step{{9 * s, 1, "per-minute burst", []int64{0, 0}, 51 * s}},
				slices.Repeat([]step{{12 * s, 1, minute, []int64{0, 5}, 48 * s}}, 7),
				[]step{{m - us, 1, minute, []int64{0, 5}, us}},
				countdown(5, step{m, 1, "", []int64{4, 4}, 0}),
				[]step{{m, 1, "per-minute burst", []int64{0, 0}, 3 * s}},
			),
		},
		"sliding costs": {
			[]throttle.Window{{Name: "w", Limit: 10, Period: 10 * s}},
			[]step{
				{0, 4, "", []int64{6}, 0},
				{1 * s, 3, "", []int64{3}, 0},
				{1 * s, 3, "", []int64{0}, 0},
				{2 * s, 4, "w", []int64{0}, 8 * s},
				{2 * s, 5, "w", []int64{0}, 9 * s},
				{2 * s, 10, "w", []int64{0}, 9 * s},
				{2 * s, 0, "", []int64{0}, 0},
				{10 * s, 5, "w", []int64{4}, 1 * s},
				{10 * s, 4, "", []int64{0}, 0},
				{11 * s, 6, "", []int64{0}, 0},
			},
		},
		"fixed resets on its boundary": {
			[]throttle.Window{{Name: "w", Algorithm: throttle.AlgorithmFixed, Limit: 20, Period: m}},
			[]step{
				{59 * s, 20, "", []int64{0}, 0},
				{m - us, 1, "w", []int64{0}, us},
				{m, 20, "", []int64{0}, 0},
				{m, 20, "w", []int64{0}, m},
				{2*m + 30*s, 15, "", []int64{5}, 0},
				{2*m + 31*s, 6, "w", []int64{5}, 29 * s},
				{2*m + 31*s, 5, "", []int64{0}, 0},
			},
		},
		"fixed with a margin": {
			[]throttle.Window{{Name: "w", Algorithm: throttle.AlgorithmFixed, Limit: 20, Period: m, Margin: 5 * s}},
			[]step{
				{54 * s, 20, "", []int64{0}, 0},
				{m + 4*s, 1, "w", []int64{0}, s}, // the reset has not taken effect
				{m + 5*s, 10, "", []int64{10}, 0},
				{m + 56*s, 8, "", []int64{2}, 0},         // these count after the reset, too
				{m + 57*s, 13, "w", []int64{2}, m + 8*s}, // of which the reset leaves no room for 13
				{2*m + 5*s, 13, "w", []int64{12}, m},
				{2*m + 5*s, 12, "", []int64{0}, 0},
				{3*m + 5*s, 20, "", []int64{0}, 0},
			},
		},
		"gcra 10 a minute": {
			[]throttle.Window{{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Period: m}},
			slices.Concat(
				countdown(10, step{0, 1, "", []int64{9}, 0}),
				[]step{
					{0, 1, "w", []int64{0}, 6 * s},
					{6*s - us, 1, "w", []int64{0}, us},
					{6 * s, 1, "", []int64{0}, 0},
					{12 * s, 1, "", []int64{0}, 0},
					{12 * s, 3, "w", []int64{0}, 18 * s},
					{30*s - us, 3, "w", []int64{2}, us},
					{30 * s, 3, "", []int64{0}, 0},
					{10 * m, 10, "", []int64{0}, 0},
				},
			),
		},
	}, func(t *testing.T, client *redis.Client, table table) {
		l, c := limitertest.NewWithClock(t, client, limitertest.Policy(table.windows...))
		run(t, l, c, "p", table.steps)
	})
}

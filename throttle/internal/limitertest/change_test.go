package limitertest

import (
	"cmp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

func TestWindowsComeAndGo(t *testing.T) {
	a := throttle.Window{Name: "a", Limit: 10, Period: m}
	b := throttle.Window{Name: "b", Algorithm: throttle.AlgorithmFixed, Limit: 10, Period: m}
	g := throttle.Window{Name: "g", Algorithm: throttle.AlgorithmGCRA, Limit: 10, Period: m}
	renamed := a
	renamed.Name = "z"
	l, c := NewWithClock(t, RedisClient(t), Policy(a, b))
	for i, step := range []struct {
		at        time.Duration
		windows   []throttle.Window
		remaining []int64
	}{
		{0, []throttle.Window{a, b}, []int64{9, 9}},
		{0, []throttle.Window{a, b, g}, []int64{8, 8, 9}}, // added
		{0, []throttle.Window{g, a, b}, []int64{8, 7, 7}}, // moved
		{0, []throttle.Window{a}, []int64{6}},             // removed
		{0, []throttle.Window{renamed}, []int64{9}},       // renamed: another window
		{0, []throttle.Window{a, renamed}, []int64{5, 8}}, // known again
		{0, []throttle.Window{b}, []int64{6}},             // kept all the while
		{6 * s, []throttle.Window{g}, []int64{8}},         // and drained meanwhile
		{m, []throttle.Window{a, b}, []int64{9, 9}},       // but not for ever
	} {
		c.Set(step.at)
		SetPolicy(t, l, step.windows...)
		expect.Equal(t, remaining(Reserve(t, l, Acme(1))), step.remaining, i)
	}
}

// What was granted before a window came is corrected afterwards: the window keeps what it counts.
func TestWhatAWindowNeverCountedIsNotGivenBack(t *testing.T) {
	old := throttle.Window{Name: "old", Limit: 100, Period: h}
	EachCase(t, map[string]throttle.Window{
		"fixed":     {Algorithm: throttle.AlgorithmFixed, Period: h},
		"gcra":      {Algorithm: throttle.AlgorithmGCRA, Period: h},
		"calendar":  {Algorithm: throttle.AlgorithmCalendar, Resets: "@daily"},
		"same name": {Name: "old", Algorithm: throttle.AlgorithmFixed, Period: h},
		"scope":     {Name: "old", Algorithm: throttle.AlgorithmFixed, Period: h, Shared: true},
	}, func(t *testing.T, client *redis.Client, w throttle.Window) {
		old := old
		if w.Shared {
			old.Algorithm = throttle.AlgorithmFixed
		}
		w.Name, w.Limit = cmp.Or(w.Name, "new"), 10
		l, c := NewWithClock(t, client, Policy(old))
		var taken []throttle.Reservation
		for range 2 {
			taken = append(taken, Reserve(t, l, Acme(4)).Reservation)
		}
		c.Set(s)
		if w.Name == old.Name {
			SetPolicy(t, l, w)
		} else {
			SetPolicy(t, l, old, w)
		}
		Reserve(t, l, Acme(10))
		last := func() int64 { used := Used(Peek(t, l, Acme(1))); return used[len(used)-1] }
		Cancel(t, l, taken[0])
		expect.Equal(t, last(), 10)
		expect.Must(t, expect.ErrOf(taken[1].Settle(t.Context(), map[string]int64{throttle.Requests: 1})))
		expect.Equal(t, last(), 10)
		if w.Name != old.Name {
			WantUsed(t, l, Acme(1), 11)
		}
	})
}

// Work that began before the last window of a unit went may report what it used: an error would fail it.
func TestAUnitThatIsNotCountedAnyMoreIsSettled(t *testing.T) {
	client := RedisClient(t)
	requests := throttle.Window{Name: "requests", Limit: 10, Period: m}
	l, _ := NewWithClock(t, client, Policy(requests, throttle.Window{Name: "tokens", Unit: "tokens", Limit: 10, Period: m}))
	r := Reserve(t, l, Acme(1)).Reservation
	SetPolicy(t, l, requests)
	expect.Must(t, expect.ErrOf(r.Settle(t.Context(), map[string]int64{"tokens": 5, throttle.Requests: 3})))
	WantUsed(t, l, Acme(1), 3)
	_, err := r.Settle(t.Context(), map[string]int64{"pages": 5})
	expect.Err(t, err, new(*throttle.RequestError), "a unit that was never counted")
}

// It counts another unit by now: of that, the requests before took nothing.
func TestAWindowOfAnotherUnitGivesNothingBack(t *testing.T) {
	client := RedisClient(t)
	fixed := func(name, unit string) throttle.Window {
		return throttle.Window{Name: name, Unit: unit, Algorithm: throttle.AlgorithmFixed, Limit: 10, Period: h}
	}
	l, _ := NewWithClock(t, client, Policy(fixed("changed", throttle.Requests), fixed("kept", "tokens")))
	r := Acme(1)
	r.Cost["tokens"] = 5
	taken := Reserve(t, l, r).Reservation
	SetPolicy(t, l, fixed("changed", "tokens"), fixed("kept", "tokens"))
	r.Cost = map[string]int64{"tokens": 4}
	Reserve(t, l, r)
	Cancel(t, l, taken)
	used := Used(Peek(t, l, r))
	expect.That(t, used[0] >= 4 && used[1] == 4, "used", used, "want those of the second")
}

// A worker of an older release does not know the window that the newer one has added.
func TestOlderWorkersKeepWhatNewerOnesCount(t *testing.T) {
	known := throttle.Window{Name: "known", Limit: 10, Period: m}
	added := throttle.Window{Name: "added", Limit: 10, Period: h}
	client := RedisClient(t)
	older, c := NewWithClock(t, client, Policy(known))
	newer := NewByClock(t, client, c, Policy(known, added))
	Reserve(t, newer, Acme(3))
	Cancel(t, older, Reserve(t, older, Acme(1)).Reservation)
	c.Set(2 * m) // what the older one knows has ended
	Reserve(t, older, Acme(1))
	WantUsed(t, newer, Acme(1), 1, 3)
}

// A state that another algorithm left cannot be read, and is there when that algorithm is back.
func TestAChangedAlgorithmStartsEmptyAndForgetsNothing(t *testing.T) {
	client := RedisClient(t)
	w := throttle.Window{Name: "w", Limit: 10, Period: m}
	l, _ := NewWithClock(t, client, Policy(w))
	for round := range int64(2) {
		for _, algorithm := range []throttle.Algorithm{throttle.AlgorithmGCRA, throttle.AlgorithmSliding, throttle.AlgorithmFixed} {
			w.Algorithm = algorithm
			SetPolicy(t, l, w)
			expect.Equal(t, Reserve(t, l, Acme(4)).Windows[0].Used, 4*(round+1), algorithm, round)
		}
	}
}

// While a deployment rolls, workers of two policies run beside each other. They share a count or
// have one each: together they never grant more than both limits.
func TestWorkersOfTwoPoliciesEachHoldTheirLimit(t *testing.T) {
	variants := map[string]throttle.Policy{}
	for name, w := range map[string]throttle.Window{
		"sliding":         {Period: h},
		"sliding, longer": {Period: 24 * h},
		"sliding, scope":  {Period: h, Shared: true},
		"fixed":           {Algorithm: throttle.AlgorithmFixed, Period: h},
		"fixed, longer":   {Algorithm: throttle.AlgorithmFixed, Period: 24 * h},
		"gcra":            {Algorithm: throttle.AlgorithmGCRA, Period: 100 * h},
		"gcra, slower":    {Algorithm: throttle.AlgorithmGCRA, Period: 200 * h},
		"calendar":        {Algorithm: throttle.AlgorithmCalendar, Resets: "@monthly"},
		"calendar, daily": {Algorithm: throttle.AlgorithmCalendar, Resets: "@daily"},
		"concurrency":     {Algorithm: throttle.AlgorithmConcurrency, Lease: h},
	} {
		w.Name, w.Limit = "w", 5
		variants[name] = Policy(w)
		w.Limit = 3
		variants[name+", of 3"] = Policy(w)
	}
	client := RedisClient(t)
	for older, a := range variants {
		for newer, b := range variants {
			same, smaller := strings.CutSuffix(newer, ", of 3")
			if older >= newer || strings.HasSuffix(older, "of 3") || smaller && older != same {
				continue
			}
			client.FlushDB(t.Context())
			first, c := NewWithClock(t, client, a)
			both := []*throttle.Limiter{first, NewByClock(t, client, c, b)}
			limits := []int64{a.Windows[0].Limit, b.Windows[0].Limit}
			granted := []int64{0, 0}
			for i := range 14 {
				if Reserve(t, both[i%2], Acme(1)).Granted {
					granted[i%2]++
				}
			}
			expect.That(t, granted[0] <= limits[0] && granted[1] <= limits[1],
				older, "beside", newer, "granted", granted, limits)
		}
	}
}

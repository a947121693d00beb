package dispatch

import (
	"testing"
	"time"
)

// The clock of Redis is 300 ms behind this machine's. Calls take a while on their way.
func TestTheClockOfRedisIsLearnt(t *testing.T) {
	const ms = time.Millisecond
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	behind := 300 * ms
	var c clock
	for _, x := range []struct {
		name     string
		after    time.Duration // from the start to the decision
		to, from time.Duration // on the way to Redis, and back
		set      time.Duration // by how much Redis' clock is set forward before
		late     time.Duration // how late its times are taken to be, at most
	}{
		{name: "the first call", to: ms, from: 5 * ms, late: 5 * ms},
		{name: "a quick call", after: 10 * ms, to: ms, from: ms / 4, late: ms / 4},
		{name: "a slow call teaches nothing", after: 20 * ms, to: ms, from: 50 * ms, late: ms/4 + ms/10},
		{name: "clocks drift", after: 30 * time.Second, to: ms, from: 50 * ms, late: 2 * ms},
		{name: "set forward", after: 31 * time.Second, to: ms, from: ms, set: 200 * ms, late: ms},
		{name: "set back", after: 32 * time.Second, to: ms, from: ms, set: -400 * ms, late: ms},
	} {
		behind -= x.set
		decided := start.Add(x.after)
		at := decided.Add(-behind)
		c.learn(at, decided.Add(-x.to), decided.Add(x.from))
		if late := c.here(at).Sub(decided); late < 0 || late > x.late {
			t.Errorf("%s: %v late, want at most %v", x.name, late, x.late)
		}
	}
}

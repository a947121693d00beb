package main

import (
	"errors"
	"math"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestMediansAreOfEachFigure(t *testing.T) {
	rounds := []float64{3, 1, 2}
	figures := medians(len(rounds), func(round int) []figure {
		return []figure{{Name: "a", Value: rounds[round]}, {Name: "b", Value: 10 * rounds[round], AtMost: new(15.)}}
	})
	expect.Require(t, len(figures) == 2, "medians:", figures)
	expect.That(t, figures[0].Value == 2 && !figures[0].missed(),
		"a is", figures[0].Value, ", missed", figures[0].missed(), "; want 2, which has no bar")
	expect.That(t, figures[1].Value == 20 && figures[1].missed(),
		"b is", figures[1].Value, ", missed", figures[1].missed(), "; want 20, above its bar")
}

func TestAFailureEndsACase(t *testing.T) {
	failed, ended := errors.New("failed"), ""
	err := scenarioOptions{}.withCleanups(func(o scenarioOptions) {
		o.cleanup(func() { ended += "first" })
		o.cleanup(func() { ended += "last, " })
		inParallel(3, 2, func(int) { must(0, failed) })
		t.Error("it went on")
	})
	expect.That(t, errors.Is(err, failed) && ended == "last, first", err, "; at the end:", ended)
}

func TestNothingMeasuredClearsNoBar(t *testing.T) {
	for _, f := range []figure{{Value: math.NaN(), AtMost: new(1.)}, {Value: math.NaN(), AtLeast: new(1.)}} {
		expect.That(t, f.missed(), "NaN clears", f.bar())
	}
}

// twoPerSecond are six grants of two per second, the last pair 10 ms late, each handler 2 ms after its grant.
func twoPerSecond() []start {
	var all []start
	for i, ms := range []int{0, 1, 1000, 1001, 2010, 2011} {
		granted := time.UnixMilli(int64(ms))
		all = append(all, start{at: granted.Add(2 * time.Millisecond), granted: granted, id: strconv.Itoa(i)})
	}
	return all
}

func TestUtilizationAndLatenessByGrants(t *testing.T) {
	r, starts := rate{2, time.Second}, twoPerSecond()
	u := r.utilization(starts)
	expect.That(t, math.Abs(u-2000./2011) <= 1e-9, "utilization", u, "want 2 s of 2.011 s")
	expect.Equal(t, r.excess(starts), 0, "excess", "want 0")
	taken, running := r.fits(starts)
	q := quantile(taken, 1)
	expect.That(t, len(taken) == 4 && q == 10*time.Millisecond, len(taken), "fits, the last taken after", q, "want 4, 10 ms")
	expect.Equal(t, quantile(running, 0.5), 12*time.Millisecond, "running after", "want 12 ms")
	starts[2].granted = starts[2].granted.Add(-time.Millisecond)
	expect.Equal(t, r.excess(starts), 1, "excess of a grant that is 1 ms early", "want 1")
}

func TestFairSharesHaveNoError(t *testing.T) {
	var fair, fifo []start
	for i := range 30 {
		fair = append(fair, start{tenant: strconv.Itoa(i % 3)})
		fifo = append(fifo, start{tenant: strconv.Itoa(i / 10)})
	}
	if e := shareErrorOf(fair, 3); math.Abs(e-(10./28*3-1)) > 1e-9 { // when the first has run all its ten
		t.Errorf("in turn: %v, want a turn of 28", e)
	}
	expect.Equal(t, shareErrorOf(fifo, 3), 2, "one after the other", "want 2: one tenant has three times its share")
}

func TestAGrantIsMatchedToItsCall(t *testing.T) {
	at := func(ms int64) time.Time { return time.UnixMilli(ms) }
	calls := []scriptCall{{sent: at(0), answered: at(10)}, {sent: at(20), answered: at(40)}, {sent: at(30), answered: at(35)}}
	for granted, sent := range map[int64]int64{5: 0, 15: 15, 25: 20, 32: 30, 38: 20, 50: 50} {
		got := sentFor(calls, at(granted))
		expect.That(t, got.Equal(at(sent)), "granted at", granted, "sent at", got.UnixMilli(), "want", sent)
	}
}

func TestWrongResultsAreNotMeasured(t *testing.T) {
	starts := twoPerSecond()
	err := eachRanOnce(starts, len(starts), true)
	expect.That(t, err == nil, err)
	expect.That(t, eachRanOnce(starts[1:], len(starts), true) != nil, "a task that did not run went unnoticed")
	expect.That(t, eachRanOnce(append(starts, starts[0]), len(starts), true) != nil, "a task that ran twice went unnoticed")
	starts[0].granted = time.Time{}
	expect.That(t, eachRanOnce(starts, len(starts), true) != nil, "a task without a grant went unnoticed")
}

package main

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestAnAPIRefusesWhatIsAboveItsLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		each, all := limit{calls: 2, span: 10 * time.Second, perTenant: true}, limit{calls: 3, span: 4 * time.Second}
		a := &api{limits: []limit{each, all}, served: map[string][]time.Time{}}
		start := time.Now()
		for i, step := range []struct {
			at     time.Duration
			tenant string
			wait   time.Duration
		}{
			{0, "a", 0},
			{time.Second, "a", 0},
			{time.Second, "a", 9 * time.Second},
			{2 * time.Second, "b", 0},
			{2 * time.Second, "b", 2 * time.Second},
			{4*time.Second - 1, "c", 1},
			{4 * time.Second, "c", 0},
			{10 * time.Second, "a", 0},
			{10 * time.Second, "a", time.Second},
		} {
			time.Sleep(time.Until(start.Add(step.at)))
			if wait := a.admit(step.tenant); wait != step.wait {
				t.Errorf("step %d: wait %v, want %v", i, wait, step.wait)
			}
		}
		expect.That(t, a.mostServed(each) == 2 && a.mostServed(all) == 3, "served", a.served)
		expect.Equal(t, a.mostServed(limit{calls: 9, span: 4*time.Second + 1}), 4,
			"a span of 4 s and a little held", "calls, want 4")
	})
}

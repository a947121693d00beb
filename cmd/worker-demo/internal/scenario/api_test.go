package scenario

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestAnAPIRefusesWhatIsAboveItsLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := &API{Limits: []APILimit{
			{Name: "each", Calls: 2, Span: 10 * time.Second, PerTenant: true},
			{Name: "all", Calls: 3, Span: 4 * time.Second},
		}}
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
		if a.Refused("a") != 2 || a.Refused("b") != 1 || a.Refused("d") != 0 {
			t.Errorf("refused %v", a.refused)
		}
		if a.MostServed(a.Limits[0], "a") != 2 || a.MostServed(a.Limits[1], "b") != 3 || a.MostServed(a.Limits[0], "d") != 0 {
			t.Errorf("served %v", a.served)
		}
		if most := a.MostServed(APILimit{Calls: 9, Span: 4*time.Second + 1}, ""); most != 4 {
			t.Errorf("a span of 4 s and a little held %d calls, want 4", most)
		}
	})
}

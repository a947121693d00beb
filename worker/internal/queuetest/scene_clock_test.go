package queuetest

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// The clock of Redis goes 61 s ahead, and later 100 s back, while tasks wait in line. No limit is
// exceeded by that clock. A clock that goes ahead delays no task. One that was set back delays all
// until it has caught up, which is logged once, within seconds. All tasks run, in order.
func TestSceneClockOfRedisMovesUnderABacklog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		client := m.Client(t)
		p := sitetest.Shared(5, 5*time.Second)
		// Miniredis counts TTLs down, and does not see that its clock was set back.
		p.Windows = append(p.Windows, throttle.Window{Name: "hour", Limit: 1000, Period: time.Hour, Scope: throttle.ScopeShared})
		s := sitetest.New(t, client, p)
		var ahead atomic.Int64
		defer sitetest.SetClock(m.Miniredis, &ahead)()
		d, l := newDiary(), sitetest.NewLedger()
		s.Serve(d.handle, l.Watch, sitetest.Calm)
		s.JoinMany(s.Client(s.AnotherLimiter()), "acme", 0, 100)
		time.Sleep(7500 * time.Millisecond) // 10 have run
		ran := func(want int, when string) {
			t.Helper()
			if n := l.Count(); n != want {
				t.Errorf("%s: %d have run, want %d", when, n, want)
			}
		}
		ran(10, "before")
		ahead.Store(int64(61 * time.Second))
		time.Sleep(5 * time.Second)
		ran(15, "5 s after the clock went ahead") // the window opened at once
		ahead.Store(int64(-39 * time.Second))
		time.Sleep(3 * time.Second)
		if n := s.Journal.Count("the clock of Redis was set back"); n != 1 {
			t.Errorf("want it logged within 3 s:\n%s", s.Journal)
		}
		before := l.Count()
		time.Sleep(90 * time.Second)
		ran(before, "while the clock is behind")
		time.Sleep(10 * time.Second)
		if l.Count() == before {
			t.Error("no task runs after the clock has caught up")
		}
		s.SleepUntil(l, 100, 2*time.Minute)
		if over := l.Excess(5, 5*time.Second); over > 0 {
			t.Errorf("%d were granted above the limit", over)
		}
		if s.Journal.Count("the clock of Redis was set back") != 1 || s.Journal.Count("\n") != 1 {
			t.Errorf("want it logged once:\n%s", s.Journal)
		}
		s.WantInOrder(l)
		s.WantNobodyInLine()
	})
}

// Package linetest tests tasks that wait in line: their order, pace and fairness, what holds them
// up, and what changes meanwhile. Read TestBacklogDrains first, then TestWeightedTenantsShare.
package linetest

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A backlog of a plain client drains at the rate of the tightest window, in order, and a task
// wakes at most twice: to be denied, and to run.
func TestBacklogDrains(t *testing.T) {
	t.Parallel()
	minuteAndBurst := sitetest.Policy(20, time.Minute)
	minuteAndBurst.Windows = append(minuteAndBurst.Windows, throttle.Window{Name: "burst", Limit: 5, Period: 3 * time.Second})
	for _, row := range []struct {
		name        string
		policy      throttle.Policy
		limit       int
		period      time.Duration
		tasks       int
		utilization float64
		pace        func(*asynq.Config, *worker.Config)
	}{
		{"20 per second", sitetest.Policy(20, time.Second), 20, time.Second, 100, 0.95, sitetest.Quick},
		{"60 per 3 seconds", sitetest.Policy(60, 3*time.Second), 60, 3 * time.Second, 120, 0.95, sitetest.Quick},
		{"20 per minute and 5 per 3 seconds", minuteAndBurst, 20, time.Minute, 60, 0.9, sitetest.Calm},
		{"5 per 100 ms", sitetest.Policy(5, 100*time.Millisecond), 5, 100 * time.Millisecond, 100, 0.85, sitetest.Quick},
		{"20 per second, shared", sitetest.Shared(20, time.Second), 20, time.Second, 100, 0.95, sitetest.Quick},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sitetest.NewInBubble(t, row.policy)
				l := sitetest.NewLedger()
				s.EnqueueMany("acme", 0, row.tasks)
				s.Serve(s.Ok, l.Watch, row.pace, s.Apart)
				s.Serve(s.Ok, l.Watch, row.pace, s.Apart)
				s.SleepUntil(l, row.tasks, 2*time.Duration(row.tasks/row.limit)*row.period)
				mean, most := l.WakesPerTask()
				if most > 2 {
					t.Errorf("%.2f wakes a task, at most %d", mean, most)
				}
				for _, w := range row.policy.Windows {
					if n := l.Excess(int(w.Limit), w.Period); n != 0 {
						t.Errorf("%d more than the limit of %d per %v", n, w.Limit, w.Period)
					}
				}
				u := l.Utilization(row.limit, row.period)
				if u < row.utilization {
					t.Errorf("utilization %.2f: want %.2f", u, row.utilization)
				}
				half, late := l.Late()
				t.Logf("wakes %.3f, at most %d; utilization %.3f; late %v, %v", mean, most, u, half, late)
				s.WantInOrder(l)
				s.WantNobodyInLine()
				s.WantCounters(sitetest.Counters{Processed: int64(row.tasks)})
			})
		})
	}
}

// A planned backlog is never denied.
func TestPlannedBacklogDrains(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, sitetest.Shared(20, time.Second))
		l := sitetest.NewLedger()
		client := s.Client(s.AnotherLimiter(s.Redis))
		s.Serve(s.Ok, l.Watch, sitetest.Quick, s.Apart)
		s.Serve(s.Ok, l.Watch, sitetest.Quick, s.Apart)
		infos := s.JoinMany(client, "acme", 0, 200)
		s.SleepUntil(l, 200, 20*time.Second)
		if mean, most := l.WakesPerTask(); most > 1 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		} else {
			t.Logf("%.2f wakes a task, at most %d, utilization %.3f", mean, most, l.Utilization(20, time.Second))
		}
		if n := l.Excess(20, time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		if u := l.Utilization(20, time.Second); u < 0.95 {
			t.Errorf("utilization %.2f", u)
		}
		s.WantInOrder(l)
		for i, g := range l.Sorted() {
			if off := g.At.Sub(infos[i].Start.At); off < -time.Second || off > time.Second {
				t.Errorf("%s started %v after it was to", g.ID, off)
			}
		}
		s.WantNobodyInLine()
		s.WantCounters(sitetest.Counters{Processed: 200})
	})
}

// Four tenants share a window by weight, two of which come later, and nothing is left idle.
func TestWeightedTenantsShare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := sitetest.Shared(20, 10*time.Second)
		p.Tenants = map[string]throttle.Tenant{"dune": {Weight: 2}}
		s := sitetest.NewInBubble(t, p)
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Calm, s.Apart)
		s.Serve(s.Ok, l.Watch, sitetest.Calm, s.Apart)
		s.EnqueueMany("acme", 0, 130)
		s.EnqueueMany("beta", 0, 120)
		time.Sleep(50 * time.Second)
		s.EnqueueMany("chip", 0, 90)
		s.EnqueueMany("dune", 0, 140)
		time.Sleep(20 * time.Second)
		from := time.Now()
		time.Sleep(70 * time.Second)
		to := time.Now()
		time.Sleep(2 * time.Minute)

		const tasks = 130 + 120 + 90 + 140
		if n := l.Count(); n != tasks {
			t.Fatalf("%d of %d tasks were granted", n, tasks)
		}
		share := map[string]float64{}
		total := 0.0
		for _, g := range l.Sorted() {
			if g.At.After(from) && g.At.Before(to) {
				share[g.Tenant]++
				total++
			}
		}
		for tenant, weight := range map[string]float64{"acme": 1, "beta": 1, "chip": 1, "dune": 2} {
			fair := weight / 5
			if off := share[tenant]/total/fair - 1; off < -0.05 || off > 0.05 {
				t.Errorf("%s had %.3f of what was granted while all waited: want %.3f", tenant, share[tenant]/total, fair)
			}
		}
		// Those that waited before the others came start later than expected, and do not wake for that.
		mean, most := l.WakesPerTask()
		if most > 2 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		u := l.Utilization(20, 10*time.Second)
		if u < 0.95 {
			t.Errorf("utilization %.3f", u)
		}
		if n := l.Excess(20, 10*time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		t.Logf("wakes %.2f, at most %d, utilization %.3f, shares %v of %v", mean, most, u, share, total)
		s.WantNobodyInLine()
		s.WantCounters(sitetest.Counters{Processed: tasks})
	})
}

// Four tenants, the last of weight 2, one of which has much waiting when the others come.
func TestTenantsThatComeLaterWakeNobodyInVain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := sitetest.Shared(50, time.Second)
		p.Tenants = map[string]throttle.Tenant{"dune": {Weight: 2}}
		s := sitetest.NewInBubble(t, p)
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Brisk, s.Apart)
		s.Serve(s.Ok, l.Watch, sitetest.Brisk, s.Apart)
		s.EnqueueMany("acme", 0, 300)
		time.Sleep(2 * time.Second)
		s.EnqueueMany("beta", 0, 100)
		s.EnqueueMany("chip", 0, 100)
		time.Sleep(2 * time.Second)
		s.EnqueueMany("dune", 0, 100)
		s.SleepUntil(l, 600, 30*time.Second)
		mean, most := l.WakesPerTask()
		if most > 2 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		u := l.Utilization(50, time.Second)
		if u < 0.95 {
			t.Errorf("utilization %.3f", u)
		}
		if n := l.Excess(50, time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		t.Logf("wakes %.2f, at most %d, utilization %.3f", mean, most, u)
	})
}

// A client alone, whose process ends before any worker's begins, leaves a line that is found.
func TestTheLineOfAClientAloneIsFound(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, sitetest.Policy(1, 10*time.Second))
		s.Fill("acme") // so that none is pending, and only the line tells of them
		client := s.Client(s.AnotherLimiter(s.Redis))
		infos := s.JoinMany(client, "acme", 0, 3)
		client.Close()
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Brisk, s.Apart)
		s.SleepUntil(l, 3, 35*time.Second)
		for i, g := range l.Sorted() {
			if off := g.At.Sub(infos[i].Start.At); off < -time.Millisecond || off > 2*time.Second {
				t.Errorf("%s started %v after it was to", g.ID, off)
			}
			if n := l.WakesOf(g.ID); n != 1 {
				t.Errorf("%s woke %d times", g.ID, n)
			}
		}
		s.WantNobodyInLine()
	})
}

// Without any worker for a minute the line keeps its order, and drains at its rate afterwards.
func TestALineOutlastsAMinuteWithoutWorkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, sitetest.Shared(20, time.Second))
		l := sitetest.NewLedger()
		s.EnqueueMany("acme", 0, 300)
		server := s.Serve(s.Ok, l.Watch, sitetest.Brisk, s.Apart)
		time.Sleep(5 * time.Second)
		server.Shutdown()
		done := l.Count()
		time.Sleep(time.Minute)
		begun := time.Now()
		s.Serve(s.Ok, l.Watch, sitetest.Brisk, s.Apart)
		s.SleepUntil(l, 300, time.Minute)
		ideal := time.Duration(300-done) * time.Second / 20
		if took := l.Sorted()[299].At.Sub(begun); took > ideal*11/10 {
			t.Errorf("drained in %v: want %v", took, ideal)
		}
		if mean, most := l.WakesPerTask(); most > 2 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		if n := l.Excess(20, time.Second); n != 0 {
			t.Errorf("%d more than the limit", n)
		}
		s.WantInOrder(l)
		s.WantNobodyInLine()
	})
}

// Tasks deleted with asynq's Inspector leave the line when their turn comes, and their room is for
// the next.
func TestDeletedTasksLeaveTheLine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, sitetest.Shared(20, time.Second))
		l := sitetest.NewLedger()
		s.JoinMany(s.Client(s.AnotherLimiter(s.Redis)), "acme", 0, 260)
		for i := range 260 {
			if i >= 20 && i%2 == 0 {
				if err := s.Inspector.DeleteTask("default", fmt.Sprintf("acme-%04d", i)); err != nil {
					t.Fatal(err)
				}
			}
		}
		s.Serve(s.Ok, l.Watch, sitetest.Quick, s.Apart)
		s.SleepUntil(l, 140, 20*time.Second)
		// By judgement: half a second of seven may go to looks at deleted tasks.
		if u := l.Utilization(20, time.Second); u < 0.93 {
			t.Errorf("utilization %.3f", u)
		} else {
			t.Logf("utilization %.3f", u)
		}
		if mean, most := l.WakesPerTask(); most > 2 {
			t.Errorf("%.2f wakes a task, at most %d", mean, most)
		}
		s.WantNobodyInLine()
		s.WantCounters(sitetest.Counters{Processed: 140})
	})
}

package batch_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Nothing of a firing that is paused, that was forgotten, or whose hours have ended holds up its batch.
func TestNothingHoldsABatchUpForEver(t *testing.T) {
	t.Run("a paused firing is cancelled", func(t *testing.T) {
		pace := []throttle.Window{{Name: "pace", Limit: 1, Period: 10 * time.Second, Shared: true}}
		inBubble(t, pace, func(t *testing.T, s *batchSite) {
			s.serve(succeed)
			p := s.scheduler(batch.Batch{Name: "b", Tasks: calls(50), Tenants: batch.List("acme")})
			f := s.fire(p, "b")
			time.Sleep(25 * time.Second)
			expect.Must(s, p.Pause(t.Context(), f))
			time.Sleep(10 * time.Second)
			expect.Must(s, p.Cancel(t.Context(), f))
			time.Sleep(time.Minute)
			expect.Equal(t, s.status(p, f).State, batch.StateCancelled)
		})
	})
	t.Run("its last task ends after its hours", func(t *testing.T) {
		inBubble(t, many(), func(t *testing.T, s *batchSite) {
			var told atomic.Int64
			s.serve(func(ctx context.Context, task *asynq.Task) error {
				if task.Type() == "report" {
					told.Add(1)
					return nil
				}
				return work(ctx, 80*time.Second)
			})
			hours := batch.Hours{From: "00:01", To: "00:02"}
			p := s.scheduler(batch.Batch{Name: "b", Ended: "report", Hours: hours, Tasks: calls(3), Tenants: batch.List("acme")})
			f := s.fire(p, "b")
			time.Sleep(200 * time.Second)
			state := s.status(p, f).State
			expect.That(t, state == batch.StateDone && told.Load() == 1, state, "told", told.Load(), "times")
		})
	})
	for _, overlap := range []batch.Overlap{batch.OverlapSkip, batch.OverlapQueue} {
		t.Run("it was forgotten: "+string(overlap), func(t *testing.T) {
			inBubble(t, many(), func(t *testing.T, s *batchSite) {
				b := batch.Batch{Name: "b", Overlap: overlap, Tasks: calls(3), Tenants: batch.List("acme")}
				p := s.scheduler(b)
				expect.Must(s, p.Pause(t.Context(), s.fire(p, "b")))
				time.Sleep(5 * time.Second)
				p.kill()
				time.Sleep(32 * 24 * time.Hour) // nobody knows the batch
				p = s.scheduler(b)
				s.serve(succeed)
				time.Sleep(10 * time.Second)
				f := s.fire(p, "b")
				time.Sleep(20 * time.Second)
				expect.Equal(t, s.status(p, f).State, batch.StateDone)
			})
		})
	}
	t.Run("Redis's clock was ahead", func(t *testing.T) {
		inBubble(t, many(), func(t *testing.T, s *batchSite) {
			const key = "asynq:{default}:sluice:batch:b:last"
			expect.Must(s, s.Redis.HSet(t.Context(), key, "* * * * * UTC", time.Now().Add(30*24*time.Hour).Unix()).Err())
			p := s.scheduler(batch.Batch{Name: "b", Schedule: "* * * * *", Tasks: calls(3), Tenants: batch.List("acme")})
			time.Sleep(150 * time.Second)
			firings, err := p.Firings(t.Context(), "b", 10)
			expect.That(t, err == nil && len(firings) >= 2, "it fired", firings, err)
		})
	})
}

// Ticks of a changed schedule that are over do not fire: they begin when the schedule is first known.
func TestAChangedScheduleBeginsAnew(t *testing.T) {
	inBubble(t, many(), func(t *testing.T, s *batchSite) {
		b := batch.Batch{Name: "b", Schedule: "6 0 * * *", Missed: batch.MissedOnce}
		b.Tasks, b.Tenants = calls(3), batch.List("acme")
		p := s.scheduler(b)
		time.Sleep(5 * time.Minute)
		p.kill()
		b.Schedule = "2,7 0 * * *"
		p = s.scheduler(b)
		time.Sleep(time.Minute)
		expect.Equal(t, len(firings(s, p, 9)), 0)
		time.Sleep(2 * time.Minute)
		expect.Equal(t, len(firings(s, p, 9)), 1)
		p.kill()
		b.Schedule = "6 0 * * *" // it comes back: its tick while the other one held is over
		p = s.scheduler(b)
		time.Sleep(time.Minute)
		expect.Equal(t, len(firings(s, p, 9)), 1)
	})
}

// A firing that lasts is listed, and its tasks stay unique while they are held.
func TestAFiringLastsForWeeks(t *testing.T) {
	inBubble(t, many(), func(t *testing.T, s *batchSite) {
		unique := []asynq.Option{asynq.Unique(10 * time.Minute)}
		b := batch.Batch{Name: "b", Options: unique, Tasks: calls(3), Tenants: batch.List("acme")}
		var p *schedulerProcess
		var f batch.Firing
		for range 3 { // instead of a scheduler that runs all the time
			if p = s.scheduler(b); f.Batch == "" {
				f = s.fire(p, "b")
				s.wait(p, f, "it runs", func(st batch.Status) bool { return st.State == batch.StateRunning })
				expect.Must(s, p.Pause(t.Context(), f))
			}
			time.Sleep(5 * time.Second)
			p.kill()
			time.Sleep(20 * 24 * time.Hour)
		}
		p = s.scheduler(b)
		other := s.fire(p, "b")
		time.Sleep(5 * time.Second)
		firings, err := p.Firings(t.Context(), "b", 10)
		expect.That(t, err == nil && slices.Contains(firings, f), "not listed:", firings, err)
		expect.Equal(t, s.status(p, other).Rejected, 3, "refused as duplicates")
	})
}

// What the line refuses is rejected, in all that is told of the firing, also if the scheduler stops then. What could
// not join runs when it can, and holds nothing else up.
func TestWhatTheLineRefusesIsRejected(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(false, true), func(t *testing.T, stops bool) {
		s := fake(t, throttle.Window{Name: "own", Limit: 1, Period: 10 * time.Second})
		policies, busy := s.Limiter.Policies(), atomic.Bool{}
		policies[0].Shards = 2 // one for each tenant
		expect.Must(s, s.Limiter.SetPolicies(policies))
		s.tenants = func(_ context.Context, _, tenant string) (_ throttle.Tenant, found bool, err error) {
			if busy.Load() && tenant == "b" {
				err = errors.New("the pool is busy")
			}
			return throttle.Tenant{}, false, err
		}
		refuses := []asynq.Option{worker.MaxWait(65 * time.Second)}
		s.serve(succeed)
		nightly := batch.Batch{Name: "b", Options: refuses, Tasks: slow(calls(10)), Tenants: batch.List("a", "b")}
		watch := s.idle(nightly)
		defer watch.Close()
		f := s.fire(watch, "b")
		p := s.scheduler(nightly)
		time.Sleep(30 * time.Millisecond) // it has planned for 20 ms
		busy.Store(true)
		if stops {
			p.latency.Store(int64(100 * time.Millisecond))
			time.Sleep(50 * time.Millisecond)
			p.stop()
			p = s.scheduler(nightly)
		}
		time.Sleep(2 * time.Second)
		expect.That(t, stops || strings.Contains(p.log.String(), "the pool is busy"), p.log.String())
		expect.Equal(t, s.status(p, f).State, batch.StateRunning)
		busy.Store(false)
		time.Sleep(100 * time.Second)
		status := s.status(p, f)
		tenants := expect.Got(p.Tenants(t.Context(), f))(s)
		a, b := partOf(t, tenants, 0), partOf(t, tenants, 1)
		expect.That(t, a.Done == 2 && a.Rejected == 8 && b.Done == 10, a, b)
		expect.That(t, status.State == batch.StateDone && status.Done == 12 && status.Rejected == 8 && status.Reason != "", status)
	})
}

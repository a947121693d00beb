package batch_test

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/batch"
)

// In the morning what failed is retried by one call, with all retries, and the end reported again.
func TestWhatFailedIsRetried(t *testing.T) {
	inBubble(t, many(), func(t *testing.T, s *batchSite) {
		b := batch.Batch{Name: "b", Ended: "report", Tasks: calls(20), Tenants: batch.List("acme", "zeta")}
		var told []batch.Status
		down := true
		s.serve(func(_ context.Context, task *asynq.Task) error {
			s.Mu.Lock()
			defer s.Mu.Unlock()
			if task.Type() == "report" {
				var status batch.Status
				err := json.Unmarshal(task.Payload(), &status)
				told = append(told, status)
				return err
			}
			if down && strings.HasPrefix(string(task.Payload()), "zeta") {
				return errors.New("the upstream is down")
			}
			return nil
		})
		p := s.scheduler(b)
		f := s.fire(p, "b")
		expect.Err(t, p.Retry(t.Context(), f), batch.ErrNoFiring, "nothing has failed yet:")
		status := s.wait(p, f, "it ends", batch.Status.HasEnded)
		expect.Require(t, status.State == batch.StateDone && status.Done == 20 && status.Failed == 20, status)
		tenants, err := p.Tenants(t.Context(), f)
		expect.That(t, err == nil && partOf(t, tenants, 0).Done == 20 && partOf(t, tenants, 1).Failed == 20, tenants, err)
		down = false
		expect.Must(s, s.Inspector.DeleteTask("default", "sluice-batch:b:"+f.Tick.Format("20060102T150405Z")+":25")) // it stays failed
		expect.Must(s, errors.Join(p.Retry(t.Context(), f), p.Pause(t.Context(), f), p.Retry(t.Context(), f)))
		time.Sleep(5 * time.Second) // not until a lease ends
		status = s.status(p, f)
		expect.That(t, status.State == batch.StateDone && status.Done == 39 && status.Failed == 1 && status.Retried == 19, status)
		expect.That(t, len(told) == 2 && told[0].Failed == 20 && told[1].Failed == 1 && told[1].Retried == 19, "told", told)
		expect.That(t, s.Logs.Count("WARN") == 0, "workers warn", s.Logs.String())
	})
}

// A firing of which too many tasks fail stops: what waits is held, and the end of it is up to operators.
func TestAFiringStopsWhenTooManyTasksFail(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pace := many()
		pace[0].Limit = 10
		s := fake(t, pace...)
		b := batch.Batch{
			Name: "b", Ended: "report", OnFailed: "stop at 20%", Options: []asynq.Option{asynq.MaxRetry(0)},
			Tasks: calls(150), Tenants: batch.List("acme"),
		}
		var told []string
		down := true
		s.serve(func(_ context.Context, task *asynq.Task) error {
			if task.Type() == "report" {
				told = append(told, string(task.Payload()))
				return nil
			}
			if string(task.Payload()) == "acme 0" && down {
				time.Sleep(10 * time.Second)
			}
			if down {
				return errors.New("the upstream is down")
			}
			return nil
		})
		p := s.scheduler(b)
		f := s.fire(p, "b")
		status := func(after time.Duration) batch.Status {
			time.Sleep(after)
			return s.status(p, f)
		}
		st := status(15 * time.Second)
		expect.That(t, st.State == batch.StateStopped && st.Failed >= 30 && st.Failed <= 70 && st.Waiting == 150-st.Failed, st)
		expect.That(t, len(told) == 1 && strings.Contains(told[0], `"state":"stopped"`) &&
			!strings.Contains(told[0], `"running":0`), "told", told)
		down = false
		expect.Must(s, p.Retry(t.Context(), f))
		st = status(30 * time.Second)
		expect.That(t, st.State == batch.StateDone && st.Done == 150 && st.Failed == 0 && len(told) == 2, st, "told", told)
	})
}

// While a firing has not ended, the next one begins, waits, or does not come.
func TestAFiringStopsWhileItIsEnqueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := fake(t, many()...)
		s.serve(func(context.Context, *asynq.Task) error { return errors.New("the upstream is down") })
		slow := func(ctx context.Context, f batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
			return func(yield func(*asynq.Task, error) bool) {
				for task, err := range calls(1000)(ctx, f, tenant) {
					if time.Sleep(20 * time.Millisecond); !yield(task, err) {
						return
					}
				}
			}
		}
		p := s.scheduler(batch.Batch{
			Name: "b", OnFailed: "stop at 20%", Options: []asynq.Option{asynq.MaxRetry(0)}, Tasks: slow, Tenants: batch.List("acme"),
		})
		f := s.fire(p, "b")
		time.Sleep(time.Minute)
		st := s.status(p, f)
		expect.That(t, st.State == batch.StateStopped && st.Failed >= 200 && st.Failed <= 600, st)
		expect.Must(s, p.Resume(t.Context(), f))
		expect.Must(s, p.Pause(t.Context(), f))
		time.Sleep(10 * time.Second)
		expect.Equal(t, s.status(p, f).State, batch.StatePaused, "by an operator, after that stop")
	})
}

// A report needs no policy, even if one matches that cannot count it. If all tasks have ended, no firing stops.
func TestAReportEndsWhateverItsPolicy(t *testing.T) {
	inBubble(t, many(), func(t *testing.T, s *batchSite) {
		other := s.Limiter.Policies()[0].WithDefaults()
		other.Name, other.Match, other.Windows[0].Per = "other", []string{"report"}, []string{"region"}
		expect.Must(s, s.Limiter.SetPolicies(append(s.Limiter.Policies(), other)))
		p := s.scheduler(batch.Batch{
			Name: "b", Ended: "report", OnFailed: "stop at 1%", Options: []asynq.Option{asynq.MaxRetry(0)},
			Tasks: calls(3), Tenants: batch.List("acme"),
		})
		reports := make(chan string, 9)
		s.serve(func(_ context.Context, task *asynq.Task) error {
			if task.Type() == "report" {
				reports <- task.Type()
				return nil
			}
			return errors.New("all fail, at once")
		})
		f := s.fire(p, "b")
		time.Sleep(time.Minute)
		expect.That(t, s.status(p, f).State == batch.StateDone && len(reports) == 1, s.status(p, f), len(reports))
	})
}

func TestFiringsOverlap(t *testing.T) {
	for overlap, want := range map[batch.Overlap][]batch.State{
		batch.OverlapAllow: {batch.StateRunning, batch.StateRunning, batch.StateRunning},
		batch.OverlapSkip:  {batch.StateRunning},
		batch.OverlapQueue: {batch.StateWaiting, batch.StateWaiting, batch.StateRunning},
	} {
		t.Run(string(overlap), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pace := many()
				pace[0].Limit = 1
				s := fake(t, pace...)
				b := batch.Batch{Name: "b", Overlap: overlap, Schedule: "@every 5s", Tasks: calls(20), Tenants: batch.List("acme")}
				p := s.scheduler(b)
				s.serve(succeed)
				time.Sleep(17500 * time.Millisecond) // a firing takes 20 s
				var got []batch.State
				for _, f := range firings(s, p, 9) {
					got = append(got, s.status(p, f).State)
				}
				expect.Require(t, len(got) == len(want), got)
				for i := range want {
					expect.That(t, got[i] == want[i], got, ", want", want)
				}
				for n, want := range map[int]int{-9: 0, -1: 0, 0: 0, 1: 1} {
					expect.Equal(t, len(firings(s, p, n)), want, "at most", n)
				}
				_, err := p.Fire(t.Context(), "b")
				expect.That(t, errors.Is(err, batch.ErrOverlap) == (overlap == batch.OverlapSkip), "fired by hand:", err)
				if overlap == batch.OverlapQueue {
					f := firings(s, p, 9)[1] // one that waits is cancelled at once
					expect.Must(s, p.Cancel(t.Context(), f))
					time.Sleep(3 * time.Second)
					expect.Equal(t, s.status(p, f).State, batch.StateCancelled)
				}
			})
		})
	}
}

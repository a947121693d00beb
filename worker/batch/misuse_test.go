package batch_test

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A firing whose functions panic is delayed, and says why, until a process has better ones. The schedulers go on.
func TestAPanicHoldsAFiringUp(t *testing.T) {
	boom := func() { panic("boom at line 7") }
	sitetest.EachBubble(t, map[string]batch.Batch{
		"Tenants": {Tasks: calls(3), Tenants: func(context.Context, batch.Firing) iter.Seq2[string, error] { boom(); return nil }},
		"Tenants, in the middle": {Tasks: calls(3), Tenants: func(context.Context, batch.Firing) iter.Seq2[string, error] {
			return func(yield func(string, error) bool) { yield("acme", nil); boom() }
		}},
		"Tasks": {Tenants: batch.List("acme"), Tasks: func(context.Context, batch.Firing, string) iter.Seq2[*asynq.Task, error] { boom(); return nil }},
		"Tasks, in the middle": {Tenants: batch.List("acme"), Tasks: func(ctx context.Context, f batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
			return func(yield func(*asynq.Task, error) bool) { calls(2)(ctx, f, tenant)(yield); boom() }
		}},
	}, func(t *testing.T, broken batch.Batch) {
		s := fake(t, many()...)
		s.serve(succeed)
		broken.Name = "b"
		p := s.scheduler(broken)
		f := s.fire(p, "b")
		time.Sleep(5 * time.Second)
		status := s.status(p, f)
		expect.That(t, status.State == batch.StateWaiting && status.DelayedBy == "batch: a panic: boom at line 7", status)
		expect.Contains(t, p.log.String(), "batch: a firing is delayed")
		expect.Contains(t, p.log.String(), "misuse_test.go", "the panic's stack:")
		p.kill()
		good := batch.Batch{Name: "b", Tasks: calls(3), Tenants: batch.List("acme")}
		p = s.scheduler(good)
		time.Sleep(30 * time.Second)
		status = s.status(p, f)
		expect.That(t, status.State == batch.StateDone && status.Done == 3, status)
	})
}

// A task that is none is refused as Enqueue refuses it, and the others run.
func TestATaskThatIsNilIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := fake(t, many()...)
		s.serve(succeed)
		p := s.scheduler(batch.Batch{Name: "b", Tenants: batch.List("acme"), Tasks: func(ctx context.Context, f batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
			return func(yield func(*asynq.Task, error) bool) {
				if yield(nil, nil) {
					calls(2)(ctx, f, tenant)(yield)
				}
			}
		}})
		f := s.fire(p, "b")
		time.Sleep(time.Minute)
		status := s.status(p, f)
		expect.That(t, status.State == batch.StateDone && status.Done == 2 && status.Rejected == 1, status)
		expect.Contains(t, status.Reason, "nil")
	})
}

func TestATemplateThatCannotBeUsedSaysWhy(t *testing.T) {
	for want, bad := range map[string]batch.Template{
		`batch: type "": must be the type of a task`:           {},
		`batch: type " ": must be the type of a task`:          {Type: " "},
		`batch: count -1: must not be below 0`:                 {Type: "call", Count: -1},
		`batch: cost -1 of unit "tokens": must not be below 0`: {Type: "call", Cost: map[string]int64{"requests": 1, "tokens": -1}},
	} {
		_, err := bad.Tasks()
		expect.Equal(t, fmt.Sprint(err), want)
	}
	expect.Must(t, expect.ErrOf((batch.Template{Type: "call", Cost: map[string]int64{"requests": 0}}).Tasks()))
}

// Otherwise every task of the tenant would run twice.
func TestATenantThatComesTwiceHoldsAFiringUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := fake(t, many()...)
		s.serve(succeed)
		p := s.scheduler(batch.Batch{Name: "b", Tasks: calls(3), Tenants: batch.List("a", "b", "a")})
		want := `batch: batch "b": tenants "a": must be UTF-8, and not come twice`
		_, err := p.Plan(t.Context(), "b", batch.PlanOptions{})
		expect.That(t, err != nil && strings.Contains(err.Error(), want), "planned", err)
		f := s.fire(p, "b")
		time.Sleep(5 * time.Second)
		status, err := p.Status(t.Context(), f)
		expect.That(t, err == nil && status.State == batch.StateWaiting && status.DelayedBy == want, status, err)
		s.WantOnceEach(s, 0)
	})
}

func firings(s *batchSite, p *schedulerProcess, n int) []batch.Firing {
	s.Helper()
	return expect.Got(p.Firings(context.Background(), "b", n))(s)
}

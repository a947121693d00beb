package queuetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A lease that is made shorter is renewed as often as it has to be.
func TestAShorterLeaseIsRenewedMoreOften(t *testing.T) {
	sitetest.Bubble(t, sitetest.AtOnce(1), func(t *testing.T, s *sitetest.Site) {
		var g sitetest.Gauge
		s.Serve(g.Handler(func(ctx context.Context, task *asynq.Task) error {
			time.Sleep(40 * time.Second)
			return s.Ok(ctx, task)
		}))
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("a"), asynq.Timeout(time.Hour))
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("b"), asynq.Timeout(time.Hour))
		time.Sleep(5 * time.Second)
		p := sitetest.AtOnce(1)
		p.Windows[0].Lease = 2 * time.Second
		expect.Must(t, s.Limiter.SetPolicies([]throttle.Policy{p}))
		time.Sleep(2 * time.Minute)
		expect.Equal(t, g.Most.Load(), 1, "ran at once")
		got := s.Runs()
		expect.That(t, slices.Equal(got, []string{"a", "b"}), "ran:", got)
	})
}

// A handler whose lease cannot be renewed is stopped before its slot can be granted, by cuts or hung renewals.
func TestAHandlerIsStoppedBeforeItsLeaseIsLost(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		lease time.Duration
		hangs bool
	}{{30 * time.Second, false}, {time.Second, true}, {5 * time.Second, true}, {30 * time.Second, true}} {
		synctest.Test(t, func(t *testing.T) {
			p := sitetest.AtOnce(1)
			p.Windows[0].Lease = row.lease
			s := sitetest.NewInBubble(t, p)
			var proxy sitetest.BreakableProxy
			var stalled atomic.Bool
			renewals := &sitetest.Fault{ // they do not end, even if their contexts do
				Is: sitetest.WithArg("renew"), Hits: func(int) bool { return stalled.Load() }, Err: context.DeadlineExceeded,
				Meanwhile: func() { time.Sleep(12 * time.Second) }, // four attempts of three seconds
			}
			s.Limiter = s.LimiterThrough(&proxy, hooktest.Hook(renewals.See))
			var told atomic.Bool
			s.Serve(func(ctx context.Context, task *asynq.Task) error {
				if told.Load() {
					return s.Ok(ctx, task)
				}
				if stalled.Store(row.hangs); !row.hangs {
					proxy.Cut()
				}
				begun := time.Now()
				<-ctx.Done()
				expect.Equal(t, context.Cause(ctx), throttle.ErrLeaseLost, "the handler's context ended by")
				expect.Equal(t, time.Since(begun), row.lease-row.lease/10, "told after", "with a lease of", row.lease)
				told.Store(true)
				stalled.Store(false)
				proxy.Mend()
				return ctx.Err()
			})
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0), asynq.Timeout(time.Hour))
			time.Sleep(3 * time.Minute)
			got := s.Runs()
			expect.That(t, slices.Equal(got, []string{"t"}), "ran:", got)
			s.WantCounters(sitetest.Counters{Processed: 1})
		})
	}
}

// Two handlers each hold a slot and want the other's. Only the one whose policy comes first by name waits.
func TestHandlersThatWantEachOthersSlotsNeverDeadlock(t *testing.T) {
	alpha, beta := sitetest.AtOnceOf("alpha", 1), sitetest.AtOnceOf("beta", 1)
	alpha.Match, beta.Match = []string{"alpha:*"}, []string{"beta:*"}
	s := sitetest.OnRedis(t, alpha, beta)
	var mu sync.Mutex
	began, denied := map[string]chan struct{}{"alpha": make(chan struct{}), "beta": make(chan struct{})}, map[string]int{}
	begin := func(name string) {
		mu.Lock()
		defer mu.Unlock()
		select {
		case <-began[name]:
		default:
			close(began[name])
		}
	}
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		policy, other := "alpha", "beta"
		if strings.HasPrefix(task.Type(), "beta") {
			policy, other = other, policy
		}
		begin(policy)
		<-began[other] // both hold their own slot
		if _, err := worker.FromContext(ctx).Wait(ctx, throttle.Request{Policy: other, MaxWait: time.Hour}); err != nil {
			if errors.As(err, new(*throttle.DeniedError)) {
				mu.Lock()
				denied[policy]++
				mu.Unlock()
			}
			return err
		}
		return s.Ok(ctx, task)
	})
	var ids []string
	for i := range 3 {
		for _, name := range []string{"alpha", "beta"} {
			id := fmt.Sprint(name, i)
			ids = append(ids, id)
			s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, name+":x", nil), asynq.TaskID(id), asynq.MaxRetry(0))
		}
	}
	s.WaitGone(ids...)
	mu.Lock()
	defer mu.Unlock()
	expect.That(t, denied["alpha"] <= 0 && denied["beta"] != 0, "denied:", denied)
	s.WantCounters(sitetest.Counters{Processed: 6})
}

// A handler that wants a second slot where its task holds the only one fails, and says why. To wait
// or to be requeued would go on for ever. A slot that others hold is another matter, as is one of
// another scope, or after the task's own was given back.
func TestAHandlerLearnsThatNoSlotIsLeftBesideItsOwn(t *testing.T) {
	policy := sitetest.AtOnceOf("api", 2)
	policy.Match = []string{"*"}
	each := throttle.Window{Name: "each", Limit: 100, Period: time.Minute, Per: []string{"tenant", "repo"}}
	policy.Windows = append(policy.Windows, each)
	for _, row := range []struct {
		name, tenant   string
		repo           string
		cost, reserve  int64
		cancels, never bool
	}{
		{name: "beside its own", cost: 1, reserve: 2, never: true},
		{name: "all is its own", cost: 2, reserve: 1, never: true},
		{name: "for another attribute", cost: 1, reserve: 2, repo: "b", never: true},
		{name: "others hold the rest", cost: 1, reserve: 1},
		{name: "of another tenant", cost: 2, reserve: 1, tenant: "other"},
		{name: "after Cancel", cost: 1, reserve: 2, cancels: true},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := sitetest.OnRedis(t, policy)
			slots := func(n int64) map[string]int64 { return map[string]int64{throttle.Requests: n} }
			repo := map[string]string{"repo": "a"}
			hold := func(tenant string, n int64) {
				r := throttle.Request{Policy: "api", Tenant: tenant, Cost: slots(n), Attributes: repo}
				d, err := s.Limiter.Reserve(t.Context(), r)
				expect.That(t, err == nil && d.Granted, "granted", d.Granted, err)
			}
			if row.tenant != "" {
				hold(row.tenant, 2)
			}
			reserved := make(chan error, 100)
			s.Serve(func(ctx context.Context, _ *asynq.Task) error {
				job := worker.FromContext(ctx)
				if row.cancels {
					err := job.Cancel(ctx)
					expect.That(t, err == nil, err)
				}
				if !row.never && row.tenant == "" {
					hold("acme", 1)
				}
				reserve := job.Reserve
				if row.never {
					reserve = job.Wait
				}
				repo := map[string]string{"repo": cmp.Or(row.repo, "a")}
				r := throttle.Request{Attributes: repo, Cost: slots(row.reserve), Tenant: row.tenant}
				_, err := reserve(ctx, r)
				select {
				case reserved <- err:
				default:
				}
				return err
			})
			id := worker.Identity{Tenant: "acme", Attributes: repo, Cost: slots(row.cost)}
			s.Enqueue(worker.NewTask(id, "x", nil), asynq.TaskID("t"), asynq.MaxRetry(0))
			if err := <-reserved; row.never {
				var never *throttle.RequestError
				want := throttle.RequestError{
					Policy: "api", Window: policy.Windows[0].Name, Field: "cost requests", Value: row.reserve,
					Hint: fmt.Sprintf("never fits beside the %d that the job holds: the window grants 2 at most", row.cost),
				}
				expect.That(t, errors.As(err, &never) && *never == want, "reserved:", err, ", want", &want)
				s.WaitState(asynq.TaskStateArchived, "t")
			} else {
				expect.Err(t, err, new(*throttle.DeniedError), "reserved:")
				s.WaitState(asynq.TaskStateScheduled, "t")
			}
		})
	}
}

// A handler that holds a slot waits for windows that only time refills.
func TestHandlerThatHoldsASlotWaitsForARate(t *testing.T) {
	slots, rate := sitetest.AtOnceOf("slots", 1), sitetest.Policy(1, 300*time.Millisecond)
	slots.Match, rate.Name, rate.Match = []string{"*"}, "a-rate", nil
	s := sitetest.OnRedis(t, slots, rate)
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		for range 3 {
			_, err := worker.FromContext(ctx).Wait(ctx, throttle.Request{Policy: "a-rate", MaxWait: time.Minute})
			expect.That(t, err == nil, err)
		}
		return s.Ok(ctx, task)
	})
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
	s.WaitGone("t")
	s.WantCounters(sitetest.Counters{Processed: 1})
}

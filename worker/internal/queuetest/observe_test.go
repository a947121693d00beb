package queuetest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// limitBy gives the site another limiter, with the policies and the logger that it has.
func limitBy(s *sitetest.Site, c throttle.Config) {
	s.Helper()
	c.Logger, c.Policies = slog.New(slog.NewTextHandler(s.Logs, nil)), s.Limiter.Policies()
	limiter := expect.Got(throttle.New(c))(s)
	s.Limiter = limiter
}

// An observer of the limiter is told how long each task waited, and how late it starts.
func TestStartsAreObserved(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, 10*time.Second), func(t *testing.T, s *sitetest.Site) {
		starts := make(chan throttle.Start, 10)
		limitBy(s, throttle.Config{Client: s.Redis, Observer: expect.On(func(s throttle.Start) { starts <- s })})
		client := s.Client(s.Limiter)
		for range 3 {
			expect.Must(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask())))
		}
		time.Sleep(3 * time.Second) // nobody serves the first, which fits
		s.Serve(s.Ok)
		for i, want := range []struct{ waited, late time.Duration }{
			{3 * time.Second, 3 * time.Second}, {13 * time.Second, 0}, {23 * time.Second, 0},
		} {
			got := <-starts
			// Places in line are a microsecond apart.
			expect.That(t, got.Policy == "api" && got.Tenant == "acme" &&
				got.Waited == want.waited-time.Duration(i)*time.Microsecond && got.Late == want.late, "start", i+1, got,
				"want", want)
		}
		time.Sleep(10 * time.Second)
		s.Enqueue(sitetest.AcmeTask())
		got := <-starts
		expect.That(t, got.Waited == 0 && got.Late < 0, "a task that never was in line", got)
	})
}

// It is told of tasks that are requeued, or run uncounted, as the limiter could not decide: Redis is away, or silent.
func TestTasksThatTheLimiterCannotDecideAreObserved(t *testing.T) {
	for _, row := range []struct {
		open   bool
		silent bool
	}{{false, false}, {true, false}, {false, true}, {true, true}} {
		t.Run(fmt.Sprintf("open %v, silent %v", row.open, row.silent), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := sitetest.Policy(1, time.Hour)
				p.FailOpen = row.open
				s := sitetest.NewInBubble(t, p)
				var proxy sitetest.BreakableProxy
				through := sitetest.Connect(proxy.Options(sitetest.SameRedis(s.Redis)))
				defer through.Close()
				told := make(chan string, 100)
				tell := func(policy, tenant string, err error) {
					told <- fmt.Sprint(policy, " ", tenant, " ", errors.Is(err, throttle.ErrUnavailable))
				}
				limitBy(s, throttle.Config{Client: through, Observer: func(event any) {
					switch e := event.(type) {
					case throttle.Decision:
						if e.FailedOpen != nil {
							tell(e.Policy, "open "+e.Tenant, e.FailedOpen)
						}
					case *throttle.DeniedError:
						tell(e.Decision.Policy, e.Decision.Tenant, e.Cause)
					}
				}})
				s.Serve(s.Ok)
				goesOn := (<-chan struct{})(nil)
				if row.silent {
					goesOn = proxy.Hang(2 * time.Minute)
				} else {
					proxy.Cut()
				}
				s.Enqueue(sitetest.AcmeTask())
				want := map[bool]string{false: "acme", true: "open acme"}[row.open]
				select {
				case got := <-told:
					expect.That(t, got == "api "+want+" true", got)
				case <-time.After(time.Minute):
					t.Error("told nothing")
				}
				synctest.Wait()
				open := map[bool]int{true: 1}[row.open]
				expect.Equal(t, s.Logs.Count("worker: the limiter is unavailable"), 1, s.Logs)
				expect.That(t, s.Logs.Count("fails_open=true") == open && len(s.Runs()) == open, s.Runs(), s.Logs)
				proxy.Mend()
				if row.silent {
					<-goesOn
				}
				time.Sleep(2 * time.Second) // go-redis tries to connect in the background
			})
		})
	}
}

// A lookup of a tenant that panics fails the tenant's tasks, and no others.
func TestALookupThatPanicsFailsItsTasks(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(100, time.Hour))
	limitBy(s, throttle.Config{Client: s.Redis, Tenants: func(_ context.Context, _, tenant string) (t throttle.Tenant, found bool, err error) {
		if tenant == "acme" {
			panic("on purpose")
		}
		return t, false, nil
	}})
	for _, id := range []string{"a", "b"} {
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(id), asynq.MaxRetry(0))
		s.Enqueue(worker.NewTask(worker.Identity{Tenant: "else"}, "x", nil), asynq.TaskID("else-"+id), asynq.MaxRetry(0))
	}
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("later"), asynq.MaxRetry(0), asynq.ProcessIn(time.Second)) // forward joins it
	s.Serve(s.Ok)
	s.WaitGone("else-a", "else-b")
	for _, id := range []string{"a", "b", "later"} {
		s.WaitState(asynq.TaskStateArchived, id)
		got := s.Task(id).LastErr
		expect.That(t, strings.Contains(got, `policy "api": tenant "acme": Config.Tenants panicked: on purpose`), id, "failed by", got)
	}
	expect.Equal(t, s.Logs.Count("function=Tenants"), 1, "it is logged", "times")
	var invalid *throttle.RequestError
	expect.Err(t, expect.ErrOf(s.Client(s.Limiter).Enqueue(sitetest.AcmeTask())), &invalid, "a client's lookup:")
}

// An explanation tells of a task in line its place, and of any other why it is in asynq's state.
func TestExplainKnowsEveryState(t *testing.T) {
	guarded := sitetest.Policy(1, time.Hour)
	guarded.Match = []string{"x"}
	s := sitetest.OnRedis(t, guarded)
	client := s.Client(s.Limiter)
	explain := func(queue, id string) worker.Explanation {
		t.Helper()
		return expect.Got(client.Explain(t.Context(), queue, id))(t)
	}
	says := func(id, state string, why ...string) {
		t.Helper()
		e := explain("default", id)
		expect.That(t, e.State == state, id, "is", e.State, ", want", state)
		for _, text := range why {
			expect.That(t, strings.Contains(e.Why, text), id, text, "is not in", e)
		}
	}
	e := explain("default", "nothing")
	expect.That(t, e.State == "" && e.Why != "" && e.Line == nil, e)
	s.Fill("acme")
	expect.Must(t, expect.ErrOf(client.EnqueueContext(t.Context(), sitetest.AcmeTask(), asynq.TaskID("waits"))))
	later := sitetest.AcmeTask(asynq.TaskID("later"), asynq.ProcessIn(time.Hour))
	expect.Must(t, expect.ErrOf(client.EnqueueContext(t.Context(), later)))
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("plain"))
	s.Enqueue(asynq.NewTask("unmatched", nil), asynq.TaskID("free"))
	s.Enqueue(asynq.NewTask("fails", nil), asynq.TaskID("fails"), asynq.MaxRetry(0))
	s.Enqueue(asynq.NewTask("fails", nil), asynq.TaskID("again"), asynq.MaxRetry(3))
	says("waits", "scheduled", "policy api, delayed by window; no server serves its queue")
	waits := explain("default", "waits")
	line := waits.Line
	expect.That(t, line != nil && !sitetest.Off(line.Expected, time.Now().Add(time.Hour)) &&
		line.Binds == "window" && line.Position == 1 && line.Waiting == 1 && line.Windows[0].Used == 1, waits)
	expect.Equal(t, waits.Servers, 0, "servers")
	says("later", "scheduled", "it is scheduled for ", "policy api decides about it then")
	says("plain", "pending", "policy api decides about it")
	expect.Must(t, s.Inspector.PauseQueue("default"))
	says("free", "pending", "no policy matches its type", "its queue is paused")
	expect.Must(t, s.Inspector.UnpauseQueue("default"))
	s.Serve(func(_ context.Context, task *asynq.Task) error {
		if task.Type() == "fails" {
			return errors.New("boom\x1b\r")
		}
		return nil
	}, func(theirs *asynq.Config, _ *worker.Config) {
		theirs.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
	})
	s.WaitState(asynq.TaskStateArchived, "fails")
	s.WaitState(asynq.TaskStateRetry, "again")
	s.WaitState(asynq.TaskStateScheduled, "plain")
	says("fails", "archived", `it is archived, as it failed for good or was dropped: "boom\x1b\r"`)
	says("again", "retry", "it has failed (1 of 3 retries used)", `: "boom\x1b\r"`)
	says("plain", "scheduled", "it waits in line for policy api")
	expect.Equal(t, explain("default", "plain").Line.Position, 2)
}

// hostile are tenants whose names are data.
var hostile = []string{"acme", "a|b,c", "{x}:%", "\x1b[2J", "zoë \"q\""}

// A removed policy keeps its last windows until its line is empty, also after all workers have restarted.
func TestARemovedPolicyKeepsItsWindows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit, tasks = 30, 150
		p := sitetest.Shared(limit, 30*time.Second)
		s := sitetest.NewInBubble(t, p)
		store := control.StoreOf(s.Limiter)
		publish := func(version int64, policies ...throttle.Policy) {
			t.Helper()
			expect.Must(t, expect.ErrOf(store.Publish(t.Context(), policies, version, control.Author{Who: "ada", Why: "test"})))
		}
		var processes []func() // by which they end
		serve := func() {
			processes = nil
			for range 3 {
				limiter := s.AnotherLimiter()
				store := control.StoreOf(limiter)
				f := store.Follow(t.Context(), control.FollowConfig{})
				t.Cleanup(func() { f.Close() })
				server := s.Serve(s.Ok, sitetest.By(limiter))
				processes = append(processes, func() { server.Shutdown(); f.Close() })
			}
		}
		other := throttle.Policy{Name: "other", Match: []string{"other"}, Windows: p.Windows}
		publish(0, p)
		serve()
		for _, tenant := range hostile {
			s.EnqueueMany(tenant, 0, tasks/len(hostile))
		}
		time.Sleep(10 * time.Second)
		publish(1, other)
		within := func(when string, d time.Duration, want int) {
			t.Helper()
			time.Sleep(d)
			n := len(s.Runs())
			expect.That(t, n <= want && n >= want-limit, when, n, "tasks have run, want", want)
		}
		within("half a minute after the policy was removed", 30*time.Second, 2*limit)
		for _, end := range processes {
			end()
		}
		time.Sleep(10 * time.Minute) // all that wait come back by themselves
		serve()
		within("after the restart", 10*time.Second, 3*limit)
		state := expect.Got(store.State(t.Context()))(t)
		looks := s.AnotherLimiter()
		expect.Must(t, looks.SetPolicies(state.Policies, state.Removed...))
		st, err := inspect.Of(looks).State(t.Context(), inspect.Query{Policy: p.Name})
		expect.That(t, err == nil && st.Waiting == 60 && st.Removed, st, err)
		within("at the end", 90*time.Second, tasks)
		expect.Equal(t, len(s.Runs()), tasks, "of", "tasks have run")
		s.WantNobodyInLine()
		publish(2, other, throttle.Policy{Name: "third", Windows: p.Windows})
		state, err = store.State(t.Context())
		expect.That(t, err == nil && len(state.Removed) == 0, "nobody waits for what was removed", state.Removed, err)
	})
}

// The longest wait counts from when a task began to wait, also after its call was refused.
func TestTheLongestWaitOutlastsARefusal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sitetest.NewInBubble(t, sitetest.Shared(1, time.Minute))
		refuse := func(ctx context.Context, task *asynq.Task) error {
			if id, _ := asynq.GetTaskID(ctx); id == "acme-0000" {
				return s.Ok(ctx, task)
			}
			return worker.RetryAfter(3 * time.Minute)
		}
		s.Serve(refuse)
		begin := time.Now()
		s.EnqueueMany("acme", 0, 2)
		for i, wait := range []time.Duration{30 * time.Second, 2 * time.Minute, 5 * time.Minute} {
			time.Sleep(wait)
			st, err := inspect.Of(s.Limiter).State(t.Context(), inspect.Query{Policy: "api"})
			expect.Require(t, err == nil && len(st.Tenants) == 1 && st.Tenants[0].Waiting == 1, st, err)
			waited := st.Tenants[0].Oldest.Sub(begin)
			expect.That(t, waited.Abs() <= 2*time.Second, "look", i, "the oldest waits since", waited, "after the start", st.Tenants[0])
		}
	})
}

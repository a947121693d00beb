package queuetest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// hostile are tenants whose names are data.
var hostile = []string{"acme", "a|b,c", "{x}:%", "\x1b[2J", "zoë \"q\""}

// A removed policy keeps its last windows until its line is empty, also after all workers have
// restarted.
func TestARemovedPolicyKeepsItsWindows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit, tasks = 30, 150
		p := sitetest.Shared(limit, time.Minute)
		s := sitetest.NewInBubble(t, p)
		store, err := control.NewStore(s.Limiter)
		sitetest.Must(t, err)
		publish := func(version int64, policies ...throttle.Policy) {
			t.Helper()
			if _, err := store.Publish(t.Context(), policies, version, control.By{Who: "ada", Why: "test"}); err != nil {
				t.Fatal(err)
			}
		}
		var servers []*worker.Server
		serve := func() {
			servers = nil
			for range 3 {
				limiter := s.AnotherLimiter()
				own, err := control.NewStore(limiter)
				sitetest.Must(t, err)
				f, err := control.Follow(t.Context(), control.FollowConfig{Store: own})
				sitetest.Must(t, err)
				t.Cleanup(func() { f.Close() })
				servers = append(servers, s.Serve(s.Ok, sitetest.Calm, sitetest.By(limiter)))
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
			if n := len(s.Runs()); n > want || n < want-limit {
				t.Errorf("%s %d tasks have run, want %d", when, n, want)
			}
		}
		within("a minute after the policy was removed", time.Minute, 2*limit)
		for _, server := range servers {
			server.Shutdown()
		}
		time.Sleep(10 * time.Minute) // all that wait come back by themselves
		serve()
		within("after the restart", 10*time.Second, 3*limit)
		state, err := store.State(t.Context())
		sitetest.Must(t, err)
		looks := s.AnotherLimiter()
		sitetest.Must(t, looks.SetPolicies(state.Policies))
		sitetest.Must(t, looks.SetRemoved(state.Removed))
		st, err := inspect.Of(looks).State(t.Context(), inspect.Query{Policy: p.Name})
		if want := "policy api was removed: 60 tasks go on by its last windows"; err != nil || st.RemovedText() != want {
			t.Errorf("%q, want %q: %+v, %v", st.RemovedText(), want, st, err)
		}
		within("at the end", 5*time.Minute, tasks)
		if n := len(s.Runs()); n != tasks {
			t.Errorf("%d of %d tasks have run", n, tasks)
		}
		s.WantNobodyInLine()
		publish(2, other, throttle.Policy{Name: "third", Windows: p.Windows})
		if state, err = store.State(t.Context()); err != nil || len(state.Removed) > 0 {
			t.Errorf("nobody waits for what was removed: %+v, %v", state.Removed, err)
		}
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
			return worker.RetryAfter(10 * time.Minute)
		}
		s.Serve(refuse, sitetest.Calm)
		begin := time.Now()
		s.EnqueueMany("acme", 0, 2)
		for i, wait := range []time.Duration{30 * time.Second, 5 * time.Minute, 20 * time.Minute} {
			time.Sleep(wait)
			st, err := inspect.Of(s.Limiter).State(t.Context(), inspect.Query{Policy: "api"})
			if err != nil || len(st.Tenants) != 1 || st.Tenants[0].Waiting != 1 {
				t.Fatalf("%+v, %v", st, err)
			}
			if waited := st.Tenants[0].Oldest.Sub(begin); waited.Abs() > 2*time.Second {
				t.Errorf("look %d: the oldest waits since %v after the start: %+v", i, waited, st.Tenants[0])
			}
		}
	})
}

package worker_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// wantNeverOver recounts all grants in every span of the period.
func (s *site) wantNeverOver(limit int, period time.Duration) {
	s.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	var times []time.Time
	for _, d := range s.decisions {
		if d.Granted {
			times = append(times, d.At)
		}
	}
	slices.SortFunc(times, time.Time.Compare)
	for i := range times {
		if j := i + limit; j < len(times) && times[j].Sub(times[i]) < period {
			s.Errorf("more than %d in %v from %v on", limit, period, times[i])
		}
	}
}

// Tasks that a plain client enqueued wake to be denied and wake to run, on any of two servers.
func TestDeniedTasksAreCalled(t *testing.T) {
	each(t, []throttle.Policy{policy(5, 300*time.Millisecond)}, func(t *testing.T, s *site) {
		var ids []string
		for i := range 40 {
			ids = append(ids, fmt.Sprint("task-", i))
			s.enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID(ids[i]), asynq.MaxRetry(0))
		}
		s.serve(s.ok)
		s.serve(s.ok)
		s.waitGone(ids...)
		slices.Sort(ids)
		if got := s.runs(); !slices.Equal(got, ids) {
			t.Errorf("ran %v, want each of %v once", got, ids)
		}
		s.mu.Lock()
		wakes := len(s.decisions)
		s.mu.Unlock()
		if wakes > 3*len(ids) {
			t.Errorf("%d wakes of %d tasks", wakes, len(ids))
		}
		s.wantNeverOver(5, 300*time.Millisecond)
		s.wantCounters(counters{Processed: 40})
	})
}

// Tasks of our client take their place when they are enqueued, and wake once.
func TestPlannedTasksWakeOnce(t *testing.T) {
	each(t, []throttle.Policy{policy(5, 300*time.Millisecond)}, func(t *testing.T, s *site) {
		client, err := worker.NewClient(s.asynq, worker.ClientConfig{Limiter: s.limiter})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		s.serve(s.ok)
		var ids []string
		for i := range 30 {
			ids = append(ids, fmt.Sprint("task-", i))
			info, err := client.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil, asynq.TaskID(ids[i]), asynq.MaxRetry(0)))
			if err != nil {
				t.Fatal(err)
			}
			if waits := info.State == asynq.TaskStateScheduled; waits && !info.StartsAt.Before(info.NextProcessAt) {
				t.Errorf("%s is to start at %v, and comes by itself at %v", info.ID, info.StartsAt, info.NextProcessAt)
			}
		}
		s.waitGone(ids...)
		slices.Sort(ids)
		if got := s.runs(); !slices.Equal(got, ids) {
			t.Errorf("ran %v, want each of %v once", got, ids)
		}
		s.mu.Lock()
		wakes := len(s.decisions)
		s.mu.Unlock()
		if wakes > 2*len(ids) {
			t.Errorf("%d wakes of %d planned tasks", wakes, len(ids))
		}
		s.wantNeverOver(5, 300*time.Millisecond)
	})
}

func TestPlanRefuses(t *testing.T) {
	each(t, []throttle.Policy{policy(1, time.Hour)}, func(t *testing.T, s *site) {
		client, err := worker.NewClient(s.asynq, worker.ClientConfig{Limiter: s.limiter})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		enqueue := func(id string, opts ...asynq.Option) error {
			_, err := client.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), append(opts, asynq.TaskID(id))...)
			return err
		}
		if err := enqueue("first"); err != nil {
			t.Fatal(err)
		}
		if err := enqueue("second"); err != nil {
			t.Fatal(err)
		}
		var refused *throttle.RefusedError
		for name, option := range map[string]asynq.Option{"late": worker.MaxWait(time.Minute), "many": worker.Backlog(2)} {
			if err := enqueue(name, option); !errors.As(err, &refused) {
				t.Errorf("%s: %v, want a *throttle.RefusedError", name, err)
			}
			if _, err := s.inspector.GetTaskInfo("default", name); err == nil {
				t.Errorf("%s is refused and enqueued", name)
			}
		}
		if err := enqueue("second"); err == nil {
			t.Error("an ID was taken twice")
		}
		if n := s.redis.Get(t.Context(), "sluice:{api:acme}:q").Val(); n != "2" {
			t.Errorf("%s tickets in line, want the 2 that were enqueued", n)
		}
	})
}

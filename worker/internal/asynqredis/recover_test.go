package asynqredis_test

import (
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A server dies. What it made active goes back once, unless asynq has renewed the lease: then the task has
// run for a while. What is leased still is left alone.
func TestTasksOfADeadServerGoBackOnce(t *testing.T) {
	each(t, func(s *site) {
		s.store("a", "leased", "renewed")
		_, err := s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID("pending"))
		s.ok(err)
		dead := asynqredis.New(s.redis)
		_, err = dead.Pick(s.Context(), queue, dead.NewCall(), s.waiting("a", "leased", "renewed"))
		s.ok(err)
		_, err = dead.DequeuePending(s.Context(), queue, dead.NewCall(), 1)
		s.ok(err)
		expires := time.Now().Add(asynqredis.LeaseFor)
		renewed := expires.Add(5 * time.Second)
		s.redis.ZAdd(s.Context(), "asynq:{default}:lease", z("renewed", renewed), z("leased", renewed.Add(time.Second)))
		s.ok(dead.Recover(s.Context(), []string{queue}, renewed)) // it lives
		s.ok(s.Recover(s.Context(), []string{queue}, expires.Add(-slow)))
		s.wantStates("a active, leased active, pending active, renewed active")
		s.ok(s.Recover(s.Context(), []string{"other", queue}, renewed))
		s.wantStates("a scheduled, leased active, pending scheduled, renewed active")
		due, err := s.Due(s.Context(), queue, false, 10)
		s.ok(err)
		if len(due) != 2 || due[0].Mark != asynqredis.FrontMark || due[1].Mark != asynqredis.FrontMark {
			t.Errorf("due: %+v", due)
		}
		_, err = s.Apply(s.Context(), queue, []asynqredis.Move{{ID: "a"}, {ID: "pending"}})
		s.ok(err)
		_, err = dead.DequeuePending(s.Context(), queue, dead.NewCall(), 2)
		s.ok(err)
		s.ok(s.Recover(s.Context(), []string{queue}, renewed))
		s.wantStates("a active, leased active, pending active, renewed active")
	})
}

// A task without retries left goes back unless its server has noted that it may have started. The note is that of one call, and only of a task that this call made active.
func TestALastAttemptThatNeverStartedGoesBack(t *testing.T) {
	each(t, func(s *site) {
		for _, id := range []string{"started", "first", "second"} {
			_, err := s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID(id), asynq.MaxRetry(0))
			s.ok(err)
		}
		dead := asynqredis.New(s.redis)
		call := dead.NewCall()
		_, err := dead.DequeuePending(s.Context(), queue, call, 3)
		s.ok(err)
		for id, want := range map[string]bool{"started": true, "nobody": false} {
			if is, err := dead.Start(s.Context(), asynqredis.Ref{Queue: queue, ID: id}, call); err != nil || is != want {
				t.Errorf("%s may start: %v, %v", id, is, err)
			}
		}
		if is, err := dead.Start(s.Context(), asynqredis.Ref{Queue: queue, ID: "first"}, dead.NewCall()); is || err != nil {
			t.Errorf("by another call: %v, %v", is, err)
		}
		long := time.Now().Add(-time.Hour)
		for _, id := range []string{"started", "first", "second"} {
			s.redis.ZAdd(s.Context(), "asynq:{default}:lease", z(id, long))
		}
		s.ok(s.Recover(s.Context(), []string{queue}, long))
		s.wantStates("first scheduled, second scheduled, started active")
	})
}

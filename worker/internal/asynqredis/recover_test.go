package asynqredis_test

import (
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A server with two slots dies. What it made active after its first two tasks has not started, and
// goes back. Its first two are left to asynq, and so is what is leased still, or by another server.
func TestTasksThatNeverStartedGoBack(t *testing.T) {
	each(t, func(s *site) {
		s.store("a", "b", "c", "d", "leased", "another's")
		dead, another := asynqredis.New(s.redis), asynqredis.New(s.redis)
		dead.Slots, another.Slots = 2, 1
		_, err := s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID("pending"))
		s.ok(err)
		for _, ids := range [][]string{{"a", "b", "c"}, {"d"}, {"leased"}} {
			_, err = dead.Pick(s.Context(), queue, dead.Call(), s.waiting(ids...))
			s.ok(err)
		}
		_, err = dead.DequeuePending(s.Context(), queue, dead.Call(), 1)
		s.ok(err)
		_, err = another.Pick(s.Context(), queue, another.Call(), s.waiting("another's"))
		s.ok(err)
		long := time.Now().Add(-time.Hour)
		for _, id := range []string{"a", "b", "c", "d", "pending", "another's"} {
			s.redis.ZAdd(s.Context(), "asynq:{default}:lease", z(id, long))
		}
		s.ok(dead.Recover(s.Context(), []string{queue}, long)) // it lives
		s.ok(s.Recover(s.Context(), []string{queue}, long.Add(-time.Second)))
		s.wantStates("a active, another's active, b active, c active, d active, leased active, pending active")
		s.ok(s.Recover(s.Context(), []string{"other", queue}, long))
		s.wantStates("a active, another's active, b active, c scheduled, d scheduled, leased active, pending scheduled")
		due, err := s.Due(s.Context(), queue, false, 10)
		s.ok(err)
		if len(due) != 3 || due[0].Mark != asynqredis.FrontMark || due[2].Mark != asynqredis.FrontMark {
			t.Errorf("due: %+v", due)
		}
	})
}

// A task without retries left goes back unless its server has noted that it may have started, whichever
// its position. The note is that of one call, and only of a task that this call made active.
func TestALastAttemptThatNeverStartedGoesBack(t *testing.T) {
	each(t, func(s *site) {
		for _, id := range []string{"started", "first", "second"} {
			_, err := s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID(id), asynq.MaxRetry(0))
			s.ok(err)
		}
		dead := asynqredis.New(s.redis)
		dead.Slots = 2
		call := dead.Call()
		_, err := dead.DequeuePending(s.Context(), queue, call, 3)
		s.ok(err)
		for id, want := range map[string]bool{"started": true, "nobody": false} {
			if is, err := dead.Start(s.Context(), asynqredis.Ref{Queue: queue, ID: id}, call); err != nil || is != want {
				t.Errorf("%s may start: %v, %v", id, is, err)
			}
		}
		if is, err := dead.Start(s.Context(), asynqredis.Ref{Queue: queue, ID: "first"}, dead.Call()); is || err != nil {
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

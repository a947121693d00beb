package asynqredis_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// recovers fails unless these tasks go back of those that asynq's recoverer has found.
func (s *taskQueue) recovers(c *asynqredis.Client, want string, ids ...string) {
	s.Helper()
	back := slices.DeleteFunc(ids, func(id string) bool {
		is := expect.Got(c.Recover(s.Context(), asynqredis.Ref{Queue: queue, ID: id}, ""))(s)
		return !is
	})
	expect.Equal(s, fmt.Sprint(back), want, "what goes back")
}

// leaseEnds sets when the leases of tasks end.
func (s *taskQueue) leaseEnds(in time.Duration, ids ...string) {
	for _, id := range ids {
		s.redis.ZAdd(s.Context(), "asynq:{default}:lease", z(id, time.Now().Add(in)))
	}
}

// A server dies. What it made active goes back once, unless asynq renewed the lease: then the task has run a while.
func TestTasksOfADeadServerGoBackOnce(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.store("a", "renewed")
		s.ok(expect.ErrOf(s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID("pending"))))
		dead := asynqredis.New(s.redis)
		call := strings.Split(dead.NewCall(), "/")
		call[1] = strconv.FormatInt(time.Now().Add(-2*time.Minute).Unix(), 36)
		s.ok(expect.ErrOf(dead.Pick(s.Context(), queue, strings.Join(call, "/"), s.waiting("a", "renewed"))))
		s.ok(expect.ErrOf(dead.DequeuePending(s.Context(), queue, dead.NewCall(), 1)))
		s.leaseEnds(-100*time.Second, "a", "pending")
		s.leaseEnds(-35*time.Second, "renewed")
		for _, id := range []string{"a", "pending"} {
			running := s.redis.HGet(s.Context(), "asynq:{default}:t:"+id, "sluice_call").Val()
			is := expect.Got(dead.Recover(s.Context(), asynqredis.Ref{Queue: queue, ID: id}, running))(s)
			expect.That(t, !is, id, "goes back, though it runs here")
		}
		s.recovers(s.Client, "[a pending]", "a", "pending", "renewed")
		s.wantStates("a scheduled, pending scheduled, renewed active")
		s.redis.HSet(s.Context(), "asynq:{default}:t:a", "state", "active") // by asynq, which leaves the name of the call
		s.recovers(s.Client, "[]", "a")
		s.redis.HSet(s.Context(), "asynq:{default}:t:a", "state", "scheduled")
		due := expect.Got(s.Due(s.Context(), queue, false, 10))(s)
		expect.That(t, len(due) == 2 && due[0].Mark == asynqredis.FrontMark && due[1].Mark == asynqredis.FrontMark, "due:", due)
		s.ok(expect.ErrOf(s.Apply(s.Context(), queue, []asynqredis.Move{{ID: "a"}, {ID: "pending"}})))
		s.ok(expect.ErrOf(dead.DequeuePending(s.Context(), queue, dead.NewCall(), 2)))
		s.recovers(s.Client, "[a pending]", "a", "pending") // nobody's call ends what has a lease
		s.leaseEnds(-40*time.Second, "a", "pending")
		s.recovers(s.Client, "[]", "a", "pending", "renewed")
		s.wantStates("a active, pending active, renewed active")
	})
}

// A task without retries left goes back unless its server has noted that it may have started. The note is that of one call, and only of a task that this call made active.
func TestALastAttemptThatNeverStartedGoesBack(t *testing.T) {
	each(t, func(s *taskQueue) {
		for _, id := range []string{"started", "first", "second"} {
			s.ok(expect.ErrOf(s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID(id), asynq.MaxRetry(0))))
		}
		dead := asynqredis.New(s.redis)
		call := dead.NewCall()
		s.ok(expect.ErrOf(dead.DequeuePending(s.Context(), queue, call, 3)))
		for id, want := range map[string]bool{"started": true, "nobody": false} {
			is, err := dead.CheckActive(s.Context(), asynqredis.Ref{Queue: queue, ID: id}, call, asynqredis.NoteStart)
			expect.That(t, err == nil && is == want, id, "may start", is, err)
		}
		is, err := dead.CheckActive(s.Context(), asynqredis.Ref{Queue: queue, ID: "first"}, dead.NewCall(), asynqredis.NoteStart)
		expect.That(t, !is && err == nil, "by another call", is, err)
		s.leaseEnds(-40*time.Second, "started", "first", "second")
		s.recovers(s.Client, "[first second]", "started", "first", "second", "nobody")
		s.wantStates("first scheduled, second scheduled, started active")
	})
}

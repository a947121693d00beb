package asynqredis_test

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

func TestARequeueSchedulesAnActiveTask(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.store("a")
		call, at := s.NewCall(), time.Now().Add(time.Minute)
		picks := expect.Got(s.Pick(s.Context(), queue, call, s.waiting("a")))(s)
		requeued := asynqredis.RestoreOptions{
			Ref: asynqredis.Ref{Queue: queue, ID: "a"}, CallKey: call, Message: picks[0].Message.WithDenial("throttled: x", time.Now()),
			At: at, Mark: asynqredis.Mark(s.key("a"), s.NewCall()),
		}
		requeue := func(want bool) {
			t.Helper()
			due, err := s.Restore(s.Context(), requeued)
			expect.That(t, err == nil && due == want, "due now", due, err)
		}
		requeue(false)
		s.wantStates("a scheduled")
		info := expect.Got(s.inspector.GetTaskInfo(queue, "a"))(s)
		expect.That(t, info.LastErr == "throttled: x" && !info.NextProcessAt.Before(at), "asynq's tools show", info)
		// Picked again: a requeue that is repeated leaves it to the server that has it now.
		again := s.NewCall()
		s.ok(expect.ErrOf(s.Pick(s.Context(), queue, again, s.waiting("a"))))
		requeue(false)
		s.wantStates("a active")
		// One that waits in no line cannot be picked.
		requeued.CallKey, requeued.Mark = again, ""
		requeue(false)
		picks, err := s.Pick(s.Context(), queue, s.NewCall(), s.waiting("a"))
		s.ok(err)
		expect.That(t, picks[0].Message == nil && !picks[0].Paused, picks[0])
		requeued.CallKey = s.NewCall()
		_, err = s.Restore(s.Context(), requeued)
		expect.That(t, asynqredis.IsNotFound(err), "requeueing what is not active", err)
	})
}

// The ticket of an active task is given up. Whoever requeues the task learns it, however often: the
// task is due at once, unless it waits for something else than its line, or was picked since.
func TestARequeuedTaskWhoseTicketHasLeftIsDue(t *testing.T) {
	each(t, func(s *taskQueue) {
		for i, row := range []struct {
			left  bool
			again bool // it was picked once more since
			mark  string
			due   bool
		}{
			{true, false, "its join", true},
			{false, false, "its join", false},
			{true, true, "its join", false},
			{true, false, asynqredis.FrontMark, false},
			{true, false, "", false},
		} {
			id := string(rune('a' + i))
			s.store(id)
			call, at := s.NewCall(), time.Now().Add(time.Hour)
			picks := expect.Got(s.Pick(s.Context(), queue, call, s.waiting(id)))(s)
			if row.left {
				s.ok(expect.ErrOf(s.Pick(s.Context(), queue, s.NewCall(), s.waiting(id))))
			}
			mark := row.mark
			if mark == "its join" {
				mark = asynqredis.Mark(s.key(id), s.NewCall())
			}
			if row.again {
				s.restore(asynqredis.RestoreOptions{CallKey: call, At: at}, id)
				s.ok(s.redis.HSet(s.Context(), "asynq:{default}:t:"+id, "sluice_join", s.key(id)+".").Err()) // it joins again
				call = s.NewCall()
				s.ok(expect.ErrOf(s.Pick(s.Context(), queue, call, s.waiting(id))))
			}
			for range 2 {
				due, err := s.Restore(s.Context(), asynqredis.RestoreOptions{
					Ref: asynqredis.Ref{Queue: queue, ID: id}, CallKey: call, Message: picks[0].Message, At: at, Mark: mark})
				info, _ := s.inspector.GetTaskInfo(queue, id)
				expect.That(t, err == nil && due == row.due && time.Until(info.NextProcessAt) < time.Minute == row.due,
					row, due, info.NextProcessAt, err)
			}
		}
	})
}

// A task that is put back to wait is due at once, too, if its ticket has left meanwhile.
func TestARestoredTaskWhoseTicketHasLeftIsDue(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.store("left", "waits")
		call := s.NewCall()
		s.ok(expect.ErrOf(s.Pick(s.Context(), queue, call, s.waiting("left", "waits"))))
		s.ok(expect.ErrOf(s.Pick(s.Context(), queue, s.NewCall(), s.waiting("left"))))
		s.restore(asynqredis.RestoreOptions{CallKey: call, At: time.Now().Add(time.Hour)}, "left", "waits")
		due := expect.Got(s.Due(s.Context(), queue, false, 10))(s)
		expect.That(t, len(due) == 1 && due[0].ID == "left" && due[0].Mark == asynqredis.FrontMark, "due:", due)
	})
}

// A requeue prolongs the lock of a task, as its holder, and never shortens it. That of another client's task may end.
func TestARequeueNeverShortensALock(t *testing.T) {
	each(t, func(s *taskQueue) {
		ctx := s.Context()
		for name, row := range map[string]struct {
			ours   bool
			holder string
			ttl    time.Duration
			want   time.Duration
		}{
			"shorter":        {true, "a", time.Second, 130 * time.Second},
			"longer":         {true, "a", time.Hour, time.Hour},
			"free":           {true, "", 0, 130 * time.Second},
			"another's":      {true, "b", 5 * time.Second, 5 * time.Second},
			"not ours":       {false, "a", 5 * time.Second, 125 * time.Second},
			"not ours, free": {false, "", 0, 0},
		} {
			s.redis.FlushAll(ctx)
			s.redis.RPush(ctx, "asynq:{default}:active", "a")
			s.redis.HSet(ctx, "asynq:{default}:t:a", "state", "active", "sluice_call", "a call", "unique_key", "asynq:{default}:unique:x")
			if row.ours {
				s.redis.HSet(ctx, "asynq:{default}:t:a", "sluice_lock", 10)
			}
			if row.holder != "" {
				s.redis.Set(ctx, "asynq:{default}:unique:x", row.holder, row.ttl)
			}
			a := asynqredis.Ref{Queue: queue, ID: "a"}
			s.ok(expect.ErrOf(s.Restore(ctx, asynqredis.RestoreOptions{Ref: a, CallKey: "a call", At: time.Now().Add(2 * time.Minute)})))
			got, holder := max(0, s.redis.TTL(ctx, "asynq:{default}:unique:x").Val()), s.redis.Get(ctx, "asynq:{default}:unique:x").Val()
			wantHolder := row.holder
			if row.ours && wantHolder == "" {
				wantHolder = "a"
			}
			// Redis rounds to seconds, and calls take time: but less than what tells 5 s from none.
			expect.That(s, (got-row.want).Abs() < 5*time.Second && holder == wantHolder, name, holder, "holds it for", got, ", want", wantHolder, row.want)
		}
	})
}

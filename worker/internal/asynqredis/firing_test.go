package asynqredis_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

var nightly = asynqredis.Firing{Queue: queue, Batch: "night.ly-1", Tick: time.Date(2026, 1, 2, 2, 0, 0, 0, time.UTC)}

func TestATaskIDSaysItsFiring(t *testing.T) {
	id := nightly.ID(17)
	expect.Equal(t, id, "sluice-batch:night.ly-1:20260102T020000Z:17")
	f, index, ok := asynqredis.FiringOf(asynqredis.Ref{Queue: queue, ID: id})
	expect.That(t, f == nightly && index == 17 && ok, f, index, ok)
	for _, id := range []string{
		"", "17", "sluice-batch:", "sluice-batch:b:20260102T020000Z:",
		"sluice-batch:b:20260102T020000Z:ended", "sluice-batch:b:20260102T020000Z:-1",
		"sluice-batch:b:20260102T020000Z:017", "sluice-batch::20260102T020000Z:1",
		"sluice-batch:b:2026:1", "sluice-batch:b:c:20260102T020000Z:1",
	} {
		f, index, ok := asynqredis.FiringOf(asynqredis.Ref{Queue: queue, ID: id})
		expect.That(t, !ok, id, f, index)
	}
}

// storeOf stores tasks of the firing at the indexes from..to-1, and returns which were.
func (s *taskQueue) storeOf(f asynqredis.Firing, from, to int) (stored []int) {
	s.Helper()
	var calls []asynqredis.EnqueueCall
	for i := from; i < to; i++ {
		calls = append(calls, s.captured(f.ID(i)))
	}
	ctx := asynqredis.WithMembers(s.Context(), asynqredis.Members{Firing: f, From: from})
	results := expect.Got(s.Store(ctx, queue, "line", calls, time.Now().Add(2*time.Minute)))(s)
	for i, result := range results {
		if result == asynqredis.Stored {
			stored = append(stored, from+i)
		}
	}
	return stored
}

// begun fires the batch, and returns who holds the firing.
func (s *taskQueue) begun() (holder string) {
	s.Helper()
	s.ok(expect.ErrOf(s.Fire(s.Context(), nightly, asynqredis.Ticks{}, false)))
	s.ok(s.Lease(s.Context(), nightly, "holder", time.Minute))
	s.wantFields([]string{"new"}, "phase")
	s.ok(expect.ErrOf(s.Update(s.Context(), nightly, "holder", "phase", "enqueue")))
	return "holder"
}

func (s *taskQueue) fields(names ...string) (values []string) {
	s.Helper()
	fields := expect.Got(s.Fields(s.Context(), nightly))(s)
	for _, name := range names {
		values = append(values, fields[name])
	}
	return values
}

func (s *taskQueue) wantFields(values []string, names ...string) {
	s.Helper()
	expect.Equal(s, s.fields(names...), values, names)
}

func TestATickIsDecidedOnce(t *testing.T) {
	each(t, func(s *taskQueue) {
		decide := func(tick, after, upTo time.Time, alone, skipped bool) {
			s.Helper()
			ticks := asynqredis.Ticks{Schedule: "a", After: after, UpTo: upTo}
			n, err := s.Fire(s.Context(), asynqredis.Firing{Queue: queue, Batch: "b", Tick: tick}, ticks, alone)
			expect.That(s, err == nil && n == asynqredis.Skipped == skipped, n, err, "skipped:", skipped)
		}
		first, second := nightly.Tick, nightly.Tick.Add(time.Hour)
		decide(time.Time{}, time.Time{}, first, false, false)
		decide(second, first, second, true, false)
		decide(second.Add(time.Minute), first, second.Add(time.Minute), false, false) // too late
		decide(second.Add(time.Minute), time.Time{}, time.Time{}, true, true)         // the second one is open
		decide(second, time.Time{}, time.Time{}, true, false)                         // by hand: it fires already
		schedule := expect.Got(s.Schedule(s.Context(), queue, "b", "a"))(s)
		want := []asynqredis.Firing{{Queue: queue, Batch: "b", Tick: second}}
		expect.That(s, slices.Equal(schedule.Open, want) && schedule.Last.Equal(second) &&
			time.Since(schedule.Now).Abs() <= time.Minute, schedule)
	})
}

func TestALeaseHasOneHolder(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.begun()
		lease := func(holder string, d time.Duration, want bool) {
			s.Helper()
			err := s.Lease(s.Context(), nightly, holder, d)
			expect.That(s, err == nil == want && (want || errors.Is(err, asynqredis.ErrNotHolder)), holder, "has the lease:", !want, err)
		}
		lease("other", time.Minute, false)
		lease("holder", time.Minute, true)
		expect.Err(s, expect.ErrOf(s.Update(s.Context(), nightly, "other", "index", 1)), asynqredis.ErrNotHolder)
		lease("holder", 0, true)
		lease("other", time.Minute, true)
		lease("holder", time.Minute, false)
		wanted, err := s.Want(s.Context(), nightly, "pause")
		expect.That(s, err == nil && wanted, wanted, err)
		want, err := s.Update(s.Context(), nightly, "other", "index", 1)
		expect.That(s, err == nil && want == "pause", want, err)
		ttl := s.redis.TTL(s.Context(), "asynq:{default}:sluice:batch:night.ly-1:20260102T020000Z").Val()
		expect.That(s, ttl >= 30*24*time.Hour, ttl)
	})
}

// Whoever makes the tasks of a resumed firing join again may have missed a pause: then they join once more.
func TestAFiringThatIsPausedWhileItResumesJoinsAgain(t *testing.T) {
	each(t, func(s *taskQueue) {
		holder := s.begun()
		for held, resumes := range map[string]int{"0": 1, "1": 2} {
			s.ok(expect.ErrOf(s.Update(s.Context(), nightly, holder, "resumed", 0)))
			for range resumes - 1 {
				s.ok(expect.ErrOf(s.Want(s.Context(), nightly, "pause")))
				s.ok(expect.ErrOf(s.Want(s.Context(), nightly, "run")))
			}
			s.ok(expect.ErrOf(s.Update(s.Context(), nightly, holder, "set_aside", 0)))
			s.wantFields([]string{held}, "set_aside")
		}
	})
}

// The ID of a task is taken when it has been stored once, though the task is gone, or was rejected.
func TestATaskOfAFiringIsStoredOnce(t *testing.T) {
	each(t, func(s *taskQueue) {
		expect.Equal(s, s.storeOf(nightly, 0, 3), nil, "stored without a firing")
		s.begun()
		expect.Equal(s, s.storeOf(nightly, 0, 3), []int{0, 1, 2}, "stored")
		s.ok(s.inspector.DeleteTask(queue, nightly.ID(1)))
		s.ok(s.inspector.DeleteTask(queue, nightly.ID(2)))
		s.ok(s.Count(s.Context(), nightly, "rejected", []int{2}))
		expect.Equal(s, s.storeOf(nightly, 0, 5), []int{3, 4}, "stored")
		s.ok(expect.ErrOf(s.Want(s.Context(), nightly, "cancel")))
		expect.Equal(s, s.storeOf(nightly, 5, 7), nil, "stored of a cancelled firing")
		s.ok(expect.ErrOf(s.Update(s.Context(), nightly, "holder", "index", 7)))
		for range 2 {
			s.ok(s.Move(s.Context(), nightly, asynqredis.Delete, []int{0, 1, 2, 3, 4, 5, 6, 7, 8}))
		}
		s.wantFields([]string{"5"}, "cancelled") // without 1, which others have deleted, and 2
	})
}

// A task is counted once, by what became of it.
func TestATaskOfAFiringIsCountedOnce(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.begun()
		s.storeOf(nightly, 0, 7)
		set := func(index int, state string) {
			s.redis.HSet(s.Context(), "asynq:{default}:t:"+nightly.ID(index), "state", state)
		}
		end := func(index int, state string) {
			s.Helper()
			call := redis.NewIntCmd(s.Context(), "hset", "asynq:{default}:t:"+nightly.ID(index), "state", state)
			if state == "" {
				call = redis.NewIntCmd(s.Context(), "del", "asynq:{default}:t:"+nightly.ID(index))
			}
			for range 2 {
				s.ok(s.End(s.Context(), call, nightly, index, time.Second))
			}
		}
		end(0, "")
		end(1, "completed")
		end(2, "archived")
		end(3, "retry")
		end(40, "") // none of the firing
		s.wantFields([]string{"2", "1"}, "done", "failed")
		end(2, "") // it was run again
		s.wantFields([]string{"3", "0"}, "done", "failed")
		refused := redis.NewIntCmd(s.Context(), "zadd", "asynq:{default}:t:"+nightly.ID(4), 1, "x")
		expect.That(s, s.End(s.Context(), refused, nightly, 4, 0) != nil, "asynq's call failed, and no error is told")
		s.wantFields([]string{"3", "0"}, "done", "failed")

		set(5, "archived")
		s.redis.Del(s.Context(), "asynq:{default}:t:"+nightly.ID(6))
		s.ok(s.Count(s.Context(), nightly, "failed", []int{0, 1, 2, 3, 4, 5, 6, 7, 8}))
		s.wantFields([]string{"3", "2"}, "done", "failed")
		s.ok(s.Count(s.Context(), nightly, "rejected", []int{7, 8}))
		s.ok(s.Count(s.Context(), nightly, "rejected", []int{3, 8})) // 3 is there, and will run
		s.wantFields([]string{"3", "2", "2"}, "done", "failed", "rejected")
	})
}

// What is kept beside a firing is its holder's to write. A letter for each index says what became of its task.
func TestOnlyTheHolderWritesBesideAFiring(t *testing.T) {
	each(t, func(s *taskQueue) {
		holder := s.begun()
		expect.Equal(s, expect.Got(s.Kept(s.Context(), nightly, "plan"))(s), "", "before a plan")
		s.ok(expect.ErrOf(s.Update(s.Context(), nightly, holder, ":plan", "{}", "late", 3)))
		expect.Err(s, expect.ErrOf(s.Update(s.Context(), nightly, "other", ":plan", "none")), asynqredis.ErrNotHolder)
		data, err := s.Kept(s.Context(), nightly, "plan")
		expect.That(s, data == "{}" && err == nil, data, err)
		s.wantFields([]string{"3", ""}, "late", ":plan")
		ttl := s.redis.TTL(s.Context(), "asynq:{default}:sluice:batch:night.ly-1:20260102T020000Z:plan").Val()
		expect.That(s, ttl >= 30*24*time.Hour, ttl)
		s.storeOf(nightly, 0, 20)
		tasks := "asynq:{default}:t:"
		s.redis.Del(s.Context(), tasks+nightly.ID(1), tasks+nightly.ID(9), tasks+nightly.ID(19))
		s.ok(s.Count(s.Context(), nightly, "rejected", []int{1, 9}))
		s.ok(s.End(s.Context(), redis.NewIntCmd(s.Context(), "del", "none"), nightly, 19, 0))
		fates, err := s.Kept(s.Context(), nightly, "fates")
		expect.That(s, err == nil && fates == "srsssssssrsssssssssd", fates, err)
	})
}

// Tasks that wait anywhere are held, released or deleted. Those that run are left alone.
func TestTasksOfAFiringThatWaitAreHeldReleasedOrDeleted(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.begun()
		s.storeOf(nightly, 0, 5)
		all := []int{0, 1, 2, 3, 4, 5}
		id := func(i int) string { return nightly.ID(i) }
		s.ok(s.inspector.RunTask(queue, id(1))) // pending
		s.redis.ZRem(s.Context(), "asynq:{default}:scheduled", id(2), id(3))
		s.redis.ZAdd(s.Context(), "asynq:{default}:retry", redis.Z{Score: 1, Member: id(2)})
		s.redis.HSet(s.Context(), "asynq:{default}:t:"+id(2), "state", "retry")
		s.redis.LPush(s.Context(), "asynq:{default}:active", id(3))
		s.redis.ZAdd(s.Context(), "asynq:{default}:lease", redis.Z{Score: 1, Member: id(3)}, redis.Z{Score: 1, Member: "other"})
		s.redis.HSet(s.Context(), "asynq:{default}:t:"+id(3), "state", "active")
		n, err := s.Running(s.Context(), nightly)
		expect.That(s, err == nil && slices.Equal(n, []int{3}), n, err)
		s.ok(s.Move(s.Context(), nightly, asynqredis.SetAside, all))
		picks := expect.Got(s.Pick(s.Context(), queue, s.NewCall(), s.waiting(id(0), id(1), id(2), id(4))))(s)
		for i, pick := range picks {
			expect.That(s, pick.Message == nil, "task", i, "is held, and was picked")
		}
		held := expect.Got(s.inspector.ListScheduledTasks(queue))(s)
		later := time.Now().Add(time.Minute)
		expect.That(s, len(held) == 4 && !held[0].NextProcessAt.Before(later), len(held), "are scheduled")
		s.ok(s.Move(s.Context(), nightly, asynqredis.Release, all))
		due, err := s.Due(s.Context(), queue, false, 10)
		expect.That(s, err == nil && len(due) == 4 && due[0].Mark == "", len(due), err)
		s.redis.SetRange(s.Context(), "asynq:{default}:sluice:batch:night.ly-1:20260102T020000Z:fates", 2, "f") // and was run again
		s.ok(s.Move(s.Context(), nightly, asynqredis.Delete, all))
		s.ok(s.Move(s.Context(), nightly, asynqredis.Delete, all))
		s.wantFields([]string{"3"}, "cancelled") // the other one stays failed
		info, err := s.inspector.GetQueueInfo(queue)
		expect.That(s, err == nil && info.Size == 1 && info.Active == 1, info, err)
		expect.Err(s, expect.ErrOf(s.inspector.GetTaskInfo(queue, id(0))), asynq.ErrTaskNotFound)
	})
}

// Tasks that a killed scheduler only stored are due at once, and join by the marks of their store.
func TestTasksThatWereOnlyStoredAreDueAtOnce(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.begun()
		s.storeOf(nightly, 0, 3)
		expect.Equal(s, s.storeOf(nightly, 0, 4), []int{3}, "stored by the next scheduler")
		s.ok(s.Move(s.Context(), nightly, asynqredis.Release, []int{0, 1, 2}))
		due, err := s.Due(s.Context(), queue, false, 10)
		expect.That(s, err == nil && len(due) == 3 && due[0].Mark != "", due, "are due,", err)
	})
}

// Neither a waiting task nor a pending one starts while its firing is paused or cancelled, or outside its hours.
func TestTasksOfAFiringThatIsStoppedDoNotStart(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.begun()
		s.storeOf(nightly, 0, 6)
		id := nightly.ID
		starts := func(want bool, index int) {
			s.Helper()
			s.ok(s.inspector.RunTask(queue, id(index+1))) // pending
			picks := expect.Got(s.Pick(s.Context(), queue, s.NewCall(), s.waiting(id(index))))(s)
			dequeued, err := s.DequeuePending(s.Context(), queue, s.NewCall(), 9)
			if picked := picks[0].Message != nil; err != nil || picked != want || len(dequeued.Messages) == 1 != want {
				s.Errorf("picked: %v, %d dequeued, %v; want %v", picked, len(dequeued.Messages), err, want)
			}
		}
		want := func(what string) {
			s.Helper()
			ok, err := s.Want(s.Context(), nightly, what)
			expect.That(s, ok && err == nil, ok, err)
		}
		want("pause")
		starts(false, 0)
		want("run")
		s.wantFields([]string{"1"}, "set_aside") // so that all of them join again
		s.ok(s.Move(s.Context(), nightly, asynqredis.Release, []int{0, 1}))
		s.redis.HSet(s.Context(), "asynq:{default}:sluice:batch:night.ly-1:20260102T020000Z", "closes", time.Now().Unix())
		starts(false, 2)
		s.redis.HSet(s.Context(), "asynq:{default}:sluice:batch:night.ly-1:20260102T020000Z", "closes", time.Now().Unix()+60)
		starts(true, 4)
	})
}

// What has failed runs again, with all its retries, if asynq's archive has it. Nothing else does.
func TestTasksOfAFiringThatFailedAreRetried(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.begun()
		s.storeOf(nightly, 0, 4)
		ok, err := s.Want(s.Context(), nightly, "retry")
		expect.That(s, !ok && err == nil, err)
		for index := range 3 {
			s.ok(s.inspector.ArchiveTask(queue, nightly.ID(index)))
		}
		s.ok(s.Count(s.Context(), nightly, "failed", []int{0, 1, 2, 3}))
		s.ok(s.inspector.DeleteTask(queue, nightly.ID(2)))
		_, _ = s.Update(s.Context(), nightly, "holder", "phase", "ended") // repeated it has ended before
		expect.Equal(s, len(expect.Got(s.Schedule(s.Context(), queue, nightly.Batch, ""))(s).Open), 0, "it has ended")
		ok, err = s.Want(s.Context(), nightly, "retry")
		expect.That(s, ok && err == nil, ok, err)
		for range 2 {
			s.ok(s.Move(s.Context(), nightly, asynqredis.RetryFailed, []int{0, 1, 2, 3}))
		}
		s.wantFields([]string{"retry", "1", "1", "2"}, "phase", "round", "failed", "retried")
		due, err := s.Due(s.Context(), queue, false, 10)
		expect.That(s, err == nil && len(due) == 2 && due[0].Message.Retried() == 0 && due[0].Message.ID() == nightly.ID(0), due, err)
		schedule, err := s.Schedule(s.Context(), queue, nightly.Batch, "")
		expect.That(s, err == nil && len(schedule.Open) == 1, schedule, err)
	})
}

package asynqredis_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// What Store leaves is what asynq's client schedules, so that its tools and its server know it.
func TestStoreSchedulesAsAsynqDoes(t *testing.T) {
	each(t, func(s *taskQueue) {
		at := time.Now().Add(2 * time.Minute)
		unique := asynq.Unique(time.Hour)
		results, err := s.Store(s.Context(), queue, "line", []asynqredis.EnqueueCall{s.captured("a"), s.captured("b", unique), s.captured("c"), s.captured("c")}, at)
		s.ok(err)
		expect.Equal(t, fmt.Sprint(results), "[1 1 1 0]", "results")
		s.wantStates("a scheduled, b scheduled, c scheduled")
		info := expect.Got(s.inspector.GetTaskInfo(queue, "b"))(s)
		expect.That(t, !info.NextProcessAt.Before(at) && !info.NextProcessAt.After(at.Add(time.Second)) &&
			string(info.Payload) == "payload of b", "asynq's tools show", info, "stored for", at)
		lock := s.captured("b", unique).Lock
		ttl := s.redis.TTL(s.Context(), lock).Val()
		expect.That(t, (ttl-time.Until(at.Add(time.Hour))).Abs() <= wholly, "the lock holds for", ttl)

		// The same task ID, and the same lock, are taken.
		other := s.captured("b", unique)
		other.ID = "d" // the lock is of type and payload
		results, err = s.Store(s.Context(), queue, "line", []asynqredis.EnqueueCall{s.captured("a"), other, s.captured("e"), s.captured("e")}, at)
		s.ok(err)
		expect.Equal(t, fmt.Sprint(results), "[0 -1 1 0]", "results")
		s.wantStates("a scheduled, b scheduled, c scheduled, e scheduled")

		// Asynq gives a task that is removed its lock back.
		s.ok(s.inspector.DeleteTask(queue, "b"))
		expect.Equal(t, s.redis.Exists(s.Context(), lock).Val(), 0, "the lock outlives its task")
		// An ID that is taken leaves no lock.
		results, err = s.Store(s.Context(), queue, "line", []asynqredis.EnqueueCall{s.captured("a", unique)}, at)
		s.ok(err)
		n := s.redis.Exists(s.Context(), s.captured("a", unique).Lock).Val()
		expect.That(t, n == 0 && results[0] == asynqredis.IDTaken, results, "and", n, "locks")
	})
}

func TestOnlyTasksThatWaitAreArranged(t *testing.T) {
	each(t, func(s *taskQueue) {
		arrange := func(tasks []asynqredis.WaitingTask, move asynqredis.Move) {
			s.Helper()
			var all []asynqredis.Move
			for _, task := range tasks {
				move.ID, move.JoinKey = task.ID, task.JoinKey
				all = append(all, move)
			}
			s.ok(expect.ErrOf(s.Apply(s.Context(), queue, all)))
		}
		unique := asynq.Unique(time.Hour)
		s.store("a", "b", "c", "d")
		stored := []asynqredis.EnqueueCall{s.captured("u", unique), s.captured("v", unique), s.captured("w", unique)}
		s.ok(expect.ErrOf(s.Store(s.Context(), queue, "line", stored, time.Now().Add(2*time.Minute))))
		another := []asynqredis.WaitingTask{{ID: "a", JoinKey: "0123456789abcdef"}, {ID: "nobody", JoinKey: "0123456789abcdef"}}
		arrange(append(s.waiting("b", "u"), another...), asynqredis.Move{To: asynqredis.Delete})
		s.wantStates("a scheduled, c scheduled, d scheduled, v scheduled, w scheduled")
		expect.Equal(t, s.redis.Exists(s.Context(), s.captured("u", unique).Lock).Val(), 0, "the lock outlives its task")
		arrange(append(s.waiting("d", "c", "v"), another...), asynqredis.Move{})
		s.wantStates("a scheduled, c pending, d pending, v pending, w scheduled")
		expect.Equal(t, s.redis.LRange(s.Context(), "asynq:{default}:pending", 0, -1).Val(), []string{"v", "c", "d"}, "pending, the next last")
		ttl := s.redis.TTL(s.Context(), s.captured("v", unique).Lock).Val()
		expect.That(t, ttl <= time.Hour, "the lock of a pending task holds for", ttl)

		later := time.Now().Add(5 * time.Hour)
		arrange(append(s.waiting("w", "c"), another...), asynqredis.Move{At: later})
		s.wantStates("a scheduled, c pending, d pending, v pending, w scheduled")
		call := s.captured("a")
		for _, told := range []struct{ reason, want string }{{"first", "first"}, {"second", "first"}} {
			// The second time the message is another one by now, and stays.
			arrange(s.waiting("a"), asynqredis.Move{At: later, Message: call.Message, Reason: told.reason})
			info := expect.Got(s.inspector.GetTaskInfo(queue, "a"))(s)
			expect.That(t, info.LastErr == told.want && string(info.Payload) == string(call.Message.Payload()), info, ", want", told.want)
		}
		info := expect.Got(s.inspector.GetTaskInfo(queue, "w"))(s)
		expect.That(t, !info.NextProcessAt.Before(later), "next at", info.NextProcessAt, ", want", later)
		ttl = s.redis.TTL(s.Context(), s.captured("w", unique).Lock).Val()
		expect.That(t, (ttl-time.Until(later.Add(time.Hour))).Abs() <= wholly, "the lock of a task that waits for 5 h holds for", ttl)
	})
}

// A pick takes what waits in line, and says of everything else why it does not.
func TestAPickTakesWhatWaitsAndSaysWhyNot(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.store("a", "b", "c", "d", "e", "f")
		_, err := s.Apply(s.Context(), queue, []asynqredis.Move{{ID: "c", JoinKey: s.key("c")}})
		s.ok(err)
		s.ok(s.inspector.ArchiveTask(queue, "d"))
		_, err = s.plain.Enqueue(asynq.NewTask("call", []byte("payload of later")), asynq.TaskID("later"), asynq.ProcessIn(time.Hour))
		s.ok(err)
		s.ok(expect.ErrOf(s.Pick(s.Context(), queue, s.NewCall(), s.waiting("e"))))

		call := s.NewCall()
		wanted := append(s.waiting("a", "b", "c", "d", "e", "later", "gone"), asynqredis.WaitingTask{ID: "f", JoinKey: "0123456789abcdef"})
		picks := expect.Got(s.Pick(s.Context(), queue, call, wanted))(s)
		for i, pick := range picks {
			found := i < 2 && pick.Message.ID() == wanted[i].ID || i >= 2 && pick.Message == nil
			expect.That(t, found && !pick.Paused, wanted[i].ID, pick)
		}
		s.wantStates("a active, b active, c pending, d archived, e active, f scheduled, later scheduled")
		s.wantLeases("a", "b", "e")

		// Asked again by the same call, it answers as before; to another they are active.
		again := expect.Got(s.Pick(s.Context(), queue, call, wanted))(s)
		expect.That(t, fmt.Sprint(again) == fmt.Sprint(picks), picks, ", repeated", again)
		others := expect.Got(s.Pick(s.Context(), queue, s.NewCall(), wanted[:1]))(s)
		expect.That(t, others[0].Message == nil && !others[0].Paused, "another call is answered", others[0])

		s.ok(s.inspector.PauseQueue(queue))
		s.store("g")
		paused := expect.Got(s.Pick(s.Context(), queue, s.NewCall(), s.waiting("g", "c")))(s)
		expect.That(t, paused[0].Paused && !paused[1].Paused, "of a paused queue:", paused)
	})
}

// The lock of a unique task holds while it waits, and from the pick on for as long as it was to.
func TestAPickKeepsTheLockOfAUniqueTask(t *testing.T) {
	each(t, func(s *taskQueue) {
		task := s.captured("u", asynq.Unique(time.Hour))
		_, err := s.Store(s.Context(), queue, "line", []asynqredis.EnqueueCall{task}, time.Now().Add(3*time.Hour))
		s.ok(err)
		call := s.NewCall()
		s.ok(expect.ErrOf(s.Pick(s.Context(), queue, call, s.waiting("u"))))
		ttl := s.redis.TTL(s.Context(), task.Lock).Val()
		expect.That(t, ttl <= time.Hour && ttl >= time.Hour-slow, "picked, its lock holds for", ttl)
		at := time.Now().Add(2 * time.Minute)
		s.restore(asynqredis.RestoreOptions{CallKey: call, At: at}, "u")
		ttl = s.redis.TTL(s.Context(), task.Lock).Val()
		expect.That(t, (ttl-time.Until(at.Add(time.Hour))).Abs() <= wholly, "put back, its lock holds for", ttl)
	})
}

// What an archive has no room for is deleted. A lock that was kept for longer lasts for its own time, archived or run.
func TestAnArchiveKeepsItsBounds(t *testing.T) {
	each(t, func(s *taskQueue) {
		old := make([]redis.Z, 9999)
		for i := range old {
			old[i] = z(fmt.Sprint("old", i), time.Now().Add(-time.Hour))
		}
		s.redis.ZAdd(s.Context(), "asynq:{default}:archived", old...)
		s.redis.HSet(s.Context(), "asynq:{default}:t:old0", "state", "archived")
		s.store("a", "b")
		for _, id := range []string{"a", "b"} {
			s.redis.HSet(s.Context(), "asynq:{default}:t:"+id, "unique_key", "lock-"+id, "sluice_lock", 10)
			s.redis.Set(s.Context(), "lock-"+id, id, time.Hour)
		}
		s.ok(expect.ErrOf(s.Apply(s.Context(), queue, []asynqredis.Move{{ID: "a", JoinKey: asynqredis.AnyKey, To: asynqredis.Archive}})))
		expect.Equal(t, s.redis.ZCard(s.Context(), "asynq:{default}:archived").Val(), 9999)
		expect.Equal(t, s.redis.Exists(s.Context(), "asynq:{default}:t:old0").Val(), 0)
		s.ok(s.inspector.RunTask(queue, "b"))
		s.ok(expect.ErrOf(s.DequeuePending(s.Context(), queue, s.NewCall(), 1)))
		for _, id := range []string{"a", "b"} {
			ttl := s.redis.TTL(s.Context(), "lock-"+id).Val()
			expect.That(t, ttl > 0 && ttl <= 10*time.Second, id, ttl)
		}
	})
}

func TestADequeueTakesWhatIsPending(t *testing.T) {
	each(t, func(s *taskQueue) {
		for _, id := range []string{"a", "b", "c d:e 5", "f", "g"} {
			s.ok(expect.ErrOf(s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID(id))))
		}
		s.redis.RPush(s.Context(), "asynq:{default}:pending", "left behind")
		call := s.NewCall()
		dequeue := func(call string, n int) asynqredis.DequeueReply {
			return expect.Got(s.DequeuePending(s.Context(), queue, call, n))(s)
		}
		first := dequeue(call, 4)
		got := ids(first.Messages)
		expect.That(t, got == "[a b c d:e 5]" && !first.Paused, "dequeued", got, ", paused", first.Paused)
		expect.Equal(t, ids(dequeue(call, 4).Messages), "[a b c d:e 5]", "repeated")
		s.wantStates("a active, b active, c d:e 5 active, f pending, g pending")
		s.wantLeases("a", "b", "c d:e 5")

		s.restore(asynqredis.RestoreOptions{CallKey: call}, "f", "nobody", "c d:e 5", "b")
		s.wantStates("a active, b pending, c d:e 5 pending, f pending, g pending")
		s.ok(s.inspector.PauseQueue(queue))
		d := dequeue(s.NewCall(), 4)
		expect.That(t, len(d.Messages) == 0 && d.Paused, "of a paused queue:", d)
		s.ok(s.inspector.UnpauseQueue(queue))
		d = dequeue(s.NewCall(), 0)
		expect.That(t, len(d.Messages) == 0, "of those asked for:", d)
		expect.Equal(t, ids(dequeue(s.NewCall(), 64).Messages), "[b c d:e 5 f g]", "what was put back is not the next")
		d = dequeue(s.NewCall(), 64)
		expect.That(t, len(d.Messages) == 0 && !d.Paused, "of an empty queue:", d)
	})
}

// A line is listed when a server is nudged, or a task comes to rest. Of the servers that look, each in
// turn is told of a line that nobody watches. It leaves the list when five were told in vain.
func TestLinesThatNobodyWatchesAreFound(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		c := asynqredis.New(client)
		look := func(want string, watched ...any) {
			t.Helper()
			d, err := c.DequeuePending(t.Context(), queue, c.NewCall(), 0, watched...)
			got := fmt.Sprint(d.Unwatched)
			expect.That(t, got == want && err == nil, "nobody watches", got, ", want", want, err)
		}
		nudge := func(lines ...any) {
			t.Helper()
			expect.Equal(t, c.Nudge(t.Context(), queue, lines...), nil)
		}
		lapse := func() { time.Sleep(1600 * time.Millisecond) }
		look("[]")
		nudge("a", "b")
		look("[a b]")
		look("[]")
		nudge("a")
		look("[a]", "b") // b is watched once more
		look("[]")
		for range 4 { // until somebody was told of a for the fifth time
			lapse()
			look("[b a]")
		}
		lapse()
		look("[b]")
		lapse()
		look("[]")
	})
}

// What is put back is only what that call has made active, and nobody took since.
func TestOnlyWhatACallMadeActiveIsRestored(t *testing.T) {
	each(t, func(s *taskQueue) {
		s.store("a", "b")
		mine, theirs := s.NewCall(), s.NewCall()
		s.ok(expect.ErrOf(s.Pick(s.Context(), queue, mine, s.waiting("a"))))
		s.ok(expect.ErrOf(s.Pick(s.Context(), queue, theirs, s.waiting("b"))))
		s.restore(asynqredis.RestoreOptions{CallKey: mine, At: time.Now().Add(2 * time.Minute)}, "a", "b")
		s.wantStates("a scheduled, b active")
		picks := expect.Got(s.Pick(s.Context(), queue, s.NewCall(), s.waiting("a")))(s)
		expect.That(t, picks[0].Message != nil, "what was put back cannot be picked:", picks[0])
	})
}

func TestForwardMovesWhatIsDue(t *testing.T) {
	each(t, func(s *taskQueue) {
		past := time.Now().Add(-time.Hour)
		s.store("line", "other")
		_, err := s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID("plain"), asynq.ProcessIn(time.Second))
		s.ok(err)
		s.ok(expect.ErrOf(s.plain.Enqueue(asynq.NewTask("call", nil), asynq.TaskID("group"), asynq.Group("g"))))
		ctx := s.Context()
		s.redis.ZRem(ctx, "asynq:{default}:g:g", "group")
		s.redis.HSet(ctx, "asynq:{default}:t:group", "state", "scheduled")
		for _, id := range []string{"line", "plain", "group", "left behind"} {
			s.redis.ZAdd(ctx, "asynq:{default}:scheduled", z(id, past))
		}
		due := expect.Got(s.Due(ctx, queue, false, 100))(s)
		var got []string
		for _, d := range due {
			got = append(got, fmt.Sprint(d.ID, " ", d.Message.ID(), " ", d.Mark != ""))
		}
		want := "[group group false line line true plain plain false]"
		expect.That(t, fmt.Sprint(got) == want, "due", got, ", want", want)
		left := s.redis.ZScore(ctx, "asynq:{default}:scheduled", "left behind").Err()
		expect.That(t, left == redis.Nil, "an ID whose task is gone is left:", left)
		mark := asynqredis.Mark(s.key("line"), s.NewCall())
		moved, err := s.Apply(ctx, queue, []asynqredis.Move{
			{ID: "line", At: time.Now().Add(time.Minute), Mark: mark}, {ID: "plain"}, {ID: "group"},
			{ID: "other", At: time.Now().Add(time.Minute), Mark: asynqredis.Mark(s.key("other"), s.NewCall())}, {ID: "nobody"},
		})
		s.ok(err)
		expect.That(t, moved[0] == asynqredis.Moved && moved[3] == asynqredis.MayRun && moved[4] == asynqredis.NotThere, "moved", moved)
		s.wantStates("group aggregating, line scheduled, other scheduled, plain pending")
		due, err = s.Due(ctx, queue, false, 100)
		expect.That(t, len(due) == 0 && err == nil, "still due", due, err)

		// From the tasks to retry too.
		s.redis.ZRem(ctx, "asynq:{default}:scheduled", "line")
		s.redis.ZAdd(ctx, "asynq:{default}:retry", z("line", past))
		s.redis.HSet(ctx, "asynq:{default}:t:line", "state", "retry")
		due = expect.Got(s.Due(ctx, queue, true, 100))(s)
		expect.That(t, len(due) == 1 && due[0].ID == "line" && due[0].Mark == mark, "due", due)
		_, err = s.Apply(ctx, queue, []asynqredis.Move{{ID: "line", At: time.Now().Add(time.Minute), Mark: mark}})
		s.ok(err)
		s.wantStates("group aggregating, line scheduled, other scheduled, plain pending")
	})
}

func TestNudgesNameEachPolicyOnce(t *testing.T) {
	each(t, func(s *taskQueue) {
		ctx := s.Context()
		for _, policies := range [][]any{{"a", "b"}, {"a"}, {"c"}} {
			s.ok(s.Nudge(ctx, queue, policies...))
		}
		var got []string
		for range 3 {
			from, policy, err := s.AwaitNudge(ctx, []string{"low", queue})
			s.ok(err)
			got = append(got, from+" "+policy)
		}
		want := "[default b default a default c]"
		expect.That(t, fmt.Sprint(got) == want, "nudges", got, ", want", want, ": each policy at most once")
		_, policy, err := s.AwaitNudge(ctx, []string{queue})
		expect.That(t, policy == "" && err == nil, "nudged by", policy, err)
	})
}

// Only what waits is dropped. A look changes nothing.
func TestWhatWaitsIsDropped(t *testing.T) {
	each(t, func(s *taskQueue) {
		key := func(name string) string { return "asynq:{" + queue + "}:" + name }
		for to, dropped := range map[string]bool{asynqredis.Look: false, asynqredis.Archive: true, asynqredis.Delete: true} {
			moves, want := []asynqredis.Move{{ID: "none"}}, []bool{true, dropped, false, false, dropped, true, true}
			for _, state := range []string{"scheduled", "pending", "active", "retry", "archived", "completed"} {
				s.redis.HSet(s.Context(), key("t:"+state), "state", state, "unique_key", "lock-"+state)
				s.redis.Set(s.Context(), "lock-"+state, state, 0)
				s.redis.ZAdd(s.Context(), key(state), redis.Z{Score: float64(time.Now().Unix()), Member: state})
				moves = append(moves, asynqredis.Move{ID: state})
			}
			for range 300 { // more than one call
				moves, want = append(moves, asynqredis.Move{ID: "active"}), append(want, false)
			}
			for i := range moves {
				moves[i].JoinKey, moves[i].To = asynqredis.AnyKey, to
			}
			got := expect.Got(s.Apply(s.Context(), queue, moves))(s)
			for i, n := range got { // of those that it has dropped a repeated call says that they are not there
				expect.That(t, (n != 0) == want[i], to, n, "for the task", moves[i].ID)
			}
			left, archived := s.redis.Exists(s.Context(), key("t:retry"), "lock-retry").Val(), s.redis.ZCard(s.Context(), key("archived")).Val()
			kept := map[string][2]int64{asynqredis.Look: {2, 1}, asynqredis.Archive: {2, 3}, asynqredis.Delete: {0, 1}}[to]
			expect.That(t, kept == [2]int64{left, archived}, to, left, "of a task and its lock are left, and", archived, "archived; want", kept)
			s.redis.FlushAll(s.Context())
		}
	})
}

func TestARedisHasOneID(t *testing.T) {
	each(t, func(s *taskQueue) {
		mine := expect.Got(s.Database(s.Context()))(s)
		theirs := expect.Got(asynqredis.New(s.redis).Database(s.Context()))(s)
		expect.That(t, mine == theirs && len(mine) >= 8, "identities", mine, "and", theirs, "of one Redis")
		const year = 366 * 24 * time.Hour // the longest period of a window; a line lives for two
		ttl := s.redis.TTL(s.Context(), "sluice:asynq").Val()
		expect.That(t, ttl >= 2*year, "it expires in", ttl)
	})
}

// The header of every script lists the keys and arguments that its code uses by number, in order, and the reply.
func TestHeadersOfScriptsSayWhatTheyUse(t *testing.T) {
	files, err := filepath.Glob("lua/*.lua")
	expect.Require(t, err == nil && len(files) != 0, files, err)
	for _, file := range files {
		text := expect.Got(os.ReadFile(file))(t)
		name := filepath.Base(file)
		if name == "functions.lua" {
			continue // functions, with which other scripts begin with
		}
		header, code, ok := strings.Cut(string(text), "\n\n")
		keys, args, hasArgs := strings.Cut(header, "-- ARGV")
		args, _, hasReply := strings.Cut(args, "-- reply")
		if !ok || !hasArgs || !hasReply || !strings.HasPrefix(header, "-- "+name+": ") {
			t.Errorf("%s: the header is to have its name, KEYS, ARGV and reply:\n%s", file, header)
			continue
		}
		for array, list := range map[string]string{"KEYS": keys, "ARGV": args} {
			listed, used := numbers(list, `\s{2,}(\d) `), numbers(code, array+`\[(\d)\]`)
			expect.That(t, slices.Equal(listed, used),
				file, array, ": the header lists", listed, ", the code uses", used)
		}
	}
}

func numbers(text, pattern string) (found []string) {
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		found = append(found, match[1])
	}
	slices.Sort(found)
	return slices.Compact(found)
}

package worker_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

func script(t testing.TB, name string) *redis.Script {
	t.Helper()
	text, err := os.ReadFile("lua/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return redis.NewScript(string(text))
}

// wake runs wake.lua for tasks of the default queue.
func (s *site) wake(ids ...string) []int64 {
	s.Helper()
	args := []any{"asynq:{default}:t:", time.Now().UnixNano()}
	for _, id := range ids {
		args = append(args, id)
	}
	var keys []string
	for _, key := range []string{"pending", "scheduled", "retry", "sluice:woken", "paused"} {
		keys = append(keys, "asynq:{default}:"+key)
	}
	reply, err := script(s, "wake.lua").Run(context.Background(), s.redis, keys, args...).Int64Slice()
	if err != nil {
		s.Fatal(err)
	}
	return reply
}

// pending returns the tasks in the order in which asynq picks them up.
func (s *site) pending() []string {
	ids := s.redis.LRange(context.Background(), "asynq:{default}:pending", 0, -1).Val()
	slices.Reverse(ids)
	return ids
}

// Tasks that are woken come before those that were not called, and after those woken before.
func TestWakeKeepsTheOrder(t *testing.T) {
	each(t, nil, func(t *testing.T, s *site) {
		for _, id := range []string{"p1", "p2"} {
			s.enqueue(asynq.NewTask("x", nil), asynq.TaskID(id))
		}
		for i := range 9 {
			s.enqueue(asynq.NewTask("x", nil), asynq.TaskID(fmt.Sprint("w", i)), asynq.ProcessIn(time.Hour))
		}
		want := func(want ...string) {
			t.Helper()
			if got := s.pending(); !slices.Equal(got, want) {
				t.Errorf("asynq picks up %q, want %q", got, want)
			}
		}
		pick := func() { s.redis.RPop(t.Context(), "asynq:{default}:pending") }

		s.wake("w0", "w1", "w2")
		want("w0", "w1", "w2", "p1", "p2")
		s.wake("w3", "w4")
		want("w0", "w1", "w2", "w3", "w4", "p1", "p2")
		s.wake("w1", "w4") // again: nothing changes
		want("w0", "w1", "w2", "w3", "w4", "p1", "p2")
		pick()
		pick()
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("p3"))
		s.wake("w5")
		want("w2", "w3", "w4", "w5", "p1", "p2", "p3")
		for range 5 {
			pick()
		}
		s.wake("w6") // all that were woken have been picked up, and p1 too
		want("w6", "p2", "p3")
		for range 3 {
			pick()
		}
		s.wake("w7", "w8")
		want("w7", "w8")
	})
}

// What is said of every task, and that only those change which wait.
func TestWakeAnswers(t *testing.T) {
	each(t, nil, func(t *testing.T, s *site) {
		running, end := make(chan struct{}), make(chan struct{})
		theirs, _ := s.configs()
		theirs.DelayedTaskCheckInterval = time.Hour // what waits for a retry stays there
		theirs.Queues = map[string]int{"default": 1}
		theirs.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
		server := asynq.NewServer(s.asynq, theirs)
		if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			switch task.Type() {
			case "active":
				close(running)
				<-end
			case "fails":
				return fmt.Errorf("boom")
			}
			return nil
		})); err != nil {
			t.Fatal(err)
		}
		for id, opts := range map[string][]asynq.Option{
			"completed": {asynq.Retention(time.Hour)},
			"archived":  {asynq.MaxRetry(0)},
			"retry":     {asynq.MaxRetry(5)},
			"active":    {},
		} {
			kind := map[string]string{"completed": "x", "archived": "fails", "retry": "fails", "active": "active"}[id]
			s.enqueue(asynq.NewTask(kind, nil), append(opts, asynq.TaskID(id))...)
		}
		<-running
		s.waitState(asynq.TaskStateCompleted, "completed")
		s.waitState(asynq.TaskStateArchived, "archived")
		s.waitState(asynq.TaskStateRetry, "retry")
		server.Stop()
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("scheduled"), asynq.ProcessIn(time.Hour))
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("grouped"), asynq.Group("some"))
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("pending"))

		ids := []string{"completed", "archived", "retry", "active", "scheduled", "grouped", "pending", "never was"}
		before := s.states(ids)
		if got, want := s.wake(ids...), []int64{0, 0, 1, 3, 1, 0, 2, 0}; !slices.Equal(got, want) {
			t.Errorf("%q: replies %v, want %v", ids, got, want)
		}
		want := maps.Clone(before)
		want["retry"], want["scheduled"] = "pending", "pending"
		if got := s.states(ids); !maps.Equal(got, want) {
			t.Errorf("states %v, want %v", got, want)
		}
		if got := s.pending(); !slices.Equal(got, []string{"retry", "scheduled", "pending"}) {
			t.Errorf("pending: %q", got)
		}
		for _, set := range []string{"scheduled", "retry"} {
			if n := s.redis.ZCard(t.Context(), "asynq:{default}:"+set).Val(); n != 0 {
				t.Errorf("%d left in %s", n, set)
			}
		}

		if err := s.inspector.PauseQueue("default"); err != nil {
			t.Fatal(err)
		}
		s.enqueue(asynq.NewTask("x", nil), asynq.TaskID("late"), asynq.ProcessIn(time.Hour))
		if got := s.wake("late", "pending", "active", "completed"); !slices.Equal(got, []int64{4, 4, 3, 0}) {
			t.Errorf("while the queue is paused: %v", got)
		}
		close(end)
		server.Shutdown()
	})
}

func (s *site) states(ids []string) map[string]string {
	states := map[string]string{}
	for _, id := range ids {
		states[id] = s.redis.HGet(context.Background(), "asynq:{default}:t:"+id, "state").Val()
	}
	return states
}

// wake.lua leaves a task as asynq's own Inspector.RunTask does, save for the time since which it is
// pending, which asynq's enqueue writes and RunTask does not.
func TestWakeIsRunTask(t *testing.T) {
	each(t, nil, func(t *testing.T, s *site) {
		for _, id := range []string{"ours", "asynqs"} {
			s.enqueue(asynq.NewTask("x", []byte("payload")), asynq.TaskID(id), asynq.ProcessIn(time.Hour), asynq.Unique(time.Hour), asynq.Queue(id))
		}
		before := s.redis.HGetAll(t.Context(), "asynq:{ours}:t:ours").Val()
		keys := []string{"asynq:{ours}:pending", "asynq:{ours}:scheduled", "asynq:{ours}:retry", "asynq:{ours}:sluice:woken", "asynq:{ours}:paused"}
		if err := script(t, "wake.lua").Run(t.Context(), s.redis, keys, "asynq:{ours}:t:", 12345, "ours").Err(); err != nil {
			t.Fatal(err)
		}
		if err := s.inspector.RunTask("asynqs", "asynqs"); err != nil {
			t.Fatal(err)
		}
		ours := s.redis.HGetAll(t.Context(), "asynq:{ours}:t:ours").Val()
		asynqs := s.redis.HGetAll(t.Context(), "asynq:{asynqs}:t:asynqs").Val()
		if ours["pending_since"] != "12345" {
			t.Errorf("pending since %q", ours["pending_since"])
		}
		delete(ours, "pending_since")
		if got, want := slices.Sorted(maps.Keys(ours)), slices.Sorted(maps.Keys(asynqs)); !slices.Equal(got, want) {
			t.Errorf("fields %q, and asynq's %q", got, want)
		}
		if ours["state"] != asynqs["state"] || ours["msg"] != before["msg"] || ours["unique_key"] != before["unique_key"] {
			t.Errorf("%v, and asynq's %v", ours, asynqs)
		}
	})
}

// place.lua leaves what asynq's client does that schedules a task for that time.
func TestPlaceIsSchedule(t *testing.T) {
	each(t, []throttle.Policy{shared(1, time.Hour)}, func(t *testing.T, s *site) {
		client := s.planner(s.limiter)
		s.planMany(client, "acme", 0, 1)
		for name, opts := range map[string][]asynq.Option{
			"plain":  {asynq.MaxRetry(3)},
			"unique": {asynq.MaxRetry(3), asynq.Unique(time.Hour)},
		} {
			id := "the " + name
			info, err := client.EnqueueContext(t.Context(), acmeTask(), append(opts, asynq.TaskID(id))...)
			if err != nil {
				t.Fatal(err)
			}
			ours, score := s.stored(id), s.redis.ZScore(t.Context(), "asynq:{default}:scheduled", id).Val()
			lockKey := ours["unique_key"]
			lock, held := s.redis.Get(t.Context(), lockKey).Val(), s.redis.TTL(t.Context(), lockKey).Val()
			if err := s.inspector.DeleteTask("default", id); err != nil {
				t.Fatal(err)
			}
			if _, err := s.plain.Enqueue(acmeTask(), append(opts, asynq.TaskID(id), asynq.ProcessAt(info.NextProcessAt))...); err != nil {
				t.Fatal(err)
			}
			delete(ours, "sluice_lock")   // for requeue.lua
			delete(ours, "sluice_placed") // which is ours alone
			if asynqs := s.stored(id); !maps.Equal(ours, asynqs) {
				t.Errorf("%s: stored %v, and by asynq %v", name, ours, asynqs)
			}
			if want := s.redis.ZScore(t.Context(), "asynq:{default}:scheduled", id).Val(); score != want {
				t.Errorf("%s: comes at %v, and by asynq at %v", name, score, want)
			}
			if name != "unique" {
				continue
			}
			if want := s.redis.Get(t.Context(), lockKey).Val(); lockKey == "" || lock != want {
				t.Errorf("the lock %s is %q, and asynq's %q", lockKey, lock, want)
			}
			if asynqs := s.redis.TTL(t.Context(), lockKey).Val(); (held - asynqs).Abs() > 20*time.Second {
				t.Errorf("the lock holds for %v, and asynq's for %v", held, asynqs)
			}
		}
	})
}

func (s *site) stored(id string) map[string]string {
	return s.redis.HGetAll(context.Background(), "asynq:{default}:t:"+id).Val()
}

// place.lua, like asynq, enqueues nothing whose ID or lock is taken.
func TestPlaceAnswers(t *testing.T) {
	each(t, nil, func(t *testing.T, s *site) {
		place := func(lock, nonce string) int64 {
			t.Helper()
			keys := []string{"asynq:{default}:t:a", "asynq:{default}:scheduled"}
			if lock != "" {
				keys = append(keys, lock)
			}
			n, err := script(t, "place.lua").Run(t.Context(), s.redis, keys, "message", "a", 2_000_000_000, 30, 30, nonce).Int64()
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		for _, row := range []string{"enqueued", "the same call again, after its reply was lost"} {
			if n := place("lock", "first"); n != 1 {
				t.Errorf("%s: %d", row, n)
			}
		}
		if n := place("", "second"); n != 0 {
			t.Errorf("the ID is taken: %d", n)
		}
		if n := place("lock", "third"); n != -1 {
			t.Errorf("the lock is taken: %d", n)
		}
		if n := s.redis.ZCard(t.Context(), "asynq:{default}:scheduled").Val(); n != 1 {
			t.Errorf("%d are scheduled", n)
		}
	})
}

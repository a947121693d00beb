package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

// A watchedRedis is a Redis behind a proxy.
type watchedRedis struct {
	*testing.T
	proxy   *proxy
	witness *witness
}

func newWatchedRedis(t *testing.T, client *redis.Client, seed uint64, rate float64) *watchedRedis {
	w := newWitness()
	return &watchedRedis{t, newProxy(client.Options().Addr, w, seed, rate), w}
}

func (w *watchedRedis) opt(holder string) asynq.RedisClientOpt {
	w.Helper()
	l := expect.Got(w.proxy.listen(holder))(w)
	w.Cleanup(func() { l.Close() })
	return asynq.RedisClientOpt{Addr: l.Addr().String()}
}

func (w *watchedRedis) wait(what string, condition func() bool) {
	w.Helper()
	for end := time.Now().Add(50 * time.Second); !condition(); time.Sleep(5 * time.Millisecond) {
		expect.Require(w, !time.Now().After(end), "waited in vain until", what)
	}
}

func quick(concurrency int) asynq.Config {
	return asynq.Config{
		Concurrency: concurrency, DelayedTaskCheckInterval: 20 * time.Millisecond, LogLevel: asynq.FatalLevel,
		RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return 0 }, TaskCheckInterval: 10 * time.Millisecond,
	}
}

// Every way in which asynq, and Sluice for a task that is denied, puts a task down is seen.
func TestWitnessSeesHowTasksEnd(t *testing.T) {
	t.Parallel()
	const takenUUID = "0b6e1a5c-7d1f-4c0e-9a53-1f0e2d3c4b5a" // as asynq makes them
	w := newWatchedRedis(t, throttletest.Client(t, throttletest.Redis(t)), 1, 0)
	limits := redis.NewClient(&redis.Options{Addr: w.opt("w.1").Addr})
	defer limits.Close()
	limiter, err := throttle.New(throttle.Config{Client: limits, Policies: []throttle.Policy{{
		Name: "api", Match: []string{"denied"}, Windows: []throttle.Window{{Name: "one", Limit: 1, Period: time.Hour}},
	}, {
		Name: "roomy", Match: []string{"taken"}, Windows: []throttle.Window{{Name: "many", Limit: 100, Period: time.Hour}},
	}}})
	expect.Must(t, err)
	d, err := limiter.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
	expect.Require(t, err == nil && d.Granted, d, err)
	server := expect.Got(worker.NewServer(w.opt("w.1"), quick(2), worker.Config{Limiter: limiter}))(t)
	plain := asynq.NewClient(w.opt("producer"))
	defer plain.Close()
	for id, opts := range map[string][]asynq.Option{
		"done": nil, "kept": {asynq.Retention(time.Hour)}, "unique": {asynq.Unique(time.Hour)},
		"archived": {asynq.MaxRetry(0)}, "retried": {asynq.MaxRetry(1)}, "denied": {asynq.MaxRetry(0)},
	} {
		task := worker.NewTask(worker.Identity{Tenant: "acme"}, id, nil)
		expect.Must(t, expect.ErrOf(plain.Enqueue(task, append(opts, asynq.TaskID(id))...)))
	}
	joiner := expect.Got(worker.NewClient(w.opt("producer"), worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute}))(t)
	defer joiner.Close()
	drawn := w.proxy.drawn(enqueues)
	for _, result := range joiner.EnqueueBulk(t.Context(), []*asynq.Task{
		worker.NewTask(worker.Identity{Tenant: "acme"}, "taken", nil, asynq.TaskID("taken")),
		worker.NewTask(worker.Identity{Tenant: "acme"}, "taken", nil, asynq.TaskID(takenUUID)),
	}) {
		expect.Must(t, result.Err)
	}
	expect.That(t, w.proxy.drawn(enqueues) != drawn, "EnqueueBulk was called, and nobody saw it")
	expect.Must(t, server.Start(asynq.HandlerFunc(func(_ context.Context, task *asynq.Task) error {
		if task.Type() == "archived" || task.Type() == "retried" {
			return errFault
		}
		return nil
	})))
	defer server.Shutdown()
	for id, n := range map[string]int{
		"done": 1, "kept": 1, "unique": 1, "archived": 1,
		"retried": 2, "denied": 1, "taken": 1, takenUUID: 1,
	} {
		w.wait(id+" has ended", func() bool {
			attempts := w.witness.attemptsOf(id)
			// On a busy machine a task that was ready for too long goes back, and is picked up again.
			return len(attempts) >= n && !attempts[len(attempts)-1].Ended.IsZero()
		})
		for _, h := range w.witness.attemptsOf(id) {
			expect.That(t, h.Holder == "w.1" && h.EndedBy == "w.1" && !h.Lost && h.Call != "" &&
				h.Taken == (id == "taken" || id == takenUUID), id, h)
		}
		w.witness.died("w.1")
		got := w.witness.excused(id)
		expect.That(t, len(got) == 0, id, "excused, though it was put down before its worker died", got)
	}
	got := w.witness.orphans()
	expect.That(t, len(got) == 0, "orphans", got)
	w.witness.died("w.1")
	taken := map[string]bool{}
	for _, one := range w.witness.killedTakes() {
		taken[one.Task] = !one.Granted.IsZero() && one.Holder == "w.1"
	}
	expect.That(t, maps.Equal(taken, map[string]bool{"taken": true, takenUUID: true}), "taken from the line", taken)
}

// Sluice repeats a pick-up until it is answered. A lost reply explains nothing then, unless the worker died.
func TestWitnessOfRepeatedCalls(t *testing.T) {
	t.Parallel()
	delivered, lost := func() bool { return true }, func() bool { return false }
	message := protowire.AppendString(protowire.AppendTag(nil, 3, protowire.BytesType), "a")
	const prefix = "asynq:{default}:"
	const pending, scheduled, paused = prefix + "pending", prefix + "scheduled", prefix + "paused"
	const active, lease, tasks = prefix + "active", prefix + "lease", prefix + "t:"
	for name, begin := range map[string]wireCall{
		"pick": callOf([]string{"evalsha", "x", "4", scheduled, active, lease, paused,
			tasks, "99", "call", "a", "key"}),
		"dequeue": callOf([]string{"evalsha", "x", "7", prefix + "sluice:dequeued:p", prefix + "sluice:lines", pending, paused, active, scheduled, lease,
			tasks, "99", "7", "call"}),
	} {
		w := newWitness()
		reply := fmt.Appendf(nil, "*3\r\n:1\r\n$%d\r\n%s\r\n:4\r\n", len(message), message)
		w.saw(begin, reply, "w.1", lost)
		attempts := w.attemptsOf("a")
		expect.That(t, len(attempts) == 1 && attempts[0].Lost && attempts[0].Call == "call" && attempts[0].Taken == (name == "pick"), name, attempts)
		expect.That(t, len(w.excused("a")) == 0 && len(w.orphans()) == 0, name, "a lost reply is an excuse")
		w.saw(begin, reply, "w.1", delivered)
		attempts = w.attemptsOf("a")
		expect.That(t, len(attempts) == 1 && !attempts[0].Lost, name, "repeated", attempts)
		restore := func(call string) wireCall {
			return callOf([]string{"evalsha", "x", "6", active, lease, scheduled, pending, prefix + "sluice:lines", tasks + "a",
				"a", call, "", "0", "keep", "", ""})
		}
		w.saw(restore("another"), []byte(":0\r\n"), "w.1", delivered)
		attempts = w.attemptsOf("a")
		expect.That(t, attempts[0].Ended.IsZero(), name, "another call was undone", attempts)
		w.died("w.1")
		expect.That(t, len(w.excused("a")) == 1 && len(w.orphans()) == 1, name, "a killed worker is no excuse")
		w.saw(restore("call"), []byte(":1\r\n"), "w.1", lost)
		attempts = w.attemptsOf("a")
		expect.That(t, !attempts[0].Ended.IsZero() && len(w.excused("a")) == 0 && len(w.orphans()) == 0, name, "undone", attempts)
	}
}

// seedFor returns a seed by which the second call of a kind loses its reply, and those around it
// go well: the first is told that Redis does not know the script.
func seedFor(kind string) uint64 {
	for seed := uint64(1); ; seed++ {
		var fates [20]fate
		for i := range fates {
			fates[i], _ = fateOf(seed, kind, uint64(i), 0.1)
		}
		if fates == [20]fate{1: dropped} {
			return seed
		}
	}
}

// A task whose pick-up was answered into a cut connection has a fault to blame, so has one whose worker dies with it.
func TestWitnessSeesWhatFaultsHit(t *testing.T) {
	t.Parallel()
	client := throttletest.Client(t, throttletest.Redis(t))
	w := newWatchedRedis(t, client, seedFor(dequeues), 0.1)
	plain := asynq.NewClientFromRedisClient(client)
	for _, id := range []string{"lost", "held"} {
		expect.Must(t, expect.ErrOf(plain.Enqueue(asynq.NewTask("x", nil), asynq.TaskID(id))))
	}
	server := asynq.NewServer(w.opt("w.1"), quick(1))
	var running atomic.Bool
	finish := make(chan struct{})
	expect.Must(t, server.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
		running.Store(true)
		<-finish
		return nil
	})))
	defer server.Shutdown()
	defer close(finish)
	w.wait("a task runs, and was seen", func() bool { return running.Load() && len(w.witness.attemptsOf("held")) > 0 })
	attempts := w.witness.attemptsOf("lost")
	expect.That(t, len(attempts) == 1 && attempts[0].Lost, "lost", attempts)
	expect.Equal(t, w.witness.orphans(), []string{"lost"}, "orphans")
	got := w.witness.excused("held")
	expect.That(t, len(got) == 0, "excused before its worker died", got)
	w.witness.died("w.1")
	for _, id := range []string{"lost", "held"} {
		got := w.witness.excused(id)
		expect.That(t, len(got) == 1, id, "excused", len(got), "times, want once")
	}
}

func TestLostRepliesOfEnqueues(t *testing.T) {
	t.Parallel()
	w := newWatchedRedis(t, throttletest.Client(t, throttletest.Redis(t)), seedFor(enqueues), 0.1)
	plain := asynq.NewClient(w.opt("producer"))
	defer plain.Close()
	for _, id := range []string{"a", "b"} {
		_, err := plain.Enqueue(asynq.NewTask("x", nil), asynq.TaskID(id))
		expect.Require(t, err == nil || errors.Is(err, asynq.ErrTaskIDConflict), err)
	}
	w.wait("the loss is seen", func() bool {
		w.witness.mu.Lock()
		defer w.witness.mu.Unlock()
		return w.witness.reenqueued["a"] && w.witness.lost[enqueues] > 0
	})
	expect.That(t, !w.witness.reenqueued["b"], "b was enqueued without a fault")
	drawn := w.proxy.drawn(enqueues)
	expect.Must(t, expect.ErrOf(plain.Enqueue(asynq.NewTask("x", nil), asynq.TaskID("c"), asynq.Unique(time.Minute))))
	expect.That(t, w.proxy.drawn(enqueues) != drawn, "a unique task was enqueued, and nobody saw it")
}

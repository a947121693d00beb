package workertest

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A kit is the Redis of a worker that asks only when there may be something to find. In production a
// worker looks each second at what others may have changed. Here that would cost a test that sleeps for
// a day more than all else. What happens in this process is known without asking: then the worker looks
// a second later. Changes by other limiters are seen within a minute.
type kit struct {
	throttletest.Memory
	log     io.Writer
	worker  *testhook.Client
	looking atomic.Bool // a look is to come
}

// MakeRedisClient returns the client of the worker.
func (k *kit) MakeRedisClient() any {
	client := redis.NewClient(k.Options())
	client.AddHook(&repetitions{Memory: k.Memory, looks: map[string]time.Time{}})
	k.worker = &testhook.Client{UniversalClient: client}
	return k.worker
}

// limiterClient returns the client of the limiter. Its scripts let a server ask each minute.
func (k *kit) limiterClient(t testing.TB) redis.UniversalClient {
	rare := strings.NewReplacer("LATEST = 1000000,", "LATEST = 60000000,", "SPREAD = 2000000,", "SPREAD = 61000000,")
	return &testhook.Client{UniversalClient: k.Client(t), Edit: rare.Replace}
}

// look has the worker ask its lines a second from now: limits may have been raised, and slots freed.
func (k *kit) look() {
	if k.worker != nil && k.looking.CompareAndSwap(false, true) {
		time.AfterFunc(time.Second, func() {
			k.looking.Store(false)
			k.worker.Look()
		})
	}
}

// observer looks, too, after decisions and changes of published policies.
func (k *kit) observer(o throttle.Observer) throttle.Observer {
	o.Called = func(c throttle.Call) {
		if c.Script == "decide" {
			k.look()
		}
	}
	o.Followed = func(int64, error) { k.look() }
	return o
}

// Write writes to the log, and looks, as policies may have been replaced.
func (k *kit) Write(entry []byte) (int, error) {
	k.look()
	return k.log.Write(entry)
}

// Repetitions are calls that a worker makes again and again, and that are spared while nothing has changed.
//
// Heartbeats are those by which an asynq server says every 5 s what it does. One that says the same as the
// last only lets that live on: a script costs six times as much. Looks are those by which a worker looks
// for pending tasks each second. Each minute one is made in any case.
type repetitions struct {
	throttletest.Memory
	heartbeat string               // the last one
	looks     map[string]time.Time // the last look at a queue, by the prefix of its keys, if it found nothing
}

func (r *repetitions) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		args := cmd.Args()
		if !ok || len(args) < 4 {
			return next(ctx, cmd)
		}
		key := fmt.Sprint(args[3])
		prefix, _, look := strings.Cut(key, "sluice:dequeued:")
		switch {
		case look:
			return r.look(ctx, prefix, script, next)
		case len(args) == 7 && strings.HasPrefix(key, "asynq:servers:{"):
			said := fmt.Sprint(args[5:]...)
			if said == r.heartbeat {
				script.SetVal("OK")
				return next(ctx, redis.NewCmd(ctx, "expire", key, args[5]))
			}
			r.heartbeat = said
		}
		return next(ctx, cmd)
	}
}

func (r *repetitions) look(ctx context.Context, prefix string, script *redis.Cmd, next redis.ProcessHook) error {
	finds := r.Exists(prefix+"pending") || r.Exists(prefix+"paused")
	if !finds && time.Since(r.looks[prefix]) < time.Minute {
		script.SetVal([]any{int64(0), []any{}, []any{}})
		return nil
	}
	delete(r.looks, prefix)
	err := next(ctx, script)
	if err == nil && !finds {
		r.looks[prefix] = time.Now()
	}
	return err
}

func (r *repetitions) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *repetitions) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

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
	client.AddHook(&heartbeats{})
	k.worker = &testhook.Client{
		UniversalClient: client,
		HasPending:      func(queue string) bool { return k.Exists("asynq:{" + queue + "}:pending") },
	}
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

// Heartbeats are the calls by which an asynq server says every 5 s what it does. One that says the same
// as the last only lets that live on: a script costs six times as much.
type heartbeats struct{ last string }

func (h *heartbeats) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		script, ok := cmd.(*redis.Cmd)
		if args := cmd.Args(); ok && len(args) == 7 && strings.HasPrefix(fmt.Sprint(args[3]), "asynq:servers:{") {
			said := fmt.Sprint(args[5:]...)
			if said == h.last {
				script.SetVal("OK")
				return next(ctx, redis.NewCmd(ctx, "expire", args[3], args[5]))
			}
			h.last = said
		}
		return next(ctx, cmd)
	}
}

func (h *heartbeats) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *heartbeats) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

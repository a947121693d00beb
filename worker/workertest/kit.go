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

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A kit is the Redis of a worker that asks only when there may be something to find. In production a
// worker looks each second at what others may have changed. Here that would cost a test that sleeps for
// a day more than all else. What happens in this process is known without asking: the worker looks a
// second after it. Changes by other limiters are seen within a minute.
type kit struct {
	throttletest.Memory
	log       io.Writer
	worker    *testhook.Client
	looking   atomic.Bool          // a look is scheduled
	heartbeat string               // the last heartbeat
	looks     map[string]time.Time // the last look at a queue that found nothing, by the prefix of its keys
}

// MakeRedisClient returns the client of the worker.
func (k *kit) MakeRedisClient() any {
	client := redis.NewClient(k.Options())
	client.AddHook(hooktest.Hook(k.spare))
	k.worker = &testhook.Client{UniversalClient: client}
	return k.worker
}

// limiterClient returns the client of the limiter. Its scripts let a server ask each minute.
func (k *kit) limiterClient(t testing.TB) redis.UniversalClient {
	rare := strings.NewReplacer("LATEST = 1000000,", "LATEST = 60000000,", "SPREAD = 2000000,", "SPREAD = 61000000,")
	return &testhook.Client{UniversalClient: k.Client(t), Edit: rare.Replace}
}

// look makes the worker ask its lines a second from now: limits may have been raised, and slots freed.
func (k *kit) look() {
	if k.worker != nil && k.looking.CompareAndSwap(false, true) {
		time.AfterFunc(time.Second, func() {
			k.looking.Store(false)
			k.worker.Look()
		})
	}
}

// observe calls look after a decision, and after a change of published policies.
func (k *kit) observe(event any) {
	switch e := event.(type) {
	case throttle.Call:
		if e.Script == "decide" {
			k.look()
		}
	case throttle.Publication:
		k.look()
	}
}

// Write writes to the log, and calls look, as policies may have been replaced.
func (k *kit) Write(entry []byte) (int, error) {
	k.look()
	return k.log.Write(entry)
}

// spare leaves out calls that a worker repeats while nothing has changed: a script costs six times as much as
// another command. An asynq server reports every 5 s what it does. If a report is the same as the last, spare
// only renews that one's expiry. One look for pending tasks a minute is made in any case.
func (k *kit) spare(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	script, ok := cmd.(*redis.Cmd)
	args := cmd.Args()
	if !ok || len(args) < 4 {
		return next(ctx, cmd)
	}
	key := fmt.Sprint(args[3]) // the first key, of "evalsha SHA n KEY ..."
	prefix, _, isLook := strings.Cut(key, "sluice:dequeued:")
	switch {
	case isLook && (k.Exists(prefix+"pending") || k.Exists(prefix+"paused")):
		delete(k.looks, prefix)
	case isLook && args[0] == "evalsha" && time.Since(k.looks[prefix]) < time.Minute: // an eval follows an evalsha that found no script
		script.SetVal([]any{int64(0), []any{}, []any{}})
		return nil
	case isLook:
		k.looks[prefix] = time.Now()
	case len(args) == 7 && strings.HasPrefix(key, "asynq:servers:{"): // "evalsha SHA 2 KEY KEY TTL SERVER", no task runs
		previous := k.heartbeat
		if k.heartbeat = fmt.Sprint(args[5:]...); k.heartbeat == previous {
			script.SetVal("OK")
			return next(ctx, redis.NewCmd(ctx, "expire", key, args[5]))
		}
	}
	return next(ctx, cmd)
}

package asynqredis_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const queue = "default"

// slow is more than a machine is.
const slow = time.Minute

// wholly is how far a lock may be off: the time until a task starts and a TTL are in whole seconds.
const wholly = 2 * time.Second

// A taskQueue is one queue in a Redis, with asynq's own tools on it.
type taskQueue struct {
	testing.TB
	*asynqredis.Client
	inspector *asynq.Inspector
	plain     *asynq.Client
	redis     *redis.Client
}

// multiNode is a client that is not known to be of one node, as that of a Cluster: calls have a further key.
type multiNode struct{ redis.UniversalClient }

// each runs the test on real Redis and on miniredis, as it is, and as on a Cluster with every script call sent twice.
func each(t *testing.T, test func(s *taskQueue)) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for _, how := range []string{"once", "twice"} {
			t.Run(how, func(t *testing.T) {
				client.FlushAll(t.Context())
				ours := redis.NewClient(&redis.Options{Addr: client.Options().Addr})
				t.Cleanup(func() { ours.Close() })
				connection := redis.UniversalClient(ours)
				if how == "twice" {
					ours.AddHook(hooktest.Hook(hooktest.Twice))
					connection = multiNode{ours}
				}
				ours.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
					_, enqueues := asynqredis.EnqueueOf(cmd.Args())
					if call := asynqredis.CallOf(cmd.Args()); call.Verb != "" || enqueues {
						t.Errorf("a call of ours looks like asynq's %s: %v", call.Verb, cmd.Args()[2:])
					}
					return next(ctx, cmd)
				}))
				opt := asynq.RedisClientOpt{Addr: client.Options().Addr}
				s := &taskQueue{
					TB: t, Client: asynqredis.New(connection), inspector: asynq.NewInspector(opt),
					plain: asynq.NewClient(opt), redis: client,
				}
				t.Cleanup(func() { s.inspector.Close(); s.plain.Close() })
				client.SAdd(t.Context(), "asynq:queues", queue)
				test(s)
			})
		}
	})
}

// captured is what asynq's client would enqueue.
func (s *taskQueue) captured(id string, opts ...asynq.Option) asynqredis.EnqueueCall {
	s.Helper()
	return s.capturedTask(asynq.NewTask("call", []byte("payload of "+id)), append(opts, asynq.TaskID(id))...)
}

func (s *taskQueue) capturedTask(task *asynq.Task, opts ...asynq.Option) asynqredis.EnqueueCall {
	s.Helper()
	var call asynqredis.EnqueueCall
	client := asynq.NewClient(hooktest.With(asynq.RedisClientOpt{Addr: s.redis.Options().Addr}, hooktest.Hook(
		func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			script, ok := cmd.(*redis.Cmd)
			if !ok {
				return next(ctx, cmd)
			}
			if call, ok = asynqredis.EnqueueOf(script.Args()); !ok {
				return next(ctx, cmd)
			}
			script.SetVal(int64(1))
			return nil
		})))
	defer client.Close()
	s.ok(expect.ErrOf(client.Enqueue(task, opts...)))
	return call
}

func (s *taskQueue) store(ids ...string) {
	s.Helper()
	var calls []asynqredis.EnqueueCall
	for _, id := range ids {
		calls = append(calls, s.captured(id))
	}
	results := expect.Got(s.Store(s.Context(), queue, "line", calls, time.Now().Add(2*time.Minute)))(s)
	for i, result := range results {
		expect.Require(s, result == asynqredis.Stored, "storing", ids[i], result)
	}
}

// key is the join key of a task that captured made.
func (s *taskQueue) key(id string) string { return s.captured(id).Message.JoinKey() }

func (s *taskQueue) waiting(ids ...string) (tasks []asynqredis.WaitingTask) {
	for _, id := range ids {
		tasks = append(tasks, asynqredis.WaitingTask{ID: id, JoinKey: s.key(id)})
	}
	return tasks
}

// restore puts tasks back that keep their marks, if they are active by the call.
func (s *taskQueue) restore(r asynqredis.RestoreOptions, ids ...string) {
	s.Helper()
	r.Queue, r.Mark = queue, asynqredis.KeptMark
	for _, r.ID = range ids {
		_, err := s.Restore(s.Context(), r)
		expect.Require(s, err == nil || asynqredis.IsNotFound(err), err)
	}
}

func (s *taskQueue) ok(err error) {
	s.Helper()
	expect.Must(s, err)
}

// wantStates fails unless asynq's tools show just these tasks: "ID STATE, ID STATE", by ID. It also
// compares the sets and lists with what the tasks say of themselves.
func (s *taskQueue) wantStates(want string) {
	s.Helper()
	ctx := s.Context()
	var states []string
	prefix := "asynq:{" + queue + "}:"
	for _, key := range s.redis.Keys(ctx, prefix+"t:*").Val() {
		id := strings.TrimPrefix(key, prefix+"t:")
		state := s.redis.HGet(ctx, key, "state").Val()
		states = append(states, id+" "+state)
		sets := map[string]bool{
			"active":      slices.Contains(s.redis.LRange(ctx, prefix+"active", 0, -1).Val(), id),
			"aggregating": s.redis.ZScore(ctx, prefix+"g:g", id).Err() == nil,
			"pending":     slices.Contains(s.redis.LRange(ctx, prefix+"pending", 0, -1).Val(), id),
			"retry":       s.redis.ZScore(ctx, prefix+"retry", id).Err() == nil,
			"scheduled":   s.redis.ZScore(ctx, prefix+"scheduled", id).Err() == nil,
		}
		for set, in := range sets {
			expect.That(s, in == (set == state), "task", id, "is", state, "; in", set, in)
		}
		leased := s.redis.ZScore(ctx, prefix+"lease", id).Err() == nil
		expect.That(s, leased == (state == "active"), id, state, leased)
	}
	slices.Sort(states)
	expect.Equal(s, strings.Join(states, ", "), want, "tasks")
}

func ids(messages []asynqredis.Message) string {
	var ids []string
	for _, m := range messages {
		ids = append(ids, m.ID())
	}
	return fmt.Sprint(ids)
}

func z(id string, at time.Time) redis.Z { return redis.Z{Score: float64(at.Unix()), Member: id} }

// wantLeases checks that the leases of these tasks have just begun.
func (s *taskQueue) wantLeases(ids ...string) {
	s.Helper()
	for _, id := range ids {
		end := expect.Got(s.redis.ZScore(s.Context(), "asynq:{"+queue+"}:lease", id).Result())(s)
		left := time.Until(time.Unix(int64(end), 0))
		expect.That(s, left <= asynqredis.LeaseFor && left >= asynqredis.LeaseFor/2, id, left, asynqredis.LeaseFor)
	}
}

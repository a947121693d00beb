package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/outage"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

func TestMain(m *testing.M) {
	logging.Disable() // connections break on purpose here
	os.Exit(m.Run())
}

// A dispatcherFixture is a dispatcher in a bubble, without an asynq server: the test asks it for tasks.
type dispatcherFixture struct {
	*testing.T
	*dispatch.Dispatcher
	asynq   *asynqredis.Client
	client  redis.UniversalClient
	limiter *throttle.Limiter
	plain   *asynq.Client
	tools   *asynq.Inspector

	quiet bool // joins nudge no server

	logs sitetest.Logs

	toAsynq   faultyConn // of the dispatcher
	toLimiter faultyConn

	mu    sync.Mutex
	acked int
	takes []string // lines, in the order in which they were asked
	limit func(ctx context.Context, line string) error
}

// A faultyConn is a connection with a fault, or nil.
type faultyConn struct{ atomic.Pointer[sitetest.Fault] }

func (w *faultyConn) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if fault := w.Load(); fault != nil {
		return fault.See(ctx, cmd, next)
	}
	return next(ctx, cmd)
}

// during does something once, after the next script ran, before its reply is known, and once calls under way ended.
func (w *faultyConn) during(do func()) {
	synctest.Wait()
	w.Store(&sitetest.Fault{Is: sitetest.IsScript, Lost: true, Hits: sitetest.Only(1), Meanwhile: do})
}

// takenQueue is the last argument of a take: a priority, and a queue with the ID of asynq's Redis.
var takenQueue = regexp.MustCompile(`^\d+ .+%2F`)

// seeLimiter notes takes and what acknowledges them, and answers instead of the limiter if the test says so.
func (b *dispatcherFixture) seeLimiter(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if cmd.Name() != "evalsha" {
		return next(ctx, cmd)
	}
	args := cmd.Args()
	_, line, _ := strings.Cut(fmt.Sprint(args[3]), "{")
	line, _, _ = strings.Cut(line, "}")
	b.mu.Lock()
	switch last := args[len(args)-1].(type) {
	case bool: // it names no queue
		b.acked++
	case string:
		if takenQueue.MatchString(last) {
			b.takes = append(b.takes, line)
		}
	}
	limit := b.limit
	b.mu.Unlock()
	if limit != nil {
		if err := limit(ctx, line); err != nil {
			cmd.SetErr(err)
			return err
		}
	}
	return next(ctx, cmd)
}

// limits has the limiter fail by what this returns about a call for a line, or with nil answer as it does.
func (b *dispatcherFixture) limits(answer func(ctx context.Context, line string) error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limit = answer
}

// inBubble runs a test with a dispatcher for queues, by default one slot.
func inBubble(t *testing.T, policies []throttle.Policy, change func(*dispatch.Config), test func(b *dispatcherFixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		b := &dispatcherFixture{T: t, client: m.Client(t)}
		served := m.Client(t)
		served.AddHook(hooktest.Hook(b.toAsynq.see))
		limiting := m.Client(t)
		limiting.AddHook(hooktest.Hook(b.seeLimiter))
		limiting.AddHook(hooktest.Hook(b.toLimiter.see))
		limiter := expect.Got(throttle.New(throttle.Config{Client: limiting, Policies: policies}))(t)
		b.limiter, b.asynq = limiter, asynqredis.New(b.client)
		b.plain, b.tools = asynq.NewClientFromRedisClient(b.client), asynq.NewInspectorFromRedisClient(b.client)
		c := dispatch.Config{
			Concurrency: 1,
			Limiter:     limiter,
			LimiterLog:  &outage.Log{Logger: slog.New(slog.NewTextHandler(&b.logs, nil)), Service: "the limiter"},
			Match: func(m asynqredis.Message, _ bool) (throttle.Request, bool) {
				r := throttle.Request{Policy: "api", Tenant: string(m.Payload()), Front: m.Retried() > 0, Key: m.JoinKey(), Deadline: m.Deadline()}
				return r, m.Type() == "throttled"
			},
			Poll:   time.Second,
			Queues: map[string]int{"default": 1},
			Tasks:  asynqredis.New(served),
		}
		if change != nil {
			change(&c)
		}
		b.Dispatcher = dispatch.New(c)
		test(b)
		b.Close(t.Context())
		synctest.Wait()
	})
}

// asked returns the lines taken from so far.
func (b *dispatcherFixture) asked() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.takes)
}

// acknowledged returns how often takes were acknowledged by a call of their own.
func (b *dispatcherFixture) acknowledged() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.acked
}

var errLost = errors.New("the reply was lost")

// loses has the replies to some calls lost.
func loses(is func([]any) bool) *sitetest.Fault {
	return &sitetest.Fault{Is: is, Lost: true, Err: errLost}
}

// scriptOf recognises the calls of a script by its first key, and its last.
func scriptOf(first, last string) func([]any) bool {
	return func(args []any) bool {
		if !sitetest.IsScript(args) {
			return false
		}
		n := args[2].(int)
		return strings.HasSuffix(fmt.Sprint(args[3]), first) && strings.HasSuffix(fmt.Sprint(args[2+n]), last)
	}
}

// wait has tasks wait in line, by their IDs, of one tenant, in a queue: as our client enqueues.
func (b *dispatcherFixture) wait(queue string, ids ...string) {
	b.Helper()
	b.waitIn("api", queue, ids...)
}

func (b *dispatcherFixture) waitIn(line, queue string, ids ...string) {
	b.Helper()
	ctx := b.Context()
	database := expect.Got(b.asynq.Database(ctx))(b)
	var requests []throttle.Request
	for _, id := range ids {
		call := b.message(queue, id)
		results, err := b.asynq.Store(ctx, queue, "", []asynqredis.EnqueueCall{call}, time.Now().Add(2*time.Minute))
		b.ok(err)
		expect.Require(b, results[0] == asynqredis.Stored, results)
		requests = append(requests, throttle.Request{
			Key: call.Message.JoinKey(), Tenant: "acme", Ticket: throttle.Ticket{Queue: database + "/" + queue, ID: id},
		})
	}
	decisions := expect.Got(b.limiter.Line(line).Join(ctx, requests))(b)
	for _, decision := range decisions {
		b.ok(decision.Err)
		if decision.Nudge && !b.quiet {
			b.ok(b.asynq.Nudge(ctx, queue, line))
		}
	}
}

// message is what asynq's client would enqueue.
func (b *dispatcherFixture) message(queue, id string) (call asynqredis.EnqueueCall) {
	b.Helper()
	opt := hooktest.With(sitetest.Dialed{Options: sitetest.SameRedis(b.client.(*redis.Client))}, hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		var ok bool
		if call, ok = asynqredis.EnqueueOf(cmd.Args()); !ok {
			return next(ctx, cmd)
		}
		cmd.(*redis.Cmd).SetVal(int64(1))
		return nil
	}))
	client := asynq.NewClient(opt)
	defer client.Close()
	_, err := client.Enqueue(asynq.NewTask("throttled", []byte("acme")), asynq.Queue(queue), asynq.TaskID(id), asynq.MaxRetry(1))
	b.ok(err)
	return call
}

// enqueue enqueues tasks of a type by a plain client.
func (b *dispatcherFixture) enqueue(typename, queue string, ids ...string) {
	b.Helper()
	for _, id := range ids {
		_, err := b.plain.Enqueue(asynq.NewTask(typename, []byte("acme")), asynq.Queue(queue), asynq.TaskID(id), asynq.MaxRetry(0))
		b.ok(err)
	}
}

func (b *dispatcherFixture) ok(err error) {
	b.Helper()
	expect.Must(b, err)
}

// next asks for the next task until there is one, for a while, and returns its ID, or "none".
func (b *dispatcherFixture) next() string {
	b.Helper()
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		if task, ok := b.Next(b.Context()); ok {
			return task.ID
		}
		time.Sleep(time.Millisecond)
	}
	return "none"
}

// run asks for the next n tasks, each of which ends at once.
func (b *dispatcherFixture) run(n int) (ids []string) {
	b.Helper()
	for range n {
		ids = append(ids, b.next())
		b.Ended()
	}
	return ids
}

// state is how asynq's tools show a task: "active", or "gone".
func (b *dispatcherFixture) state(queue, id string) string {
	b.Helper()
	state, err := b.client.HGet(b.Context(), "asynq:{"+queue+"}:t:"+id, "state").Result()
	if err == redis.Nil {
		return "gone"
	}
	b.ok(err)
	return state
}

// inLine returns the IDs of the tickets in line, in their order there, as far as they are of one flow.
func (b *dispatcherFixture) inLine() (ids []string) {
	b.Helper()
	type ranked struct {
		id   string
		rank float64
	}
	var all []ranked
	for _, key := range b.client.Keys(b.Context(), "sluice:{*}:f:*").Val() {
		for _, z := range b.client.ZRangeWithScores(b.Context(), key, 0, -1).Val() {
			_, id, _ := strings.Cut(fmt.Sprint(z.Member), "/")
			id = expect.Got(url.PathUnescape(id))(b)
			all = append(all, ranked{id, z.Score})
		}
	}
	slices.SortFunc(all, func(a, b ranked) int { return int(a.rank - b.rank) })
	for _, r := range all {
		ids = append(ids, r.id)
	}
	return ids
}

func (b *dispatcherFixture) want(what string, got, want any) {
	b.Helper()
	expect.That(b, fmt.Sprint(got) == fmt.Sprint(want), what, got, ", want", want)
}

// used is how many units are counted for acme.
func (b *dispatcherFixture) used() int64 {
	b.Helper()
	d := expect.Got(b.limiter.Peek(b.Context(), throttle.Request{Policy: "api", Tenant: "acme"}))(b)
	return d.Windows[0].Used
}

// perHour is the policy "api", or another, by which that many run in an hour.
func perHour(limit int64, name ...string) throttle.Policy {
	p := throttle.Policy{Name: "api", Windows: []throttle.Window{{Name: "window", Limit: limit, Period: time.Hour}}}
	if len(name) > 0 {
		p.Name = name[0]
	}
	return p
}

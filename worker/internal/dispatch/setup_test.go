package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
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
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

func TestMain(m *testing.M) {
	logging.Disable() // connections break on purpose here
	os.Exit(m.Run())
}

// A bench is a dispatcher in a bubble, without an asynq server: the test asks it for tasks.
type bench struct {
	*testing.T
	*dispatch.Dispatcher
	asynq   *asynqredis.Client
	client  redis.UniversalClient
	limiter *throttle.Limiter
	plain   *asynq.Client
	tools   *asynq.Inspector

	quiet bool // joins nudge no server

	acked  atomic.Int64 // how often takes were acknowledged by a call of their own
	failed atomic.Int64 // how often Failed was called
	lost   atomic.Int64 // how often Lost was called

	toAsynq   wire // of the dispatcher
	toLimiter wire

	mu    sync.Mutex
	takes []string                    // policies, in the order in which they were asked
	limit func(context.Context) error // what the limiter answers in place of its line
}

// A wire is a connection with a fault, or nil.
type wire struct {
	atomic.Pointer[sitetest.Fault]
}

func (w *wire) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if fault := w.Load(); fault != nil {
		return fault.See(ctx, cmd, next)
	}
	return next(ctx, cmd)
}

// during does something once, after the next script ran and before its reply is known. Calls that are under
// way have ended by then.
func (w *wire) during(do func()) {
	synctest.Wait()
	w.Store(&sitetest.Fault{Is: sitetest.IsScript, Lost: true, Hits: sitetest.Only(1), Meanwhile: do})
}

// A watchedLine notes its takes.
type watchedLine struct {
	dispatch.Line
	bench *bench
	line  string
}

func (w watchedLine) Acknowledge(ctx context.Context) error {
	w.bench.acked.Add(1)
	return w.Line.Acknowledge(ctx)
}

func (w watchedLine) Reserve(ctx context.Context, requests []throttle.Request) ([]throttle.TakenTicket, error) {
	if err := w.bench.limited(ctx); err != nil {
		return nil, err
	}
	return w.Line.Reserve(ctx, requests)
}

func (b *bench) limited(ctx context.Context) error {
	b.mu.Lock()
	limit := b.limit
	b.mu.Unlock()
	if limit == nil {
		return nil
	}
	return limit(ctx)
}

// limits has the limiter answer this in place of its line, or nil: its own answer.
func (b *bench) limits(answer func(context.Context) error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limit = answer
}

func (w watchedLine) Take(ctx context.Context, o throttle.TakeOptions) (throttle.Taken, error) {
	w.bench.mu.Lock()
	w.bench.takes = append(w.bench.takes, w.line)
	w.bench.mu.Unlock()
	if err := w.bench.limited(ctx); err != nil {
		return throttle.Taken{}, err
	}
	return w.Line.Take(ctx, o)
}

// inBubble runs a test with a dispatcher for queues, by default one slot.
func inBubble(t *testing.T, policies []throttle.Policy, change func(*dispatch.Config), test func(b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		b := &bench{T: t, client: m.Client(t)}
		served := m.Client(t)
		served.AddHook(hooktest.Hook(b.toAsynq.see))
		limiting := m.Client(t)
		limiting.AddHook(hooktest.Hook(b.toLimiter.see))
		limiter, err := throttle.New(throttle.Config{Client: limiting, Policies: policies})
		expect.Must(t, err)
		b.limiter, b.asynq = limiter, asynqredis.New(b.client)
		b.plain, b.tools = asynq.NewClientFromRedisClient(b.client), asynq.NewInspectorFromRedisClient(b.client)
		c := dispatch.Config{
			OnAnswer:      func(string, time.Duration) {},
			OnAsynqAnswer: func(error, time.Duration) {},
			Tasks:         asynqredis.New(served),
			Concurrency:   1,
			OnFailure:     func(string, error) { b.failed.Add(1) },
			Limiter:       limiter,
			Line:          func(name string) dispatch.Line { return watchedLine{limiter.Line(name), b, name} },
			OnLostTicket:  func(string, string) { b.lost.Add(1) },
			Match: func(m asynqredis.Message, _ bool) (throttle.Request, bool) {
				r := throttle.Request{Policy: "api", Tenant: string(m.Payload()), Front: m.Retried() > 0, Key: m.JoinKey(), Deadline: m.Deadline()}
				return r, m.Type() == "throttled"
			},
			Poll:   time.Second,
			Queues: map[string]int{"default": 1},
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

// asked returns the policies taken from so far.
func (b *bench) asked() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.takes)
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
func (b *bench) wait(queue string, ids ...string) {
	b.Helper()
	b.waitIn("api", queue, ids...)
}

func (b *bench) waitIn(line, queue string, ids ...string) {
	b.Helper()
	ctx := b.Context()
	identity, err := b.asynq.Identity(ctx)
	b.ok(err)
	var requests []throttle.Request
	for _, id := range ids {
		call := b.message(queue, id)
		results, err := b.asynq.Store(ctx, queue, []asynqredis.EnqueueCall{call}, time.Now().Add(2*time.Minute))
		b.ok(err)
		expect.Require(b, results[0] == asynqredis.Stored, results)
		requests = append(requests, throttle.Request{
			Key: call.Message.JoinKey(), Tenant: "acme", Ticket: throttle.Ticket{Queue: identity + "/" + queue, ID: id},
		})
	}
	places, err := b.limiter.Line(line).Join(ctx, requests)
	b.ok(err)
	for _, place := range places {
		b.ok(place.Err)
		if place.Nudge && !b.quiet {
			b.ok(b.asynq.Nudge(ctx, queue, line))
		}
	}
}

// message is what asynq's client would enqueue.
func (b *bench) message(queue, id string) (call asynqredis.EnqueueCall) {
	b.Helper()
	opt := hooktest.With(made{b.client}, hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
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

type made struct{ of redis.UniversalClient }

func (m made) MakeRedisClient() any {
	o := *m.of.(*redis.Client).Options()
	return redis.NewClient(&redis.Options{Dialer: o.Dialer, MaintNotificationsConfig: o.MaintNotificationsConfig})
}

// enqueue enqueues tasks of a type by a plain client.
func (b *bench) enqueue(typename, queue string, ids ...string) {
	b.Helper()
	for _, id := range ids {
		_, err := b.plain.Enqueue(asynq.NewTask(typename, []byte("acme")), asynq.Queue(queue), asynq.TaskID(id), asynq.MaxRetry(0))
		b.ok(err)
	}
}

func (b *bench) ok(err error) {
	b.Helper()
	expect.Must(b, err)
}

// next asks for the next task until there is one, for a while, and returns its ID, or "none".
func (b *bench) next() string {
	b.Helper()
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		if task, ok, err := b.Next(b.Context()); ok {
			b.ok(err)
			return task.ID
		}
		time.Sleep(time.Millisecond)
	}
	return "none"
}

// run asks for the next n tasks, each of which ends at once.
func (b *bench) run(n int) (ids []string) {
	b.Helper()
	for range n {
		ids = append(ids, b.next())
		b.Ended()
	}
	return ids
}

// state is how asynq's tools show a task: "active", or "gone".
func (b *bench) state(queue, id string) string {
	b.Helper()
	state, err := b.client.HGet(b.Context(), "asynq:{"+queue+"}:t:"+id, "state").Result()
	if err == redis.Nil {
		return "gone"
	}
	b.ok(err)
	return state
}

// inLine returns the IDs of the tickets in line, in their order there, as far as they are of one
// flow.
func (b *bench) inLine() (ids []string) {
	b.Helper()
	type ranked struct {
		id   string
		rank float64
	}
	var all []ranked
	for _, key := range b.client.Keys(b.Context(), "sluice:{*}:f:*").Val() {
		for _, z := range b.client.ZRangeWithScores(b.Context(), key, 0, -1).Val() {
			_, id, _ := strings.Cut(fmt.Sprint(z.Member), "/")
			id, err := url.PathUnescape(id)
			b.ok(err)
			all = append(all, ranked{id, z.Score})
		}
	}
	slices.SortFunc(all, func(a, b ranked) int { return int(a.rank - b.rank) })
	for _, r := range all {
		ids = append(ids, r.id)
	}
	return ids
}

func (b *bench) want(what string, got, want any) {
	b.Helper()
	expect.That(b, fmt.Sprint(got) == fmt.Sprint(want), what, got, ", want", want)
}

// used is how many units are counted for acme.
func (b *bench) used() int64 {
	b.Helper()
	d, err := b.limiter.Peek(b.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
	b.ok(err)
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

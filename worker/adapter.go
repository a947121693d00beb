package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// Config configures how tasks are throttled. Its functions may be called at every attempt of a
// task, by many goroutines at once.
type Config struct {
	// Attributes returns the attributes by which windows of other scopes than the tenant count the
	// task. The default is what NewTask was given.
	Attributes func(*asynq.Task) map[string]string

	// Cost returns what the task costs, per unit. The default is what NewTask was given, else 1
	// throttle.Requests.
	Cost func(*asynq.Task) map[string]int64

	// Limiter decides. Its policies name the task types that they match. It is required.
	Limiter *throttle.Limiter

	// Logger gets outages of the limiter, task types that no policy matches, and mistakes in the setup.
	// The default is slog.Default(). Pauses and changed rates are for throttle.Config.Logger.
	Logger *slog.Logger

	// OnDecision, if not nil, is called with every decision before it takes effect.
	OnDecision func(ctx context.Context, t *asynq.Task, d throttle.Decision)

	// Tenant returns the task's tenant. The default is what NewTask was given. A function can look
	// there first by IdentityOf.
	Tenant func(*asynq.Task) string

	// Unmatched selects what happens to a task whose type no policy matches. The default is
	// UnmatchedRun. The first task of each such type is logged, and all are counted.
	Unmatched Unmatched
}

// Unmatched selects what happens to a task whose type no policy matches.
type Unmatched string

const (
	UnmatchedRun    Unmatched = "run"    // it runs unthrottled
	UnmatchedReject Unmatched = "reject" // it fails by an *UnmatchedError
)

// Defaults of asynq's, for fields that a user leaves empty.
const (
	taskCheckInterval = time.Second
	shutdownTimeout   = 8 * time.Second
)

// asynqPause is asynq's own pause after it has found no task. Our hook has waited by then.
const asynqPause = time.Millisecond

// An Adapter throttles the tasks of one asynq.Server. The server must be made with what Redis and
// Asynq return, and its handler with what Middleware returns. It is safe for concurrent use.
type Adapter struct {
	attempts  *attempts
	config    Config
	identify  identify
	outages   *outage.Log
	silence   outage.Silence // of the limiter
	sweeper   sweeper
	unmatched *unmatched

	asynq      atomic.Pointer[asynqredis.Client] // of the server's connection, once it is made
	configured atomic.Bool                       // Asynq was called
	entered    atomic.Bool                       // the middleware has seen a task
	guarded    atomic.Bool                       // Middleware has returned a middleware
	reused     atomic.Bool                       // for a second server, whose tasks nobody would pick up
	missed     atomic.Bool                       // it was logged that the middleware sees no tasks

	dispatch atomic.Pointer[dispatch.Dispatcher]
	serving  dispatch.Config // the server's part of it
	serve    sync.Once       // makes the dispatcher

	shutdownGrace   context.Context // ends when the server's shutdown waits no longer
	endGrace        context.CancelFunc
	shutdownTimeout time.Duration
	stopped         sync.Once
}

// NewAdapter returns an adapter for one asynq.Server, or an error that names the field of the
// Config that cannot be used. It does not talk to Redis.
func NewAdapter(c Config) (*Adapter, error) {
	if c.Limiter == nil {
		return nil, errors.New("worker: Config.Limiter is nil: must be what throttle.New returns")
	}
	if c.Unmatched == "" {
		c.Unmatched = UnmatchedRun
	}
	if c.Unmatched != UnmatchedRun && c.Unmatched != UnmatchedReject {
		return nil, fmt.Errorf("worker: Config.Unmatched %q: must be %q or %q",
			string(c.Unmatched), string(UnmatchedRun), string(UnmatchedReject))
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	ad := &Adapter{
		config:          c,
		identify:        identify{c.Attributes, c.Cost, c.Tenant},
		outages:         outage.NewLog(c.Logger),
		shutdownTimeout: shutdownTimeout,
		sweeper:         sweeper{limiter: c.Limiter},
		unmatched:       &unmatched{logger: c.Logger, rejected: c.Unmatched == UnmatchedReject},
	}
	ad.attempts = &attempts{
		byTask: map[asynqredis.Ref]*attempt{}, swept: time.Now(),
		free: func() { ad.dispatcher().Ended() },
	}
	ad.shutdownGrace, ad.endGrace = context.WithCancel(context.Background())
	return ad, nil
}

// Redis returns the connection to give to asynq.NewServer. Its client is the one that opt makes,
// with our hook. The hook answers the calls by which asynq asks for work, and requeues every denied
// task, whatever asynq was about to do with it: asynq would archive one that has no retries left.
//
// The client must be a redis.UniversalClient, as those of all of asynq's own options are. It
// refuses to pick up tasks until Middleware was called.
func (ad *Adapter) Redis(opt asynq.RedisConnOpt) asynq.RedisConnOpt { return hooked{opt, ad} }

// RedisClient is Redis for asynq.NewServerFromRedisClient. The connections stay the caller's to
// close.
//
// What it returns for a *redis.Client shares its connections, and c itself is left as it is. To a
// client of another kind it adds our hook: give each server such a client of its own. asynq.Client
// and asynq.Inspector may share it.
func (ad *Adapter) RedisClient(c redis.UniversalClient) redis.UniversalClient {
	c = copyOf(c)
	ad.hook(c)
	return c
}

// copyOf returns a client with hooks of its own and the same connections, or c itself if its kind
// cannot be copied.
func copyOf(c redis.UniversalClient) redis.UniversalClient {
	if single, ok := c.(*redis.Client); ok {
		return single.WithTimeout(single.Options().ReadTimeout)
	}
	return c
}

// hook puts our hook into the client of the server's connection.
func (ad *Adapter) hook(client redis.UniversalClient) {
	if !ad.asynq.CompareAndSwap(nil, asynqredis.New(client)) {
		ad.reused.Store(true)
	}
	client.AddHook(&hook{adapter: ad})
}

// UnmatchedCount returns how many attempts of tasks there were whose type no policy matches. If it
// is not 0, a task type may be misspelt, or a policy's Match.
func (ad *Adapter) UnmatchedCount() int64 { return ad.unmatched.count.Load() }

// dispatcher returns what decides which task runs next. It is made when it is needed first, as it
// needs the connection and the config of the server.
func (ad *Adapter) dispatcher() *dispatch.Dispatcher {
	ad.serve.Do(func() {
		c := ad.serving
		c.Answered = func(line string, at time.Time) {
			ad.outages.Decided()
			ad.outages.ClockAt(line, at)
		}
		c.Asynq = ad.asynq.Load()
		c.Failed = func(line string, err error) {
			info, _ := ad.config.Limiter.Lookup(line)
			ad.outages.Failed(err, append(outage.OfLine(line), "fails", string(info.Fail))...)
		}
		c.Limiter = dispatch.Lines(ad.config.Limiter)
		c.Match = ad.match
		ad.dispatch.Store(dispatch.New(c))
		go ad.checkRedis()
	})
	return ad.dispatch.Load()
}

// match returns how a task that is due joins a line, and false if it joins none.
func (ad *Adapter) match(m asynqredis.Message) (match dispatch.Match, ok bool) {
	policy, ok := ad.config.Limiter.Match(m.Type())
	if !ok || policy.Requeue == throttle.RequeueEarliestReset {
		return dispatch.Match{}, false
	}
	defer func() {
		if recover() != nil { // the middleware calls the function again, and asynq reports it
			ok = false
		}
	}()
	request, err := ad.identify.request(policy.Name, asynq.NewTaskWithHeaders(m.Type(), m.Payload(), m.Headers()))
	if err != nil {
		return dispatch.Match{}, false // the middleware returns the error
	}
	request.Front = m.Retried() > 0
	request.MaxHold = m.TimeLimit(time.Now())
	return dispatch.Match{FailOpen: policy.Fail == throttle.FailOpen, MaxWait: maxWaitOf(m), Request: request}, true
}

// Stop picks up no more tasks. Call it before the server's Shutdown.
//
// While asynq's Redis does not answer, requeues of denied tasks are repeated for as long as asynq
// leases the tasks, up to 30 s. After Stop they are repeated for asynq.Config.ShutdownTimeout at
// most. Asynq recovers a task that could not be requeued as if its worker had died. Without Stop a
// shutdown can take longer by that time.
func (ad *Adapter) Stop() {
	ad.stopped.Do(func() {
		ad.pickNoMore()
		time.AfterFunc(ad.shutdownTimeout, ad.endGrace)
	})
}

// pickNoMore picks up no more tasks. Asynq's own Stop waits until its dequeue has returned.
func (ad *Adapter) pickNoMore() {
	if d := ad.dispatch.Load(); d != nil {
		d.Stop()
	}
}

// drain puts back the tasks that are ready to be handed out, when the server ends.
func (ad *Adapter) drain(ctx context.Context) {
	if d := ad.dispatch.Load(); d != nil {
		ctx, cancel := context.WithTimeout(ctx, ad.shutdownTimeout)
		defer cancel()
		defer context.AfterFunc(ad.shutdownGrace, cancel)()
		d.Drain(ctx)
	}
}

// Close ends the calls that are under way in the background. Call it after the server's Shutdown.
func (ad *Adapter) Close() {
	ad.endGrace()
	if d := ad.dispatch.Load(); d != nil {
		d.Close()
	}
}

// Asynq returns the config to give to asynq.NewServer: c, with its functions wrapped so that they
// are never called for a denial, which is neither a failure nor an error.
//
// TaskCheckInterval is how often an idle server looks for tasks that plain clients have enqueued,
// as in asynq. Tasks in line start as soon as they fit, whatever it is.
func (ad *Adapter) Asynq(c asynq.Config) asynq.Config {
	ad.configured.Store(true)
	base := c.BaseContext
	if base == nil {
		base = context.Background
	}
	c.BaseContext = func() context.Context { return context.WithValue(base(), serverKey{}, ad) }
	ad.answer(&c)
	if c.Logger == nil {
		c.Logger = newPlainLogger()
	}
	c.Logger = quietLogger{c.Logger, ad.attempts}

	ad.shutdownTimeout = cmp.Or(max(c.ShutdownTimeout, 0), shutdownTimeout)
	if c.DelayedTaskCheckInterval < 0 { // asynq would spin
		c.DelayedTaskCheckInterval = 0
	}
	ad.serving = dispatch.Config{
		Concurrency: cmp.Or(max(c.Concurrency, 0), runtime.NumCPU()),
		Poll:        cmp.Or(max(c.TaskCheckInterval, 0), taskCheckInterval),
		Queues:      queuesOf(c.Queues),
		Strict:      c.StrictPriority,
	}
	c.TaskCheckInterval = asynqPause
	return c
}

// queuesOf returns the queues that asynq serves by its config, with their priorities.
func queuesOf(configured map[string]int) map[string]int {
	queues := maps.Clone(configured)
	maps.DeleteFunc(queues, func(name string, priority int) bool {
		return strings.TrimSpace(name) == "" || priority <= 0
	})
	if len(queues) == 0 {
		return map[string]int{"default": 1}
	}
	return queues
}

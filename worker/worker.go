// Package worker puts the limits of package throttle in front of asynq's task handlers.
//
// A task that fits runs. One that does not is requeued for the time at which it fits, and that
// costs it nothing: it is never archived for it, loses none of its retries, counts as neither
// processed nor failed, keeps its ID, and shows why it waits as its last error.
//
// [NewServer] and [NewClient] stand for asynq's and leave nothing to forget. Who owns an
// asynq.Server already puts the three parts of a [Throttle] into it:
//
//	t, err := worker.New(worker.Config{Limiter: limiter})
//	server := asynq.NewServer(t.Redis(redis), t.Asynq(asynq.Config{}))
//	middleware, err := t.Middleware()
//	mux.Use(middleware)
//
// and ends it by Stop, the server's Shutdown, and Close.
//
// To follow a task through the code, read client.go, then hook.go and internal/dispatch, then middleware.go,
// then denial.go.
package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// Config is how tasks are throttled. Its functions are called at every attempt of a task, by
// many goroutines at once.
type Config struct {
	// Attributes tells what scopes other than the tenant count a task by. The default is what
	// NewTask was given.
	Attributes func(*asynq.Task) map[string]string

	// Cost tells what a task takes, per unit. The default is what NewTask was given, else 1
	// throttle.Requests.
	Cost func(*asynq.Task) map[string]int64

	// Limiter decides, and its policies tell which task types they guard. It is required.
	Limiter *throttle.Limiter

	// Logger is told when the limiter cannot decide, and when it can again. The default is
	// slog.Default().
	Logger *slog.Logger

	// OnDecision, if not nil, observes every decision before it takes effect.
	OnDecision func(ctx context.Context, t *asynq.Task, d throttle.Decision)

	// Tenant tells whose task it is. The default is what NewTask was given; IdentityOf lets a
	// function look there first.
	Tenant func(*asynq.Task) string

	// Unmatched says what happens to tasks whose type no policy matches. The default is Run.
	Unmatched Unmatched
}

// Unmatched says what happens to tasks whose type no policy matches.
type Unmatched string

const (
	Run    Unmatched = "run"    // they run unthrottled
	Reject Unmatched = "reject" // they fail, as by an error of their handler
)

// taskCheckInterval is asynq's own, for users who name none.
const taskCheckInterval = time.Second

// asynqPause is how long asynq itself pauses after it has found nothing: the waiting is done where it asks for work.
const asynqPause = time.Millisecond

// shutdownTimeout is asynq's own, for users who name none.
const shutdownTimeout = 8 * time.Second

// A Throttle is what one asynq.Server needs to throttle its tasks: Redis, Asynq and Middleware
// must all be put to use. It is safe for concurrent use.
type Throttle struct {
	attempts   *attempts
	config     Config
	identify   identify
	outages    *outages
	configured atomic.Bool // Asynq was called
	connected  atomic.Bool // Redis was called
	entered    atomic.Bool // the middleware has seen a task
	guarded    atomic.Bool // Middleware was called, with success
	missed     atomic.Bool // it was logged that the middleware saw no task

	asynq    atomic.Pointer[asynqredis.Client] // of the server's connection
	dispatch atomic.Pointer[dispatch.Dispatcher]
	serving  dispatch.Config // of the server, as Asynq was told
	serve    sync.Once       // makes the dispatcher

	patience        context.Context // ends when the server, which shuts down, waits for nobody any more
	endPatience     context.CancelFunc
	shutdownTimeout time.Duration
	stopped         sync.Once
}

// New returns a throttle for one asynq.Server, or an error that names the field of the Config
// which cannot be used. It does not talk to Redis.
func New(c Config) (*Throttle, error) {
	if c.Limiter == nil {
		return nil, errors.New("worker: Config.Limiter is nil: must be what throttle.New returns")
	}
	if c.Unmatched == "" {
		c.Unmatched = Run
	}
	if c.Unmatched != Run && c.Unmatched != Reject {
		return nil, fmt.Errorf("worker: Config.Unmatched %q: must be %q or %q", string(c.Unmatched), string(Run), string(Reject))
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	t := &Throttle{
		config:          c,
		identify:        identify{c.Attributes, c.Cost, c.Tenant},
		outages:         newOutages(c.Logger),
		shutdownTimeout: shutdownTimeout,
	}
	t.attempts = newAttempts(func() { t.dispatcher().Ended() })
	t.patience, t.endPatience = context.WithCancel(context.Background())
	return t, nil
}

// Redis returns the connection to give to asynq.NewServer. Its client is that of opt, and also answers the
// calls by which asynq asks for work, and puts every denied task back where it waits, whatever asynq was about to
// do with it: asynq by itself archives a denied task that has no retries left.
//
// The client must be a redis.UniversalClient, as those of all of asynq's own options are. It
// refuses to pick up tasks until Middleware was called.
func (t *Throttle) Redis(opt asynq.RedisConnOpt) asynq.RedisConnOpt {
	t.connected.Store(true)
	return hooked{opt, t}
}

func (t *Throttle) use(client *asynqredis.Client) { t.asynq.Store(client) }

// dispatcher returns what decides which task runs next. The connection and the config of the server are known by
// when it is needed first.
func (t *Throttle) dispatcher() *dispatch.Dispatcher {
	t.serve.Do(func() {
		c := t.serving
		c.Answered = t.outages.decided
		c.Asynq = t.asynq.Load()
		c.Failed = func(policy string, err error) {
			info, _ := t.config.Limiter.Lookup(policy)
			t.outages.failed(err, "policy", policy, "fails", string(info.Fail))
		}
		c.Limiter = dispatch.Lines(t.config.Limiter)
		c.Match = t.match
		t.dispatch.Store(dispatch.New(c))
	})
	return t.dispatch.Load()
}

// match tells how a task joins a line that is due.
func (t *Throttle) match(m asynqredis.Message) (match dispatch.Match, ok bool) {
	policy, ok := t.config.Limiter.Match(m.Type())
	if !ok || policy.Requeue == throttle.RequeueEarliestReset {
		return dispatch.Match{}, false
	}
	defer func() {
		if recover() != nil { // a function of the user's: the middleware calls it again, and asynq tells
			ok = false
		}
	}()
	request, err := t.identify.request(policy.Name, asynq.NewTaskWithHeaders(m.Type(), m.Payload(), m.Headers()))
	if err != nil {
		return dispatch.Match{}, false // the middleware says so
	}
	request.Front = m.Retried() > 0
	request.MaxHold = m.TimeLimit(time.Now())
	return dispatch.Match{FailOpen: policy.Fail == throttle.FailOpen, Policy: policy.Name, Request: request}, true
}

// Stop says that the asynq.Server is about to shut down: no more tasks are picked up. While Redis does not answer,
// denied tasks are requeued again and again for as long as asynq leases them, up to 30 s; after Stop for
// asynq.Config.ShutdownTimeout at most. What cannot be put back by then asynq recovers, as from a
// worker that died. Without Stop a shutdown can take that much longer, and nothing else differs.
func (t *Throttle) Stop() {
	t.stopped.Do(func() {
		t.pickNoMore()
		time.AfterFunc(t.shutdownTimeout, t.endPatience)
	})
}

// pickNoMore ends the picking up of tasks: asynq's own Stop waits for as long as its dequeue does.
func (t *Throttle) pickNoMore() {
	if d := t.dispatch.Load(); d != nil {
		d.Stop()
	}
}

// drain puts back what is ready to be handed out, at the end of a server.
func (t *Throttle) drain(ctx context.Context) {
	if d := t.dispatch.Load(); d != nil {
		ctx, cancel := context.WithTimeout(ctx, t.shutdownTimeout)
		defer cancel()
		defer context.AfterFunc(t.patience, cancel)()
		d.Drain(ctx)
	}
}

// Close ends the calls that are under way in the background. Call it after the asynq.Server was shut down.
func (t *Throttle) Close() {
	t.endPatience()
	if d := t.dispatch.Load(); d != nil {
		d.Close()
	}
}

// Asynq returns the config to give to asynq.NewServer: c, with its functions wrapped so that
// they are never asked about a denial, as that is neither a failure nor an error. TaskCheckInterval is how often an
// idle server looks for tasks that plain clients have enqueued, as in asynq; those in line start as soon as
// they fit, whatever it is.
func (t *Throttle) Asynq(c asynq.Config) asynq.Config {
	t.configured.Store(true)

	base := c.BaseContext
	if base == nil {
		base = context.Background
	}
	c.BaseContext = func() context.Context { return context.WithValue(base(), serverKey{}, t) }

	isFailure := c.IsFailure
	if isFailure == nil {
		isFailure = func(err error) bool { return err != nil }
	}
	c.IsFailure = func(err error) bool { return t.denialIn(err) == nil && isFailure(err) }

	delay := c.RetryDelayFunc
	if delay == nil {
		delay = asynq.DefaultRetryDelayFunc
	}
	c.RetryDelayFunc = func(n int, err error, task *asynq.Task) time.Duration {
		if denied := t.denialIn(err); denied != nil {
			return time.Until(denied.ProcessAt)
		}
		return delay(n, err, task)
	}

	handler := c.ErrorHandler
	c.ErrorHandler = asynq.ErrorHandlerFunc(func(ctx context.Context, task *asynq.Task, err error) {
		a := t.attempts.tell(taskOf(ctx), err)
		if a.late != nil {
			t.leaveLate(ctx, task, a.late)
			err = notAgain{a.late}
		}
		// A middleware that panics over a denial is a bug to hear of, though the task waits.
		denied := a.denied != nil || t.denialIn(err) != nil
		if handler != nil && (!denied || asynq.IsPanicError(err)) {
			handler.HandleError(ctx, task, err)
		}
	})

	t.shutdownTimeout = cmp.Or(max(c.ShutdownTimeout, 0), shutdownTimeout)

	if c.DelayedTaskCheckInterval < 0 { // asynq would spin on it
		c.DelayedTaskCheckInterval = 0
	}
	t.serving = dispatch.Config{
		Concurrency: c.Concurrency,
		Poll:        c.TaskCheckInterval,
		Queues:      queuesOf(c.Queues),
		Strict:      c.StrictPriority,
	}
	if c.Concurrency < 1 {
		t.serving.Concurrency = runtime.NumCPU()
	}
	if c.TaskCheckInterval <= 0 {
		t.serving.Poll = taskCheckInterval
	}
	c.TaskCheckInterval = asynqPause
	return c
}

// queuesOf are the queues that asynq serves by its config, with their priorities.
func queuesOf(configured map[string]int) map[string]int {
	queues := map[string]int{}
	for name, priority := range configured {
		if strings.TrimSpace(name) != "" && priority > 0 {
			queues[name] = priority
		}
	}
	if len(queues) == 0 {
		queues["default"] = 1
	}
	return queues
}

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
// To follow a task through the code, read [Throttle.Middleware] here, then hook.go, then
// lua/requeue.lua.
package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
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

// Requeues of tasks that the limiter could not decide about are spread over these, so that
// they do not all come back at once. Asynq's whole seconds make the longest 5 s.
const (
	undecidedMin = time.Second
	undecidedMax = 4 * time.Second
)

// giveBackTimeout bounds the call that gives units back after a task's own time has run out.
const giveBackTimeout = 5 * time.Second

var errOutOfTime = errors.New("worker: the task's time ran out before the limiter had answered")

// fallbackMin is how much later than promised a task comes by itself, at the least. Workers that
// were away for less wake nobody in vain.
const fallbackMin = 2 * time.Minute

// Check intervals for users who name none. Asynq's own, 5 s and 1 s, would let a task that
// fits wait for that long. An idle server asks Redis for work 10 times a second by these.
const (
	delayedTaskCheckInterval = time.Second // asynq keeps retry times in whole seconds: more often finds nothing
	taskCheckInterval        = 100 * time.Millisecond
)

// shutdownTimeout is asynq's own, for users who name none.
const shutdownTimeout = 8 * time.Second

// A Throttle is what one asynq.Server needs to throttle its tasks: Redis, Asynq and Middleware
// must all be put to use. It is safe for concurrent use.
type Throttle struct {
	attempts   *attempts
	config     Config
	identify   identify
	lines      *lines
	outages    *outages
	configured atomic.Bool // Asynq was called
	connected  atomic.Bool // Redis was called
	entered    atomic.Bool // the middleware has seen a task
	guarded    atomic.Bool // Middleware was called, with success
	missed     atomic.Bool // it was logged that the middleware saw no task

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
	patience, endPatience := context.WithCancel(context.Background())
	return &Throttle{
		attempts:        newAttempts(),
		config:          c,
		endPatience:     endPatience,
		identify:        identify{c.Attributes, c.Cost, c.Tenant},
		lines:           newLines(c.Limiter, true),
		outages:         newOutages(c.Logger),
		patience:        patience,
		shutdownTimeout: shutdownTimeout,
	}, nil
}

// Redis returns the connection to give to asynq.NewServer. Its client is that of opt, and also
// puts every denied task back where it waits, whatever asynq was about to do with it: asynq by
// itself archives a denied task that has no retries left.
//
// The client must be a redis.UniversalClient, as those of all of asynq's own options are. It
// refuses to pick up tasks until Middleware was called.
func (t *Throttle) Redis(opt asynq.RedisConnOpt) asynq.RedisConnOpt {
	t.connected.Store(true)
	return hooked{opt, t}
}

// Stop says that the asynq.Server is about to shut down. While Redis does not answer, denied tasks
// are requeued again and again for as long as asynq leases them, up to 30 s; after Stop for
// asynq.Config.ShutdownTimeout at most. What cannot be put back by then asynq recovers, as from a
// worker that died. Without Stop a shutdown can take that much longer, and nothing else differs.
func (t *Throttle) Stop() {
	t.stopped.Do(func() { time.AfterFunc(t.shutdownTimeout, t.endPatience) })
}

// Close ends the looking after waiting lines, which begins with the first task that is asked for:
// other workers take them over. Call it after the asynq.Server was shut down.
func (t *Throttle) Close() {
	t.endPatience()
	t.lines.close()
}

// Asynq returns the config to give to asynq.NewServer: c, with its functions wrapped so that
// they are never asked about a denial, as that is neither a failure nor an error. A check
// interval that is not set becomes 1 s for delayed tasks and 100 ms for pending ones; a task whose
// turn has come starts after half of the latter on average.
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

	if c.DelayedTaskCheckInterval <= 0 { // asynq would spin on a negative one
		c.DelayedTaskCheckInterval = delayedTaskCheckInterval
	}
	if c.TaskCheckInterval <= 0 {
		c.TaskCheckInterval = taskCheckInterval
	}
	return c
}

// Middleware returns the middleware that throttles. Put it outermost: what stands outside of it
// sees denials as errors and runs at every attempt. It is an error if Redis or Asynq was not
// called before.
func (t *Throttle) Middleware() (asynq.MiddlewareFunc, error) {
	if !t.connected.Load() {
		return nil, errors.New("worker: Throttle.Redis was not called: " +
			"make the asynq.Server with Redis(...), or tasks that are denied on their last attempt are archived")
	}
	if !t.configured.Load() {
		return nil, errors.New("worker: Throttle.Asynq was not called: " +
			"make the asynq.Server with Asynq(...), or denials are reported as failures")
	}
	t.guarded.Store(true)
	return func(next asynq.Handler) asynq.Handler {
		return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			return t.process(ctx, task, next)
		})
	}, nil
}

// process runs the task, or returns a *DeniedError, or the error by which it fails.
func (t *Throttle) process(ctx context.Context, task *asynq.Task, next asynq.Handler) error {
	t.entered.Store(true)
	ref := taskOf(ctx)
	a := t.attempts.enter(ref, ctx.Done())

	policy, ok := t.config.Limiter.PolicyFor(task.Type())
	switch {
	case !ok && t.config.Unmatched == Reject:
		return fmt.Errorf("worker: no policy matches task type %q: add one, or set Config.Unmatched to %q", task.Type(), string(Run))
	case !ok:
		id, _ := IdentityOf(task) // for the calls that it makes
		request := throttle.Request{Attributes: id.Attributes, Tenant: id.Tenant, Ticket: ref.ticket()}
		return t.run(ctx, a, task, next, request, throttle.Reservation{})
	case ref == taskRef{}:
		return fmt.Errorf("worker: task type %q: the context does not come from an asynq.Server: "+
			"middlewares must hand on the one they get", task.Type())
	}
	request, err := t.identify.request(policy.Name, task)
	if err != nil {
		return err
	}
	if policy.Requeue != throttle.RequeueEarliestReset {
		request.Ticket = ref.ticket()
		retried, _ := asynq.GetRetryCount(ctx)
		request.Front = retried > 0 // it had its turn, and failed in it
	}

	if deadline, ok := ctx.Deadline(); ok {
		request.HoldFor = max(0, time.Until(deadline))
	}

	if err := t.miswired(ctx, a != nil); err != nil {
		return t.undecided(a, request, err)
	}
	// Should the task's time run out meanwhile, asynq goes on at once. It did not run: it waits.
	waits := t.attempts.deny(a, newUndecided(request, errOutOfTime))
	d, err := t.config.Limiter.Reserve(ctx, request)
	switch {
	case isRefusal(err):
		t.attempts.allow(a)
		return fmt.Errorf("worker: task type %q: %w", task.Type(), err)
	case err != nil && ctx.Err() == nil:
		return t.undecided(a, request, err)
	case ctx.Err() != nil:
		t.outOfTime(ctx, d)
		return waits
	case d.FailedOpen != nil:
		t.outages.failed(d.FailedOpen, "policy", d.Policy, "fails", "open")
	default:
		t.outages.decided()
		t.outages.clock(d)
	}
	if d.Granted {
		t.attempts.allow(a)
	}
	if t.config.OnDecision != nil {
		t.config.OnDecision(ctx, task, d)
	}
	if d.Granted {
		request.Ticket = ref.ticket() // also where its own policy has no line: others of its calls may
		return t.run(context.WithValue(ctx, decisionKey{}, d), a, task, next, request, d.Reservation)
	}
	if late := tooLate(a.message, d); late != nil {
		t.leave(ctx, request)
		t.attempts.allow(a)
		return notAgain{late}
	}
	delay := d.EarliestReset()
	if request.Ticket != "" {
		delay = fallback(d.RetryIn)
	}
	return t.attempts.deny(a, &DeniedError{Decision: d, ProcessAt: wholeSecond(time.Now().Add(delay))})
}

// fallback is after what time a task comes by itself that stands in line and was promised to be
// called in d: so late that it never comes before its call, unless calls are lost or all workers
// were away for as long.
func fallback(d time.Duration) time.Duration { return d + max(fallbackMin, d/2) }

// miswired says which half of the wiring this attempt did not come through. Middleware has seen
// to it that both were made; this is for servers that were given something else.
func (t *Throttle) miswired(ctx context.Context, known bool) error {
	if ctx.Value(serverKey{}) != t {
		return errors.New("worker: the asynq.Server was not made with the config that Throttle.Asynq returned")
	}
	if !known {
		return errors.New("worker: the asynq.Server was not made with the connection that Throttle.Redis returned")
	}
	return nil
}

// undecided fails closed: the task is requeued like a denied one.
func (t *Throttle) undecided(a *attempt, r throttle.Request, cause error) error {
	t.outages.failed(cause, "policy", r.Policy, "fails", "closed")
	return t.attempts.deny(a, newUndecided(r, cause))
}

func newUndecided(r throttle.Request, cause error) *DeniedError {
	now := time.Now()
	at := wholeSecond(now.Add(undecidedMin + rand.N(undecidedMax-undecidedMin)))
	return &DeniedError{
		Cause:     cause,
		Decision:  throttle.Decision{At: now, Policy: r.Policy, RetryIn: at.Sub(now), Tenant: r.Tenant},
		ProcessAt: at,
	}
}

// outOfTime gives back what was granted to a task whose time ran out before it could run.
func (t *Throttle) outOfTime(ctx context.Context, d throttle.Decision) {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.outages.failed(errOutOfTime, "fails", "closed")
	}
	if d.Granted {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
		defer cancel()
		// What cannot be given back counts until its windows have passed.
		_, _ = t.config.Limiter.Cancel(ctx, d.Reservation)
	}
}

// wholeSecond is the first time not before at that asynq can keep: it cuts off what is less
// than a second, and a task would come back before its time.
func wholeSecond(at time.Time) time.Time {
	if whole := at.Truncate(time.Second); whole.Before(at) {
		return whole.Add(time.Second)
	}
	return at.Truncate(0)
}

// isRefusal reports whether the error says that the request itself can never be granted.
func isRefusal(err error) bool {
	var request *throttle.RequestError
	var neverFits *throttle.NeverFitsError
	return errors.As(err, &request) || errors.As(err, &neverFits)
}

// A DeniedError is what the middleware returns for a task that does not run now. It is for
// middlewares outside of it, which need not hand it on: the task is requeued in any case.
type DeniedError struct {
	// Cause is why the limiter could not decide, if it could not. The Decision then carries
	// the policy, the tenant and the delay alone.
	Cause error

	Decision throttle.Decision

	// ProcessAt is when the task comes back if nobody calls it before, by this machine's clock,
	// in whole seconds: the decision's RetryIn and two minutes, or half of RetryIn if that is more.
	// With the policy's requeue: earliest-reset nobody calls, and it comes back at that reset.
	ProcessAt time.Time
}

// Error is the decision's reason, such as "throttled: github-api/burst, tenant acme, 1.8s". It
// is valid UTF-8, as asynq cannot store anything else.
func (e *DeniedError) Error() string {
	reason := e.Decision.Reason()
	if e.Cause != nil {
		reason += ": " + e.Cause.Error()
	}
	return strings.ToValidUTF8(reason, "\uFFFD")
}

func (e *DeniedError) Unwrap() error { return e.Cause }

// denialIn returns the denial that err is about, or nil. A middleware may have made something
// else of it.
func (t *Throttle) denialIn(err error) *DeniedError {
	var denied *DeniedError
	if err == nil || errors.As(err, &denied) {
		return denied
	}
	return t.attempts.denialTold(err)
}

type (
	decisionKey struct{}
	serverKey   struct{}
)

// DecisionFrom returns the decision by which the task runs, to its handler. There is none for
// tasks that no policy matches.
func DecisionFrom(ctx context.Context) (throttle.Decision, bool) {
	d, ok := ctx.Value(decisionKey{}).(throttle.Decision)
	return d, ok
}

package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// ErrLeaseLost is the cause by which a handler's context ends when what a concurrency window held
// for it could not be renewed in time, and may be somebody else's. If the handler then returns an
// error, the task is requeued at no cost.
var ErrLeaseLost = errors.New("worker: the lease of a concurrency window was lost")

// A RefusedByRemote is the error of a handler whose call the far side refused for a while. The task's
// policy pauses for as long, on every worker, for that tenant or for all (throttle.Policy.Remote),
// and the task is requeued to the front of its tenant's, without a retry being burnt.
type RefusedByRemote struct {
	After time.Duration
}

// RetryAfter returns the error by which a handler says that the far side refused its call and for
// how long it will. Who wants a retry to be burnt calls Pause, and returns an error of its own.
func RetryAfter(d time.Duration) error { return &RefusedByRemote{d} }

func (e *RefusedByRemote) Error() string {
	return fmt.Sprintf("worker: the far side refuses calls for %v", e.After)
}

// A running is what one attempt of a task holds while its handler runs.
type running struct {
	job     *throttle.Job
	limiter *throttle.Limiter

	mu   sync.Mutex
	own  throttle.Reservation // the task's, as it was settled last; zero if no policy guards it
	more []*lease             // that the handler reserved
}

type runningKey struct{}

var errNotRunning = errors.New("worker: the context is not that of a throttled task's handler")

func runningFrom(ctx context.Context) (*running, error) {
	r, ok := ctx.Value(runningKey{}).(*running)
	if !ok {
		return nil, errNotRunning
	}
	return r, nil
}

// Settle says, in a handler, what its task really cost in a unit: 900 or 4000 tokens where 1500 were
// estimated. What is too much is given back and called for at once; what is too little is taken, and
// later tasks wait for it. It may be called again with a better figure. Errors are
// throttle.Limiter.Settle's.
func Settle(ctx context.Context, unit string, actual int64) error {
	r, err := runningFrom(ctx)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.own, err = r.limiter.Settle(ctx, r.own, map[string]int64{unit: actual})
	return err
}

// Cancel gives back, in a handler, what its task took: the call that it was for was never made. What is
// held by concurrency windows is given back too. Errors are throttle.Limiter.Cancel's.
func Cancel(ctx context.Context) error {
	r, err := runningFrom(ctx)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	_, err = r.limiter.Cancel(ctx, r.own)
	return err
}

// Pause says, in a handler, that the far side refuses calls for a while: throttle.Limiter.Pause for the
// task's reservation.
func Pause(ctx context.Context, d time.Duration) error {
	r, err := runningFrom(ctx)
	if err != nil {
		return err
	}
	r.mu.Lock()
	own := r.own
	r.mu.Unlock()
	return r.limiter.Pause(ctx, own, d)
}

// Reserve takes more, in a handler: for a second call, or by a second policy. What the request leaves
// empty is the task's own: tenant, attributes, and policy. While it is denied it waits, up to `wait`
// and never past the context's deadline; then it returns a *throttle.DeniedError. A handler that returns that
// error has its task requeued at no cost, with its place in that policy's line. The task begins anew
// then, and takes its own policy's cost again, unless it is given back by Cancel before.
//
// What concurrency windows hold is given back when the handler returns, or by throttle.Limiter.Release.
// Other errors are throttle.Limiter.Reserve's, and the context's.
func Reserve(ctx context.Context, request throttle.Request, wait time.Duration) (throttle.Reservation, error) {
	r, err := runningFrom(ctx)
	if err != nil {
		return throttle.Reservation{}, err
	}
	task := r.job.Request
	if request.Policy == "" {
		request.Policy = task.Policy
	}
	if request.Tenant == "" {
		request.Tenant = task.Tenant
	}
	if request.Attributes == nil {
		request.Attributes = task.Attributes
	}
	if request.Ticket == "" && r.lines(request.Policy) {
		request.Ticket = task.Ticket
	}
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(deadline))
		request.HoldFor = max(0, time.Until(deadline))
	}
	until := time.Now().Add(wait)
	for {
		d, err := r.limiter.Reserve(ctx, request)
		if err != nil {
			return throttle.Reservation{}, err
		}
		if d.Granted {
			r.keep(ctx, d.Reservation)
			return d.Reservation, nil
		}
		pause := min(d.RetryIn, askAgain)
		if !d.MayBeSooner() {
			pause = d.RetryIn
		}
		if time.Now().Add(pause).After(until) {
			return throttle.Reservation{}, &throttle.DeniedError{Decision: d}
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return throttle.Reservation{}, context.Cause(ctx)
		}
	}
}

// askAgain is how often a handler asks again that waits for what may come sooner than it was told.
const askAgain = time.Second

// lines says whether tasks that a policy denies stand in line.
func (r *running) lines(policy string) bool {
	p, ok := r.limiter.Policy(policy)
	return ok && p.Requeue != throttle.RequeueEarliestReset
}

func (r *running) keep(ctx context.Context, reservation throttle.Reservation) {
	if r.limiter.Lease(reservation) == 0 {
		return
	}
	kept := keepLease(ctx, r.limiter, reservation, func() {})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.more = append(r.more, kept)
}

// run runs the handler of a task that was granted, or that no policy guards, and sees to what it
// says of the far side.
func (t *Throttle) run(ctx context.Context, a *attempt, task *asynq.Task, next asynq.Handler, request throttle.Request, own throttle.Reservation) error {
	r := &running{job: &throttle.Job{Request: request}, limiter: t.config.Limiter, own: own}
	ctx = throttle.WithJob(context.WithValue(ctx, runningKey{}, r), r.job)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	kept := keepLease(ctx, t.config.Limiter, own, func() { cancel(ErrLeaseLost) })
	err := func() error {
		defer func() { // also if the handler panics
			kept.release()
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, l := range r.more {
				l.release()
			}
		}()
		return next.ProcessTask(ctx, task)
	}()
	if err == nil {
		return nil
	}
	if errors.Is(err, asynq.SkipRetry) || errors.Is(err, asynq.RevokeTask) {
		return err // the user's last word
	}
	var refused *RefusedByRemote
	var denied *throttle.DeniedError
	retryIn, policy, ok := r.job.Refusal()
	switch {
	case errors.As(err, &refused):
		if err := Pause(ctx, refused.After); err != nil && !isRefusal(err) {
			t.outages.failed(err, "policy", own.Policy)
		}
		return t.requeueFront(ctx, a, request, own.Policy, refused.After, err)
	case errors.As(err, &denied):
		return t.requeueFront(ctx, a, request, denied.Decision.Policy, denied.Decision.RetryIn, err)
	case ok:
		return t.requeueFront(ctx, a, request, policy, retryIn, err)
	case errors.Is(err, throttle.ErrUnavailable): // of a call that the handler wanted to make
		return t.undecided(a, request, err)
	case errors.Is(context.Cause(ctx), ErrLeaseLost):
		return t.requeueFront(ctx, a, request, own.Policy, undecidedMin, err)
	}
	return err
}

// requeueFront requeues a task whose handler has run and could not do its work yet: to the front of
// its tenant's in the policy's line, or for the time in which it can.
func (t *Throttle) requeueFront(ctx context.Context, a *attempt, request throttle.Request, policy string, retryIn time.Duration, cause error) error {
	d := throttle.Decision{At: time.Now(), Policy: policy, RetryIn: max(retryIn, time.Millisecond), Tenant: request.Tenant}
	at := d.RetryIn
	if p, ok := t.config.Limiter.Policy(policy); ok && p.Requeue != throttle.RequeueEarliestReset && t.config.Limiter.Listening() {
		request.Policy, request.Front = policy, true
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
		defer cancel()
		planned, err := t.config.Limiter.Plan(ctx, request, 0, 0)
		if err == nil {
			switch {
			case planned.RetryIn > 0:
				d, at = planned, fallback(planned.RetryIn)
			case !planned.Exempt:
				at = 0 // it is called: nobody else will wake it
			}
		}
	}
	return t.attempts.deny(a, &DeniedError{Cause: cause, Decision: d, ProcessAt: wholeSecond(time.Now().Add(at))})
}

// A lease keeps what concurrency windows hold for a reservation.
type lease struct {
	limiter     *throttle.Limiter
	reservation throttle.Reservation
	stop        context.CancelFunc
	stopped     chan struct{}
}

// keepLease renews until release, or until the lease is lost. Without a concurrency window it
// returns nil.
func keepLease(ctx context.Context, limiter *throttle.Limiter, reservation throttle.Reservation, lost func()) *lease {
	each := limiter.Lease(reservation)
	if each == 0 {
		return nil
	}
	// It goes on after the handler's context has ended: what matters is that the handler has.
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	l := &lease{limiter, reservation, stop, make(chan struct{})}
	go l.renew(ctx, each, lost)
	return l
}

func (l *lease) renew(ctx context.Context, each time.Duration, lost func()) {
	defer close(l.stopped)
	held := time.Now() // since when the lease is sure to count
	timer := time.NewTimer(each / 3)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		asked := time.Now()
		renewal, cancel := context.WithTimeout(ctx, each/3)
		ok, err := l.limiter.Renew(renewal, l.reservation)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && ok:
			held = asked
			timer.Reset(each / 3)
		case err == nil || time.Since(held) > each-each/10:
			lost()
			return
		default:
			timer.Reset(each / 20)
		}
	}
}

// release ends the renewals, and then the lease.
func (l *lease) release() {
	if l == nil {
		return
	}
	l.stop()
	<-l.stopped
	ctx, cancel := context.WithTimeout(context.Background(), giveBackTimeout)
	defer cancel()
	_ = l.limiter.Release(ctx, l.reservation) // or it runs out
}

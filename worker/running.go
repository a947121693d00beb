package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
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

	cancelled atomic.Bool // what the task took was given back

	mu    sync.Mutex
	ended bool                 // the handler has returned
	more  []*lease             // that the handler reserved
	own   throttle.Reservation // the task's, as it was settled last; zero if no policy guards it
}

type runningKey struct{}

var (
	errNotRunning = errors.New("worker: the context is not that of a throttled task's handler")
	errReturned   = errors.New("worker: the task's handler has returned")
)

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
	if _, err = r.limiter.Cancel(ctx, r.own); err == nil {
		r.cancelled.Store(true)
	}
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
			if err := r.keep(ctx, d.Reservation); err != nil {
				return throttle.Reservation{}, err
			}
			return d.Reservation, nil
		}
		left := time.Until(until)
		if left <= 0 || left < d.RetryIn && !d.MayBeSooner() {
			return throttle.Reservation{}, &throttle.DeniedError{Decision: d, Request: request}
		}
		pause := min(d.RetryIn, left)
		if d.MayBeSooner() || request.Ticket != "" {
			pause = min(pause, askAgain)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return throttle.Reservation{}, context.Cause(ctx)
		}
	}
}

// askAgain is how often a handler asks again that waits for what may come sooner than it was told, or in
// line, where it may be called sooner.
const askAgain = time.Second

// lines says whether tasks that a policy denies stand in line.
func (r *running) lines(policy string) bool {
	p, ok := r.limiter.Policy(policy)
	return ok && p.Requeue != throttle.RequeueEarliestReset
}

// keep keeps a lease until the handler returns. One that has returned gets nothing more.
func (r *running) keep(ctx context.Context, reservation throttle.Reservation) error {
	if r.limiter.Lease(reservation) == 0 {
		return nil
	}
	kept := keepLease(ctx, r.limiter, reservation, func(bool) {})
	r.mu.Lock()
	ended := r.ended
	if !ended {
		r.more = append(r.more, kept)
	}
	r.mu.Unlock()
	if ended {
		kept.release()
		return errReturned
	}
	return nil
}

// run runs the handler of a task that was granted, or that no policy guards, and sees to what it
// says of the far side.
func (t *Throttle) run(ctx context.Context, a *attempt, task *asynq.Task, next asynq.Handler, request throttle.Request, own throttle.Reservation) error {
	r := &running{job: &throttle.Job{Request: request}, limiter: t.config.Limiter, own: own}
	ctx = throttle.WithJob(context.WithValue(ctx, runningKey{}, r), r.job)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	kept := keepLease(ctx, t.config.Limiter, own, func(refused bool) {
		if refused { // perhaps by a Cancel that is under way
			r.mu.Lock()
			defer r.mu.Unlock()
		}
		if !r.cancelled.Load() {
			cancel(ErrLeaseLost)
		}
	})
	err := func() error {
		defer func() { // also if the handler panics
			kept.release()
			r.mu.Lock()
			more := r.more
			r.ended = true
			r.mu.Unlock()
			for _, l := range more {
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
		if own.Policy != "" {
			t.pause(ctx, own.Policy, refused.After)
		}
		return t.requeueFront(ctx, a, request, own.Policy, refused.After, err)
	case errors.As(err, &denied): // the place in line is that of the call, whose tenant and cost may be others
		return t.requeueFront(ctx, a, denied.Request, denied.Decision.Policy, denied.Decision.RetryIn, err)
	case ok:
		if policy != request.Policy {
			request.Cost = nil // in units of the task's own policy
		}
		return t.requeueFront(ctx, a, request, policy, retryIn, err)
	case errors.Is(err, throttle.ErrUnavailable): // of a call that the handler wanted to make
		return t.undecided(a, request, err)
	case errors.Is(context.Cause(ctx), ErrLeaseLost):
		return t.requeueFront(ctx, a, request, own.Policy, undecidedMin, err)
	}
	return err
}

// pause passes a refusal on, also if the task's own time has run out.
func (t *Throttle) pause(ctx context.Context, policy string, d time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	if err := Pause(ctx, d); err != nil && !isRefusal(err) {
		t.outages.failed(err, "policy", policy)
	}
}

// requeueFront requeues a task whose handler has run and could not do its work yet: to the front of
// its tenant's in the policy's line, or for the time in which it can if it stands in none.
func (t *Throttle) requeueFront(ctx context.Context, a *attempt, request throttle.Request, policy string, retryIn time.Duration, cause error) error {
	d := throttle.Decision{At: time.Now(), Policy: policy, RetryIn: max(retryIn, time.Millisecond), Tenant: request.Tenant}
	at := d.RetryIn
	p, ok := t.config.Limiter.Policy(policy)
	if ok && p.Requeue != throttle.RequeueEarliestReset && request.Ticket != "" && t.config.Limiter.Listening() {
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
	stop        func()
}

// keepLease renews until release. Without a concurrency window it returns nil.
func keepLease(ctx context.Context, limiter *throttle.Limiter, reservation throttle.Reservation, lost func(refused bool)) *lease {
	stop := limiter.KeepRenewing(ctx, reservation, lost)
	if stop == nil {
		return nil
	}
	return &lease{limiter, reservation, stop}
}

// release ends the renewals, and then the lease.
func (l *lease) release() {
	if l == nil {
		return
	}
	l.stop()
	ctx, cancel := context.WithTimeout(context.Background(), giveBackTimeout)
	defer cancel()
	_ = l.limiter.Release(ctx, l.reservation) // or it runs out
}

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
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
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
	r.own, err = r.limiter.Attach(r.own).Settle(ctx, map[string]int64{unit: actual})
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
	if _, err = r.limiter.Attach(r.own).Cancel(ctx); err == nil {
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
	return r.limiter.Attach(own).Pause(ctx, d)
}

// Reserve takes more, in a handler: for a second call, or by a second policy. What the request leaves
// empty is the task's own: tenant, attributes, and policy. While it is denied it waits, up to `wait`
// and never past the context's deadline; then it returns a *throttle.DeniedError. A handler that returns that
// error has its task requeued at no cost, until the time that the denial told; then it joins the line of its own
// policy, at the front. The task begins anew then, and takes its own policy's cost again, unless it is given back
// by Cancel before.
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
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(deadline))
		request.MaxHold = max(0, time.Until(deadline))
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
		if left <= 0 || left < d.RetryIn && !d.RetryInIsBound() {
			return throttle.Reservation{}, &throttle.DeniedError{Decision: d, Request: request}
		}
		again := askAgain // limits may be raised, and what was taken given back
		if d.RetryInIsBound() {
			again = askForSlot
		}
		pause := min(max(d.RetryIn, time.Millisecond), left, again)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return throttle.Reservation{}, context.Cause(ctx)
		}
	}
}

// A handler that waits asks again at the time that it was told, and so often before: for a slot that somebody holds more
// often.
const (
	askAgain   = time.Second
	askForSlot = 100 * time.Millisecond
)

// keep keeps a lease until the handler returns. One that has returned gets nothing more.
func (r *running) keep(ctx context.Context, reservation throttle.Reservation) error {
	if r.limiter.Attach(reservation).Lease() == 0 {
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
	calls := request // those of its calls stand in no line
	calls.Front, calls.Key, calls.Ticket = false, "", throttle.TicketID{}
	r := &running{job: &throttle.Job{Request: calls}, limiter: t.config.Limiter, own: own}
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
			t.release(kept)
			r.mu.Lock()
			more := r.more
			r.ended = true
			r.mu.Unlock()
			for _, l := range more {
				t.release(l)
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
	case errors.As(err, &denied):
		return t.requeueAt(a, request, denied.Decision.Policy, denied.Decision.RetryIn, err)
	case ok && policy == request.Policy:
		return t.requeueFront(ctx, a, request, policy, retryIn, err)
	case ok:
		return t.requeueAt(a, request, policy, retryIn, err)
	case errors.Is(err, throttle.ErrUnavailable): // of a call that the handler wanted to make
		return t.unavailable(a, request, err)
	case errors.Is(context.Cause(ctx), ErrLeaseLost):
		return t.requeueAt(a, request, own.Policy, unavailableMin, err)
	}
	return err
}

// release ends a lease, and has the line asked that may wait for it.
func (t *Throttle) release(l *lease) {
	if l != nil {
		l.release()
		t.dispatcher().Freed(l.reservation.Policy)
	}
}

// pause passes a refusal on, also if the task's own time has run out.
func (t *Throttle) pause(ctx context.Context, policy string, d time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	if err := Pause(ctx, d); err != nil && !isRefusal(err) {
		t.outages.failed(err, "policy", policy)
	}
}

// requeueFront requeues a task whose own policy is paused by now: to the front of its tenant's in line.
func (t *Throttle) requeueFront(ctx context.Context, a *attempt, request throttle.Request, policy string, retryIn time.Duration, cause error) error {
	if request.Ticket != (throttle.TicketID{}) && a != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
		defer cancel()
		request.Front = true
		ticket := throttle.Ticket{TicketID: request.Ticket, Key: request.Key, Request: request}
		places, err := t.config.Limiter.Line(request.Policy).Join(ctx, []throttle.Ticket{ticket})
		if err == nil && places[0].Err == nil && !places[0].Exempt {
			d := throttle.Decision{
				At: time.Now(), Policy: request.Policy, Queued: true, RetryIn: places[0].StartsIn,
				RetryInMost: places[0].StartsInMost, Tenant: request.Tenant,
			}
			return t.waitInLine(a, d, cause)
		}
	}
	return t.requeueAt(a, request, policy, retryIn, cause)
}

// requeueAt requeues a task whose handler has run and could not do its work yet, for when it can. Then it joins the line of
// its own policy, at the front.
func (t *Throttle) requeueAt(a *attempt, request throttle.Request, policy string, retryIn time.Duration, cause error) error {
	d := throttle.Decision{At: time.Now(), Policy: policy, RetryIn: max(retryIn, time.Millisecond), Tenant: request.Tenant}
	at := asynqredis.WholeSecond(time.Now().Add(d.RetryIn))
	return t.attempts.deny(a, &DeniedError{Cause: cause, Decision: d, ProcessAt: at}, asynqredis.FrontMark)
}

// A lease keeps what concurrency windows hold for a reservation.
type lease struct {
	limiter     *throttle.Limiter
	reservation throttle.Reservation
	stop        func()
}

// keepLease renews until release. Without a concurrency window it returns nil.
func keepLease(ctx context.Context, limiter *throttle.Limiter, reservation throttle.Reservation, lost func(refused bool)) *lease {
	if limiter.Attach(reservation).Lease() == 0 {
		return nil
	}
	return &lease{limiter, reservation, limiter.Attach(reservation).KeepRenewing(ctx, lost)}
}

// release ends the renewals, and then the lease.
func (l *lease) release() {
	if l == nil {
		return
	}
	l.stop()
	ctx, cancel := context.WithTimeout(context.Background(), giveBackTimeout)
	defer cancel()
	_ = l.limiter.Attach(l.reservation).Release(ctx) // or it runs out
}

package worker

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// Requeues of tasks that the limiter could not decide about are spread over these, so that they do not
// all come back at once. Asynq's whole seconds make the longest 5 s.
const (
	unavailableMin = time.Second
	unavailableMax = 4 * time.Second
)

// giveBackTimeout bounds the call that gives units back after a task's own time has run out.
const giveBackTimeout = 5 * time.Second

var errOutOfTime = errors.New("worker: the task's time ran out before the limiter had answered")

// A DeniedError is what the middleware returns for a task that does not run now. It is for middlewares outside
// of it, which need not hand it on: the task is requeued in any case.
type DeniedError struct {
	// Cause is why the limiter could not decide, if it could not. The Decision then carries
	// the policy, the tenant and the delay alone.
	Cause error

	Decision throttle.Decision

	// ProcessAt is when the task is looked at again if nobody has taken it from the line before, by this machine's
	// clock, in whole seconds: the decision's RetryIn and two minutes, or half of RetryIn if that is more.
	// A task that stands in no line comes back then.
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

// mayComeAt says that the task waits for nothing but ProcessAt.
func (e *DeniedError) mayComeAt() bool { return !e.Decision.Queued }

// denialIn returns the denial that err is about, or nil. A middleware may have made something else of it.
func (t *Throttle) denialIn(err error) *DeniedError {
	var denied *DeniedError
	if err == nil || errors.As(err, &denied) {
		return denied
	}
	return t.attempts.denialTold(err)
}

// deny has a task wait that was denied: in line if its ticket is there, or else for a time.
func (t *Throttle) deny(a *attempt, d throttle.Decision, otherwise time.Duration) error {
	if !d.Queued {
		at := asynqredis.WholeSecond(time.Now().Add(otherwise))
		return t.attempts.deny(a, &DeniedError{Decision: d, ProcessAt: at}, "")
	}
	return t.waitInLine(a, d, nil)
}

// waitInLine has a task wait whose ticket is in line.
func (t *Throttle) waitInLine(a *attempt, d throttle.Decision, cause error) error {
	t.dispatcher().Expect(d.Policy, a.Queue, d.RetryIn)
	at := asynqredis.WholeSecond(time.Now().Add(dispatch.Fallback(d.RetryIn, 0)))
	return t.attempts.deny(a, &DeniedError{Cause: cause, Decision: d, ProcessAt: at}, t.mark(a))
}

// mark is by which the task of an attempt can be picked when its ticket is taken.
func (t *Throttle) mark(a *attempt) string {
	return asynqredis.Mark(a.message.JoinKey(), time.Now(), t.asynq.Load().Call())
}

// unavailable fails closed: the task is requeued like a denied one. It may have joined the line all the same.
func (t *Throttle) unavailable(a *attempt, r throttle.Request, cause error) error {
	t.outages.failed(cause, "policy", r.Policy, "fails", "closed")
	return t.attempts.deny(a, newUnavailable(r, cause), t.markIfLined(a, r))
}

func (t *Throttle) markIfLined(a *attempt, r throttle.Request) string {
	if a == nil || r.Ticket == (throttle.TicketID{}) {
		return ""
	}
	return t.mark(a)
}

func newUnavailable(r throttle.Request, cause error) *DeniedError {
	now := time.Now()
	at := asynqredis.WholeSecond(now.Add(unavailableMin + rand.N(unavailableMax-unavailableMin)))
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
		// What cannot be given back counts until its windows have passed.
		t.dispatcher().Later(func(ctx context.Context) error {
			_, err := d.Reservation.Cancel(ctx)
			return err
		})
	}
}

// isRefusal reports whether the error says that the request itself can never be granted.
func isRefusal(err error) bool {
	var request *throttle.RequestError
	var neverFits *throttle.NeverFitsError
	return errors.As(err, &request) || errors.As(err, &neverFits)
}

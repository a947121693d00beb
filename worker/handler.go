package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// askAgainForSlots is the longest wait of a task whose handler was denied only slots that others hold.
const askAgainForSlots = time.Second

// run runs the handler of a task that was granted, or that no policy can count. It returns the error with which
// the task fails, or nil if the task succeeded or is to wait.
func (s *Server) run(ctx context.Context, a *attempt, request throttle.Request, d throttle.Decision) error {
	base := request // of the handler's calls, which have no ticket
	base.Front, base.Key, base.Ticket = false, "", throttle.Ticket{}
	caller := &throttle.Caller{Decision: d, Request: base}
	j := &Job{caller: caller, limiter: s.limiter, settled: d.Reservation, taskType: a.task.Type()}
	ctx, j.lost = context.WithCancelCause(ctx)
	defer j.lost(nil)
	ctx = throttle.WithCaller(context.WithValue(ctx, jobKey{}, j), j.caller)
	ctx = d.Reservation.Hold(ctx)
	err := func() error {
		defer s.end(a, j) // also if the handler panics
		return a.handler.ProcessTask(ctx, a.task)
	}()
	switch {
	case err == nil:
		a.outcome.Store(&outcome{done: true})
	case errors.Is(err, asynq.SkipRetry) || errors.Is(err, asynq.RevokeTask): // the user has decided
	default:
		err = s.afterError(ctx, a, j, request, err)
	}
	return err
}

// end releases the slots that a handler held until it returned: in the background, as the task's time may run out.
func (s *Server) end(a *attempt, j *Job) {
	j.mu.Lock()
	j.ended = true
	held := append([]throttle.Reservation{j.caller.Decision.Reservation}, j.extra...)
	j.mu.Unlock()
	released, tried := context.WithCancel(context.Background())
	a.released = released
	s.dispatch.RetryInBackground(func(ctx context.Context) error {
		defer tried()
		errs := make([]error, len(held))
		var all sync.WaitGroup // side by side: each may take 5 s
		for i, r := range held {
			all.Go(func() {
				if errs[i] = r.Release(ctx); errs[i] == nil && r.Lease() > 0 { // without slots none has become free
					s.dispatch.Freed(s.lineOf(r.Request))
				}
			})
		}
		all.Wait()
		return cmp.Or(errs...) // if it fails for long, the leases expire
	})
}

// afterError returns the error with which a task fails whose handler returned err, or nil if the task is to wait.
func (s *Server) afterError(ctx context.Context, a *attempt, j *Job, request throttle.Request, err error) error {
	var refused *refusedError
	var denied *throttle.DeniedError
	request.Front = true // a task that waits joins the line of its own policy again
	d := undecidedDecision(request)
	retryIn, policy, callRefused := j.caller.Refusal()
	switch {
	case errors.As(err, &refused) && request.Policy == "": // no policy counts the task: none can pause
		return err
	case errors.As(err, &refused):
		report := func() error { return j.Pause(ctx, refused.after) }
		return s.noteRefused(ctx, a, request, request.Policy, max(0, refused.after), err, report)
	case errors.As(err, &denied) && denied.Request.Ticket == (throttle.Ticket{}): // a call of the handler, not an enqueue
		d.Policy, d.RetryIn = denied.Decision.Policy, askAgainIn(denied)
	case callRefused:
		return s.noteRefused(ctx, a, request, policy, retryIn, err, func() error { return nil })
	case errors.Is(err, throttle.ErrUnavailable): // for a call of the handler
		d = s.noteUndecided(request, err)
	case errors.Is(context.Cause(ctx), throttle.ErrLeaseLost): // which has stopped the handler
	default:
		return err
	}
	s.noteWait(a, a.Message, request, d, err)
	return nil
}

// askAgainIn returns the time until a denied request is made again. If slots were denied it is a second, or longer if
// something else denies it longer, at most RetryIn: slots may be given back long before their leases end.
func askAgainIn(denied *throttle.DeniedError) time.Duration {
	d, wait, slotsDenied := denied.Decision, askAgainForSlots, false
	if d.Pause != nil {
		wait = max(wait, d.Pause.Until.Sub(d.At))
	}
	if r := d.Remaining; r != nil && r.Units < denied.Request.CostOf(r.Unit) {
		wait = max(wait, r.Until.Sub(d.At))
	}
	for _, w := range d.Windows {
		if w.Algorithm.Leases() {
			slotsDenied = slotsDenied || w.Denied
		} else {
			wait = max(wait, w.RetryIn)
		}
	}
	if slotsDenied {
		return min(d.RetryIn, wait)
	}
	return d.RetryIn
}

// noteRefused notes that a task waits, as the upstream of a policy refused its call, and calls report. If calls of the
// task were refused for too long it returns a *GivenUpError.
func (s *Server) noteRefused(
	ctx context.Context, a *attempt, r throttle.Request, policy string, retryIn time.Duration, cause error,
	report func() error,
) error {
	p, _ := s.limiter.Lookup(policy) // perhaps a removed policy; zero, without limits, if the limiter never had it
	retryIn = min(retryIn, cmp.Or(p.MaxPause, retryIn))
	now := time.Now()
	message, since := a.Message.WithRefusal(now)
	// A task waits at least DefaultPause, as after a refusal for an unknown time.
	d := throttle.Decision{At: now, Policy: policy, RetryIn: max(retryIn, throttle.DefaultPause), Tenant: r.Tenant}
	s.noteWait(a, message, r, d, cause) // its time may run out from here on
	if err := report(); err != nil {
		s.limiterLog.Failed(err, "policy", policy)
	}
	if limit := p.MaxRefusedWait; limit > 0 && now.Add(retryIn).Sub(since) > limit {
		a.outcome.Store(nil)
		return &GivenUpError{Cause: cause, Limit: limit, Policy: policy, Since: since, Tenant: r.Tenant}
	}
	if policy == r.Policy && a.ctx.Err() == nil { // after an error of a.ctx asynq has ended the attempt
		s.rejoin(ctx, a, r, &d)
		s.noteWait(a, message, r, d, cause)
	}
	return nil
}

// rejoin makes a task whose handler ran join its line again, in front of its tenant's other tickets. If it waits
// there, rejoin notes that in the decision.
func (s *Server) rejoin(ctx context.Context, a *attempt, r throttle.Request, d *throttle.Decision) {
	if r.Ticket == (throttle.Ticket{}) { // of a policy with EarliestReset
		return
	}
	if a.isFromLine() {
		r.Since = a.Verdict.Since
	}
	var decisions []throttle.LineDecision
	err := s.breaker.Do(context.WithoutCancel(ctx), outage.AnswerWithin, func(ctx context.Context) (err error) {
		select { // else it would wait for its own slots
		case <-a.released.Done():
		case <-ctx.Done():
		}
		decisions, err = s.limiter.Line(s.lineOf(r)).Join(ctx, []throttle.Request{r})
		return err
	})
	switch {
	case err != nil || decisions[0].Err != nil || decisions[0].Exempt:
	case decisions[0].RetryIn <= 0: // it would start at once, such as if the pause could not be stored
		s.leave(ctx, r)
	default:
		d.Queued, d.RetryIn, d.Latest = true, decisions[0].RetryIn, decisions[0].Latest
	}
}

type refusedError struct{ after time.Duration } // after is unknown if below 1 ms

func (e *refusedError) Error() string {
	if e.after < time.Millisecond {
		return "worker: the upstream refuses calls"
	}
	return fmt.Sprintf("worker: the upstream refuses calls for %v", e.after)
}

// RetryAfter returns the error that a handler returns, wrapped or not, when the upstream refused its call
// for d. If d is below a millisecond the time is unknown: so d may be time.Until of a reset, even if that is
// over by this machine's clock. The task's policy pauses on every worker, for the task's tenant or for all
// (throttle.Reservation.Pause). The task is requeued in front of its tenant's other tickets, and keeps its
// retries. To use a retry all the same, call Job.Pause and return an error of another kind.
//
// The policy's MaxRefusedWait ends a task that is refused again and again. Without a policy the task fails.
func RetryAfter(d time.Duration) error { return &refusedError{d} }

// A GivenUpError says that a task failed for good, as the upstream refused its calls for too long:
// throttle.Policy.MaxRefusedWait. asynq archives the task. errors.Is finds asynq.SkipRetry.
type GivenUpError struct {
	Cause  error         // the handler's error
	Limit  time.Duration // the policy's MaxRefusedWait
	Policy string        // whose upstream refused
	Since  time.Time     // the first refusal after the task last failed for another reason
	Tenant string
}

// Error is one line of valid UTF-8.
func (e *GivenUpError) Error() string {
	text := fmt.Sprintf("worker: policy %q, tenant %q: given up by max_refused_wait %v: refused since %s: %v",
		e.Policy, e.Tenant, e.Limit, e.Since.UTC().Format(time.RFC3339), e.Cause)
	return strings.ToValidUTF8(text, "\uFFFD")
}

// Unwrap returns the cause, and asynq.SkipRetry.
func (e *GivenUpError) Unwrap() []error { return []error{e.Cause, asynq.SkipRetry} }

package worker

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A RefusedError is the error of a handler whose call the upstream refused for a while: see
// RetryAfter.
type RefusedError struct {
	After time.Duration // below 1 ms, as at 0 and below, it is unknown
}

func (e *RefusedError) Error() string {
	if known(e.After) == 0 {
		return "worker: the upstream refuses calls"
	}
	return fmt.Sprintf("worker: the upstream refuses calls for %v", e.After)
}

// known returns how long the upstream refuses calls, or 0 if that is unknown. A time that has passed
// here is: the clock of the upstream may be behind.
func known(d time.Duration) time.Duration {
	if d < time.Millisecond {
		return 0
	}
	return d
}

// RetryAfter returns a *RefusedError: a handler returns it, wrapped or not, when the upstream
// refused its call for d. If d is below a millisecond, as at 0 or below, the time is unknown: so
// time.Until of a reset may be passed on, even if that is over by this machine's clock. The task's
// policy pauses on every worker, for the task's tenant or for all (throttle.Reservation.Pause). The
// task is requeued in front of its tenant's other tickets. No retry is burnt. To burn one, call
// Job.Pause and return an error of another kind.
//
// The policy's MaxRefusedWait ends a task that is refused again and again.
//
// In a task that no policy matches it is logged, and the task fails by it as by any other error.
func RetryAfter(d time.Duration) error { return &RefusedError{d} }

// A GivenUpError says that a task failed for good, as the upstream refused its calls for too long:
// throttle.Policy.MaxRefusedWait. asynq archives the task. errors.Is finds asynq.SkipRetry.
type GivenUpError struct {
	Cause  error         // the handler's error
	Limit  time.Duration // the policy's MaxRefusedWait
	Policy string        // whose upstream refused
	Since  time.Time     // the first refusal since the task last failed by something else
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

// pause passes on the upstream's refusal, even if the task's own time has run out.
func (s *Server) pause(ctx context.Context, j *Job, d time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	if err := j.Pause(ctx, d); err != nil {
		s.limiter.Failed(err, "policy", j.caller.Request.Policy)
	}
}

// refused returns the denial of a task whose call the upstream of a policy refused for a time. If
// it was refused for too long it returns a *GivenUpError.
func (s *Server) refused(
	ctx context.Context, a *attempt, r throttle.Request, policy string, retryIn time.Duration, cause error,
) error {
	p, _ := s.config.Limiter.Lookup(policy) // the zero value, without limits, if it was removed
	now := time.Now()
	since, limit := s.attempts.refused(a, now), p.MaxRefusedWait
	if limit > 0 && now.Add(retryIn).Sub(since) > limit {
		return &GivenUpError{Cause: cause, Limit: limit, Policy: policy, Since: since, Tenant: r.Tenant}
	}
	// If it is not delayed by a pause it waits for as long as by one of unknown length.
	d := throttle.Decision{At: now, Policy: policy, RetryIn: max(retryIn, throttle.DefaultPause), Tenant: r.Tenant}
	mark := asynqredis.FrontMark // when that is over it joins the line of its own policy
	if policy == r.Policy && s.rejoin(ctx, a, r, &d) {
		mark = s.mark(a, r)
	}
	return s.wait(a, r, d, mark, cause)
}

// rejoin makes a task whose handler ran join its line again, in front of its tenant's other tickets, and
// reports whether it waits there.
func (s *Server) rejoin(ctx context.Context, a *attempt, r throttle.Request, d *throttle.Decision) bool {
	if r.Ticket == (throttle.Ticket{}) {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	if r.Front = true; wasTaken(a.grant) {
		r.Since = a.grant.Since
	}
	places, err := s.config.Limiter.Line(s.lineOf(r)).Join(ctx, []throttle.Request{r})
	switch {
	case err != nil || places[0].Err != nil || places[0].Exempt:
		return false
	case places[0].RetryIn <= 0: // nothing holds it up, such as if the pause could not be stored
		s.leave(ctx, r)
		return false
	}
	d.Queued, d.RetryIn, d.Latest = true, places[0].RetryIn, places[0].Latest
	return true
}

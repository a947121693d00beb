package throttle

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

var (
	// ErrUnavailable is the class of errors that say Redis did not answer, or answered that it
	// cannot serve at present. Nothing is known to be taken; the same call may go through later.
	ErrUnavailable = errors.New("throttle: redis is unavailable")

	// ErrState is the class of errors that say what is stored in Redis cannot be read: a newer
	// format, or somebody else's value under one of our keys. Nothing was changed.
	ErrState = errors.New("throttle: stored state cannot be read")

	// ErrReply is the class of errors that say the script's reply is not of its shape.
	ErrReply = errors.New("throttle: unexpected reply of the script")

	// ErrClock is the class of errors that say the clocks of Redis and of this process differ by more
	// than the ten minutes that Calendar windows bear. Nothing was changed.
	ErrClock = errors.New("throttle: the clock differs from that of Redis")

	// ErrUnknownPolicy is the class of errors that say no policy has the request's name.
	ErrUnknownPolicy = errors.New("throttle: unknown policy")

	// ErrDetached is what the methods of a Reservation return that is bound to no limiter: a zero
	// one, or one that was decoded.
	ErrDetached = errors.New("throttle: the reservation is bound to no limiter: use Limiter.Attach")

	// ErrLeaseLost is why a Hold ended the context of its work: what Concurrency windows held could
	// not be renewed in time, and others may have the room.
	ErrLeaseLost = errors.New("throttle: the lease of a concurrency window was lost")
)

// A RequestError says which value of a request cannot be used. Nothing was changed; the same
// request will never succeed under the present policies.
type RequestError struct {
	Policy string
	Field  string // such as "attribute user" or "cost tokens"
	Value  any
	Hint   string
}

func (e *RequestError) Error() string {
	value := fmt.Sprint(e.Value)
	if s, ok := e.Value.(string); ok {
		value = fmt.Sprintf("%q", cut(s))
	}
	return fmt.Sprintf("throttle: policy %q: %s %s: %s", e.Policy, e.Field, value, e.Hint)
}

// cut keeps an error message readable whatever a tenant's name holds.
func cut(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}

// A NeverFitsError says that a cost is larger than all that a window can ever hold, so that no
// wait helps. Nothing was changed.
type NeverFitsError struct {
	Policy   string
	Window   string
	Unit     string
	Cost     int64
	Capacity int64 // the window's limit, or its burst
	Held     int64 // the part of it that the job which asks holds itself; 0 outside of a job
}

func (e *NeverFitsError) Error() string {
	beside := ""
	if e.Held > 0 {
		beside = fmt.Sprintf(" beside the %d that the job holds", e.Held)
	}
	return fmt.Sprintf("throttle: policy %q, window %q: cost of %d %s never fits%s: the window holds %d at most",
		e.Policy, e.Window, e.Cost, e.Unit, beside, e.Capacity)
}

// A DeniedError says that work or a call did not start, because it does not fit now. Nothing was
// taken.
type DeniedError struct {
	// Cause is why there is no other decision: for instance that Redis did not answer, that a
	// handler returned the denial of a call, or the *TooLateError of a Wait. It is nil after a plain
	// denial.
	Cause error

	// Decision is the denial. With a Cause it may carry the policy, the tenant and RetryIn alone.
	Decision Decision

	// Request is what was asked for.
	Request Request

	// RetryAt is when a worker looks at the task again at the latest, by this machine's clock. It is
	// zero outside of a worker.
	RetryAt time.Time
}

// Error is the decision's reason, such as "throttled: github-api/burst, tenant acme, 1.8s", and the
// cause. It is valid UTF-8.
func (e *DeniedError) Error() string {
	text := e.Decision.Reason()
	var denied *DeniedError
	var late *TooLateError
	switch {
	case e.Cause == nil:
	case errors.As(e.Cause, &denied): // which says it all
		text = denied.Error()
	case errors.As(e.Cause, &late):
		text = late.Error()
	default:
		text += ": " + e.Cause.Error()
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// Unwrap returns Cause.
func (e *DeniedError) Unwrap() error { return e.Cause }

// A TooLateError says that work cannot start in time, and was given up: nothing was taken, and it has
// no place in line. The limit is Deadline or MaxWait, whichever is set. It is a
// context.DeadlineExceeded for errors.Is.
type TooLateError struct {
	Decision Decision      // the denial
	StartsAt time.Time     // when it could have started: by Deadline at the earliest, by MaxWait at the latest
	Deadline time.Time     // the time that it cannot start before
	MaxWait  time.Duration // the wait that it may exceed
}

// Error is the decision's reason and the limit, such as "throttled: api/window, tenant acme, 2m0s:
// would start 2026-01-02T14:02:00Z, deadline 2026-01-02T14:00:00Z". It is valid UTF-8.
func (e *TooLateError) Error() string {
	text := strings.TrimSuffix(e.Decision.Reason(), ", 0s")
	if e.MaxWait > 0 {
		text = fmt.Sprintf("%s: may wait for %v, longer than %v", text, roundUp(e.Decision.RetryInMost), e.MaxWait)
	} else {
		text = fmt.Sprintf("%s: would start %s, deadline %s",
			text, e.StartsAt.UTC().Format(time.RFC3339), e.Deadline.UTC().Format(time.RFC3339))
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// Is reports whether target is context.DeadlineExceeded.
func (e *TooLateError) Is(target error) bool { return target == context.DeadlineExceeded }

// A BacklogError says that Line.Join refused a ticket, because too many wait already.
type BacklogError struct {
	Decision Decision // the denial, as if the ticket had joined
	Backlog  int      // the limit: Ticket.Backlog
}

func (e *BacklogError) Error() string {
	return fmt.Sprintf("throttle: policy %q: tenant %s has %d waiting already",
		e.Decision.Policy, printable(e.Decision.Tenant), e.Backlog)
}

// classify wraps an error of a call in our class for it, and keeps it for errors.Is.
func classify(ctx context.Context, policy string, err error) error {
	if ended := ctx.Err(); ended != nil {
		if !errors.Is(err, ended) {
			err = fmt.Errorf("%w: %w", ended, err)
		}
		return fmt.Errorf("throttle: policy %q: %w", policy, err)
	}
	// Whatever is not an answer of Redis is about the way to it: a network, TLS, a closed pipe or pool.
	// Of OOM, READONLY and their like Redis says too which line of the script met them.
	var shape *script.ReplyError
	var state *script.StateError
	var number *strconv.NumError // of what should be a length
	class := ErrUnavailable
	switch text := err.Error(); {
	case strings.Contains(text, "SLUICE_STATE"):
		class = ErrState
	case strings.Contains(text, "SLUICE_CLOCK"):
		class = ErrClock
	case errors.Is(err, redis.Nil), errors.As(err, &shape), errors.As(err, &state), strings.HasPrefix(text, "redis: unexpected type="),
		strings.HasPrefix(text, "redis: can't parse"), strings.HasPrefix(text, "redis: invalid reply"),
		errors.As(err, &number), script.ScriptFailed(err):
		class = ErrReply
	}
	return fmt.Errorf("%w: policy %q: %w", class, policy, err)
}

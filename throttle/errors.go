package throttle

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/redischeck"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

var (
	// ErrUnavailable is the kind of error where Redis did not answer, or cannot serve now.
	// Whether the call took effect is unknown; it may succeed later.
	ErrUnavailable = errors.New("throttle: redis is unavailable")

	// ErrForbidden is the kind of error where Redis does not know the user, or does not let the user
	// call what the limiter needs: see docs/howto/lock-down-redis.md. Such an error is ErrUnavailable, too.
	ErrForbidden = errors.New("throttle: redis refuses its user")

	// ErrState is the kind of error where a value in Redis cannot be read: it has a newer format,
	// or another program wrote it. Nothing was changed.
	ErrState = errors.New("throttle: stored state cannot be read")

	// ErrReply is the kind of error where the script failed, or its reply is malformed.
	ErrReply = errors.New("throttle: unexpected reply of the script")

	// ErrClock is the kind of error where the clocks of Redis and of this process differ by more
	// than 10 minutes, which Calendar windows do not allow. Nothing was changed.
	ErrClock = errors.New("throttle: the clock differs from that of Redis")

	// ErrUnknownPolicy is the kind of error where the limiter has no policy of the name given.
	ErrUnknownPolicy = errors.New("throttle: unknown policy")

	// ErrLeaseLost is the cause with which a Hold ends the context of its work: others may have the room.
	ErrLeaseLost = errors.New("throttle: the lease of a concurrency window was lost")
)

// A RequestError names the invalid Field of a request, such as "attribute user" or "cost tokens", and
// its value; or the window that never has room for the cost, so that waiting does not help. Nothing was
// changed. The same request fails until the policies or the settings of its tenant change.
type RequestError PolicyError

func (e *RequestError) Error() string { return (*PolicyError)(e).Error() }

// A DeniedError says that a job or a call did not start, because it does not fit now, or that it was refused, because
// it cannot start in time, or too many wait before it. Nothing was taken. A refused request is not in line.
type DeniedError struct {
	// Cause is a reason beyond the denial, or nil. It wraps context.DeadlineExceeded if the work cannot start before
	// Request.Deadline or within Request.MaxWait. Else it says that Request.Backlog is reached, or what has failed.
	Cause error

	// Decision is the denial; for Request.Backlog it is the decision that a join would have got. With a Cause it may
	// have only Policy, Tenant and RetryIn.
	Decision Decision

	// Request is the denied request. From Limiter.Wait, its Deadline is when the wait would have ended.
	Request Request

	StartsAt time.Time // the expected start if that is after Request.Deadline, and else zero
}

// Error is the decision's reason and the cause, such as "throttled: api/window, tenant acme, 2m0s: would
// start 2026-01-02T14:02:00Z, deadline 2026-01-02T14:00:00Z". It is valid UTF-8.
func (e *DeniedError) Error() string {
	text := e.Decision.Reason()
	var denied *DeniedError
	switch {
	case e.Cause == nil:
	case errors.As(e.Cause, &denied): // its text has the reason
		text = denied.Error()
	case !e.StartsAt.IsZero():
		text = fmt.Sprintf("%s: would start %s, deadline %s", strings.TrimSuffix(text, ", 0s"),
			e.StartsAt.UTC().Format(time.RFC3339), e.Request.Deadline.UTC().Format(time.RFC3339))
	default:
		named := fmt.Sprintf("policy %q: ", e.Decision.Policy) // the reason names it already
		text += ": " + strings.Replace(e.Cause.Error(), named, "", 1)
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// Unwrap returns Cause.
func (e *DeniedError) Unwrap() error { return e.Cause }

// tooLate returns the denial of a request that cannot start before its deadline.
func tooLate(r Request, d Decision) *DeniedError {
	return &DeniedError{Cause: context.DeadlineExceeded, Decision: d, Request: r, StartsAt: time.Now().Add(d.RetryIn)}
}

// silent reports whether a context has ended because the limiter does not answer, as its cause says.
func silent(ctx context.Context) bool { return errors.Is(context.Cause(ctx), ErrUnavailable) }

// contextError returns the error of a context that has ended, with its cause if that is another.
func contextError(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) || silent(ctx) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// Package inspect needs it, too. Exported here it would be in the API, and package script does not know the kinds.
func init() { script.Classify = classify }

// classify wraps an error of a call to Redis in its kind. If ctx has ended, that is the reason. The policy may be "".
func classify(ctx context.Context, policy string, err error) error {
	if err == nil {
		return nil
	}
	if policy != "" {
		policy = fmt.Sprintf("policy %q: ", policy)
	}
	if ctx.Err() != nil {
		ended := contextError(ctx)
		if !errors.Is(err, ctx.Err()) {
			ended = fmt.Errorf("%w: %w", ended, err)
		}
		return fmt.Errorf("throttle: %s%w", policy, ended)
	}
	// An error that is no answer of Redis comes from the connection: the network, TLS, a closed pipe or pool. Answers
	// such as OOM and READONLY name a line of the script, but are not the script's fault.
	kind := ErrUnavailable
	switch text := err.Error(); {
	case redischeck.Forbidden(err):
		return fmt.Errorf("%w: %w: %s%w", ErrUnavailable, ErrForbidden, policy, err)
	case strings.Contains(text, "SLUICE_STATE"):
		kind = ErrState
	case strings.Contains(text, "SLUICE_CLOCK"):
		kind = ErrClock
	case errors.Is(err, redis.Nil), errors.As(err, new(*script.ReplyError)), script.ScriptFailed(err),
		strings.HasPrefix(text, "redis: unexpected type="), strings.HasPrefix(text, "redis: can't parse"),
		strings.HasPrefix(text, "redis: invalid reply"), errors.As(err, new(*strconv.NumError)): // of a length
		kind = ErrReply
	}
	return fmt.Errorf("%w: %s%w", kind, policy, err)
}

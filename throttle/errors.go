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
)

// A RequestError says which value of a request cannot be used. Nothing was changed; the same
// request will never succeed under the present policies.
type RequestError struct {
	Policy string
	Field  string // such as "attribute user" or "cost tokens"
	Value  any
	Mend   string
}

func (e *RequestError) Error() string {
	value := fmt.Sprint(e.Value)
	if s, ok := e.Value.(string); ok {
		value = fmt.Sprintf("%q", cut(s))
	}
	return fmt.Sprintf("throttle: policy %q: %s %s: %s", e.Policy, e.Field, value, e.Mend)
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
}

func (e *NeverFitsError) Error() string {
	return fmt.Sprintf("throttle: policy %q, window %q: cost of %d %s never fits: the window holds %d at most",
		e.Policy, e.Window, e.Cost, e.Unit, e.Capacity)
}

// A DeniedError says that a call was not made, because it does not fit now. Nothing was taken.
type DeniedError struct {
	Decision Decision
	Request  Request // what was asked for
}

// Error is the decision's reason, such as "throttled: github-api/burst, tenant acme, 1.8s".
func (e *DeniedError) Error() string { return e.Decision.Reason() }

// A WaitError says that Wait gave up because the context ends before the request can fit.
// Nothing was taken.
type WaitError struct {
	Decision Decision  // the last denial
	Deadline time.Time // of the context
}

func (e *WaitError) Error() string {
	return fmt.Sprintf("throttle: %s: would have to wait past the context's deadline", e.Decision.Reason())
}

// A RefusedError says that Join took no place, because the ticket would start too late or because too
// many of its flow wait already. One of Backlog, MaxWait and Deadline is set: the limit that was met.
type RefusedError struct {
	Decision Decision      // RetryInLeast to RetryInMost is when it would have started
	Backlog  int           // tickets
	MaxWait  time.Duration // shorter than RetryInMost
	Deadline time.Duration // shorter than RetryInLeast
}

func (e *RefusedError) Error() string {
	tenant := printable(e.Decision.Tenant)
	switch {
	case e.Backlog > 0:
		return fmt.Sprintf("throttle: policy %q: tenant %s has %d waiting already", e.Decision.Policy, tenant, e.Backlog)
	case e.Deadline > 0:
		return fmt.Sprintf("throttle: policy %q: tenant %s would wait for %v, past the deadline in %v",
			e.Decision.Policy, tenant, roundUp(e.Decision.RetryInLeast), e.Deadline)
	}
	return fmt.Sprintf("throttle: policy %q: tenant %s would wait for %v, longer than %v",
		e.Decision.Policy, tenant, roundUp(e.Decision.RetryInMost), e.MaxWait)
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

package outage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// AnswerWithin is how long a task waits for the limiter, and probeWithin how long while the limiter is silent.
const AnswerWithin, probeWithin = 2 * time.Second, 250 * time.Millisecond

// A Backoff delays the next attempt after a failure: by 100 ms, and then by twice as long each time, up to a
// second. Its zero value has seen no failure.
type Backoff struct {
	Until time.Time
	delay time.Duration
}

// Fail notes one more failure.
func (b *Backoff) Fail(now time.Time) {
	b.delay = min(max(2*b.delay, 100*time.Millisecond), time.Second)
	b.Until = now.Add(b.delay)
}

// A Breaker keeps callers from waiting for a limiter that does not answer. The first callers wait for their whole
// timeout. After that one caller at a time asks, briefly, and all others fail at once. The zero Breaker is ready.
type Breaker struct {
	mu      sync.Mutex
	silence Backoff // when it has passed, one caller may ask
}

// ErrSilent is the cause of a context that ended because the limiter did not answer in time.
var ErrSilent = fmt.Errorf("%w: %w", throttle.ErrUnavailable, context.DeadlineExceeded)

// Do calls ask with a context that ends after timeout, or sooner while the limiter is silent. For a while after
// a failure, and while another caller asks, the context has ended from the start. Its cause then is
// throttle.ErrUnavailable.
func (b *Breaker) Do(ctx context.Context, timeout time.Duration, ask func(context.Context) error) error {
	b.mu.Lock()
	silent, now := !b.silence.Until.IsZero(), time.Now()
	switch {
	case silent && now.Before(b.silence.Until):
		timeout = 0
	case silent:
		timeout = min(timeout, probeWithin)
		b.silence.Until = now.Add(timeout) // others do not ask meanwhile
	}
	b.mu.Unlock()
	call, cancel := context.WithTimeoutCause(ctx, timeout, ErrSilent)
	defer cancel()
	err := ask(call)
	if ctx.Err() != nil || timeout == 0 {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if errors.Is(call.Err(), context.DeadlineExceeded) {
		b.silence.Fail(time.Now())
	} else {
		b.silence = Backoff{}
	}
	return err
}

// Package breaker bounds how long callers wait for a limiter that does not answer.
package breaker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// AnswerWithin is how long a task waits for the limiter.
const AnswerWithin = 2 * time.Second

// probeTimeout bounds each call while the limiter is silent.
const probeTimeout = 250 * time.Millisecond

// A Backoff delays the next attempt after a failure: by 100 ms, and then by twice as long each time, up to a
// second. Its zero value is that without a failure.
type Backoff struct {
	Until time.Time
	pause time.Duration
}

// Fail notes one more failure.
func (b *Backoff) Fail(now time.Time) {
	b.pause = min(max(2*b.pause, 100*time.Millisecond), time.Second)
	b.Until = now.Add(b.pause)
}

// A Breaker keeps callers from waiting for a limiter that does not answer. The first callers wait
// for their whole timeout. After that one caller at a time asks, briefly, and all others fail at
// once. Its zero value is ready.
type Breaker struct {
	mu      sync.Mutex
	silence Backoff // one caller may ask when it has passed
}

var (
	errSilent = fmt.Errorf("%w: it did not answer a moment ago", throttle.ErrUnavailable)
	errSlow   = fmt.Errorf("%w: %w", throttle.ErrUnavailable, context.DeadlineExceeded)
)

// Do calls ask with a context that ends after timeout, or sooner while the limiter is silent. While
// another caller finds out whether it answers again, the context has ended already. The cause of that end,
// and the class of the error then, is throttle.ErrUnavailable.
func (b *Breaker) Do(ctx context.Context, timeout time.Duration, ask func(context.Context) error) error {
	cause := errSlow
	timeout, asks := b.begin(time.Now(), timeout)
	if !asks {
		timeout, cause = 0, errSilent
	}
	call, cancel := context.WithTimeoutCause(ctx, timeout, cause)
	defer cancel()
	err := ask(call)
	if ctx.Err() != nil {
		return err
	}
	silent := errors.Is(call.Err(), context.DeadlineExceeded)
	if silent && err != nil && !errors.Is(err, throttle.ErrUnavailable) {
		err = fmt.Errorf("%w: %w", throttle.ErrUnavailable, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case silent && asks:
		b.silence.Fail(time.Now())
	case asks:
		b.silence = Backoff{}
	}
	return err
}

// begin returns how long a caller may wait for the limiter, and whether it may ask at all.
func (b *Breaker) begin(now time.Time, timeout time.Duration) (time.Duration, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.silence.Until.IsZero():
		return timeout, true
	case now.Before(b.silence.Until):
		return 0, false
	}
	timeout = min(timeout, probeTimeout)
	b.silence.Until = now.Add(timeout) // others do not ask meanwhile
	return timeout, true
}

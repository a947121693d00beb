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

// AnswerWithin is how long work that a limiter guards waits for it: tasks and requests.
const AnswerWithin = 2 * time.Second

// probeTimeout bounds each call while the limiter is silent.
const probeTimeout = 250 * time.Millisecond

// Pauses before a limiter that failed is asked again. They double.
const (
	pauseMin = 100 * time.Millisecond
	pauseMax = time.Second
)

// A Breaker keeps callers from waiting for a limiter that does not answer. The first callers wait
// for their whole timeout. After that one caller at a time asks, briefly, and all others fail at
// once. Its zero value is ready.
type Breaker struct {
	mu    sync.Mutex
	pause time.Duration // 0 while the limiter answers
	until time.Time     // when one caller may ask
}

var errSilent = fmt.Errorf("%w: it did not answer a moment ago", throttle.ErrUnavailable)

// Do calls ask with a context that ends after timeout, or sooner while the limiter is silent. If
// the time is up the error is throttle.ErrUnavailable.
func (b *Breaker) Do(ctx context.Context, timeout time.Duration, ask func(context.Context) error) error {
	timeout, ok := b.begin(time.Now(), timeout)
	if !ok {
		return errSilent
	}
	call, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := ask(call)
	silent := err != nil && ctx.Err() == nil && errors.Is(call.Err(), context.DeadlineExceeded)
	if ctx.Err() == nil {
		b.end(time.Now(), silent)
	}
	if silent {
		err = fmt.Errorf("%w: %w", throttle.ErrUnavailable, err)
	}
	return err
}

// begin returns how long a caller may wait for the limiter, and whether it may ask at all.
func (b *Breaker) begin(now time.Time, timeout time.Duration) (time.Duration, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.pause == 0:
		return timeout, true
	case now.Before(b.until):
		return 0, false
	}
	timeout = min(timeout, probeTimeout)
	b.until = now.Add(timeout) // others do not ask meanwhile
	return timeout, true
}

// end notes whether the limiter was silent.
func (b *Breaker) end(now time.Time, silent bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !silent {
		b.pause = 0
		return
	}
	b.pause = min(max(2*b.pause, pauseMin), pauseMax)
	b.until = now.Add(b.pause)
}

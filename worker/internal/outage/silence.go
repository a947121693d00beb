package outage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// probeTimeout bounds each call while the limiter is silent.
const probeTimeout = 250 * time.Millisecond

// Pauses before a limiter that failed is asked again. They double.
const (
	pauseMin = 100 * time.Millisecond
	pauseMax = time.Second
)

// A Backoff is how long nobody asks what has failed.
type Backoff struct {
	Failed bool
	Until  time.Time
	pause  time.Duration
}

// Fail notes one more failure.
func (b *Backoff) Fail(now time.Time) {
	b.Failed = true
	b.pause = min(max(2*b.pause, pauseMin), pauseMax)
	b.Until = now.Add(b.pause)
}

// A Silence keeps callers from waiting for a limiter that does not answer. The first callers wait
// for their whole timeout. After that one caller at a time asks, briefly, and all others fail at
// once. Its zero value is ready.
type Silence struct {
	mu      sync.Mutex
	backoff Backoff
}

var errSilent = fmt.Errorf("%w: it did not answer a moment ago", throttle.ErrUnavailable)

// Bound calls ask with a context that ends after timeout, or sooner while the limiter is silent. If
// the time is up the error is throttle.ErrUnavailable.
func (s *Silence) Bound(ctx context.Context, timeout time.Duration, ask func(context.Context) error) error {
	timeout, ok := s.begin(time.Now(), timeout)
	if !ok {
		return errSilent
	}
	call, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := ask(call)
	silent := err != nil && ctx.Err() == nil && errors.Is(call.Err(), context.DeadlineExceeded)
	if ctx.Err() == nil {
		s.end(time.Now(), silent)
	}
	if silent {
		err = fmt.Errorf("%w: %w", throttle.ErrUnavailable, err)
	}
	return err
}

// begin returns how long a caller may wait for the limiter, and whether it may ask at all.
func (s *Silence) begin(now time.Time, timeout time.Duration) (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.backoff.Failed {
		return timeout, true
	}
	if now.Before(s.backoff.Until) {
		return 0, false
	}
	timeout = min(timeout, probeTimeout)
	s.backoff.Until = now.Add(timeout) // others do not ask meanwhile
	return timeout, true
}

// end notes whether the limiter was silent.
func (s *Silence) end(now time.Time, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if silent {
		s.backoff.Fail(now)
	} else {
		s.backoff = Backoff{}
	}
}

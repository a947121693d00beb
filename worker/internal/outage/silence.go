package outage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// probeTimeout bounds each call while the limiter is silent.
	probeTimeout = 250 * time.Millisecond

	// Pauses between probes of a silent limiter. They double.
	probePauseMin = 100 * time.Millisecond
	probePauseMax = time.Second
)

// A Silence keeps callers from waiting for a limiter that does not answer. The first callers wait
// for their whole timeout. After that one caller at a time asks, briefly, and all others fail at
// once. Its zero value is ready.
type Silence struct {
	mu    sync.Mutex
	began bool
	pause time.Duration
	until time.Time // when the next caller may ask
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
	if !s.began {
		return timeout, true
	}
	if now.Before(s.until) {
		return 0, false
	}
	timeout = min(timeout, probeTimeout)
	s.until = now.Add(timeout) // others do not ask meanwhile
	return timeout, true
}

// end notes whether the limiter was silent.
func (s *Silence) end(now time.Time, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.began = silent; !silent {
		s.pause = 0
		return
	}
	s.pause = min(max(2*s.pause, probePauseMin), probePauseMax)
	s.until = now.Add(s.pause)
}

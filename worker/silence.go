package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// decideTimeout bounds how long a task waits for the limiter in its handler slot.
	decideTimeout = 2 * time.Second

	// probeTimeout bounds it while the limiter is silent.
	probeTimeout = 250 * time.Millisecond

	// Pauses between probes of a silent limiter. They double.
	probePauseMin = 100 * time.Millisecond
	probePauseMax = time.Second
)

// A silence keeps tasks from waiting in handler slots for a limiter that does not answer: others could run there. The
// first ones wait for decideTimeout. Then one task at a time asks, briefly, and all others fail at once.
type silence struct {
	mu    sync.Mutex
	began bool
	pause time.Duration
	until time.Time // when the next task may ask
}

var errSilent = fmt.Errorf("%w: it did not answer a moment ago", throttle.ErrUnavailable)

// bound runs ask, for a limited time. An error that says that the time was up is throttle.ErrUnavailable.
func (s *silence) bound(ctx context.Context, ask func(context.Context) (throttle.Decision, error)) (throttle.Decision, error) {
	timeout, ok := s.begin(time.Now())
	if !ok {
		return throttle.Decision{}, errSilent
	}
	call, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	d, err := ask(call)
	silent := err != nil && ctx.Err() == nil && errors.Is(call.Err(), context.DeadlineExceeded)
	if ctx.Err() == nil {
		s.end(time.Now(), silent)
	}
	if silent {
		err = fmt.Errorf("%w: %w", throttle.ErrUnavailable, err)
	}
	return d, err
}

// begin tells how long a task may wait for the limiter, and whether it may ask at all.
func (s *silence) begin(now time.Time) (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.began {
		return decideTimeout, true
	}
	if now.Before(s.until) {
		return 0, false
	}
	s.until = now.Add(probeTimeout) // others do not ask meanwhile
	return probeTimeout, true
}

// end notes whether the limiter was silent.
func (s *silence) end(now time.Time, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.began = silent; !silent {
		s.pause = 0
		return
	}
	s.pause = min(max(2*s.pause, probePauseMin), probePauseMax)
	s.until = now.Add(s.pause)
}

package worker

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

var errSilent = errors.New("worker: the limiter was unavailable a moment ago")

// A silence is a time in which the limiter is not asked, after it did not answer. It doubles from
// 100 ms to 1 s.
type silence struct {
	mu    sync.Mutex
	pause time.Duration
	until time.Time
}

func (s *silence) over(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !now.Before(s.until)
}

// note notes the outcome of a call.
func (s *silence) note(err error, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !errors.Is(err, throttle.ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded) {
		s.pause, s.until = 0, time.Time{}
		return
	}
	s.pause = min(max(2*s.pause, 100*time.Millisecond), time.Second)
	s.until = now.Add(s.pause)
}

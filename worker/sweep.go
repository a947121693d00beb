package worker

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// sweepEvery is how often a process sweeps one line, at most.
	sweepEvery = time.Second

	// sweepMost is how many tickets a sweep looks at. Servers drop the others when they take them.
	sweepMost = 10_000

	// sweepTimeout bounds one sweep.
	sweepTimeout = 2 * time.Second
)

// A sweeper drops tickets whose tasks were deleted, before another task is refused because of them.
type sweeper struct {
	limiter *throttle.Limiter

	mu    sync.Mutex
	swept map[string]time.Time // by line
}

var errSweptEnough = errors.New("worker: a sweep has seen enough tickets")

// sweep reports whether a line may have become shorter since a task was refused.
func (s *sweeper) sweep(ctx context.Context, name string, asynq *asynqredis.Client, refusedAt time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if last := s.swept[name]; last.After(refusedAt) {
		return true
	} else if time.Since(last) < sweepEvery {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	identity, err := asynq.Identity(ctx)
	if err != nil {
		return false
	}
	line, seen, dropped := s.limiter.Line(name), 0, false
	_ = line.Tickets(ctx, "", func(tickets []throttle.Ticket) error { // what it has dropped is enough
		byQueue := map[string][]throttle.Ticket{}
		for _, t := range tickets {
			if in, queue, _ := strings.Cut(t.Queue, "/"); in == identity {
				byQueue[queue] = append(byQueue[queue], t)
			}
		}
		for queue, tickets := range byQueue {
			ids := make([]string, len(tickets))
			for i, t := range tickets {
				ids[i] = t.ID
			}
			there, err := asynq.There(ctx, queue, ids)
			if err != nil {
				return err
			}
			var gone []throttle.Ticket
			for i, is := range there {
				if !is {
					gone = append(gone, tickets[i])
				}
			}
			dropped = dropped || len(gone) > 0
			if err := leaveAll(ctx, line, gone); err != nil {
				return err
			}
		}
		if seen += len(tickets); seen >= sweepMost {
			return errSweptEnough
		}
		return nil
	})
	s.swept[name] = time.Now()
	return dropped
}

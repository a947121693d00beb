package worker

import (
	"context"
	"errors"
	"fmt"
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
	seen, dropped := 0, false
	visit := func(queue string, tickets []throttle.Ticket) (gone []throttle.Ticket, err error) {
		ids := make([]string, len(tickets))
		for i, t := range tickets {
			ids[i] = t.ID
		}
		exist, err := asynq.There(ctx, queue, ids)
		for i, exists := range exist {
			if !exists {
				gone = append(gone, tickets[i])
			}
		}
		dropped = dropped || len(gone) > 0
		if seen += len(tickets); seen >= sweepMost && err == nil {
			err = errSweptEnough
		}
		return gone, err
	}
	_ = eachQueue(ctx, s.limiter.Line(name), "", asynq, visit) // what it has dropped when it fails is enough
	s.swept[name] = time.Now()
	return dropped
}

// eachQueue visits the tickets of a line that are of an asynq, page by page, at each visit those of one
// queue. What a visit returns leaves the line. A tenant of "" is all.
func eachQueue(
	ctx context.Context, line *throttle.Line, tenant string, asynq *asynqredis.Client,
	visit func(queue string, tickets []throttle.Ticket) (gone []throttle.Ticket, err error),
) error {
	identity, err := asynq.Identity(ctx)
	if err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	return line.Tickets(ctx, tenant, func(tickets []throttle.Ticket) error {
		byQueue := map[string][]throttle.Ticket{}
		for _, t := range tickets {
			if in, queue, _ := strings.Cut(t.Queue, "/"); in == identity {
				byQueue[queue] = append(byQueue[queue], t)
			}
		}
		for queue, tickets := range byQueue {
			gone, err := visit(queue, tickets)
			if err = errors.Join(err, line.Leave(ctx, gone...)); err != nil {
				return err
			}
		}
		return nil
	})
}

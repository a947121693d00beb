package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

	// pageTimeout bounds what is done with a page of tickets, also after the end of a context.
	pageTimeout = 5 * time.Second
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
	_ = eachQueue(ctx, s.limiter.Line(name), "", asynq, "", func(found []int64) error {
		dropped = dropped || slices.Contains(found, -1)
		if seen += len(found); seen >= sweepMost {
			return errSweptEnough
		}
		return nil
	}) // what it has dropped when it fails is enough
	s.swept[name] = time.Now()
	return dropped
}

// eachQueue drops, or looks at, the tasks whose tickets are in a line and that are of an asynq, page by page.
// The tickets of those that wait no longer leave the line. A tenant of "" is all. When ctx ends the page under
// way is finished.
func eachQueue(
	ctx context.Context, line *throttle.Line, tenant string, asynq *asynqredis.Client, how string, seen func(found []int64) error,
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
		page, cancel := context.WithTimeout(context.WithoutCancel(ctx), pageTimeout)
		defer cancel()
		for queue, tickets := range byQueue {
			var ids []string
			for _, t := range tickets {
				ids = append(ids, t.ID)
			}
			var gone []throttle.Ticket
			found, err := asynq.Drop(page, queue, how, ids)
			for i, n := range found {
				if n != 0 {
					gone = append(gone, tickets[i])
				}
			}
			if err = errors.Join(err, line.Leave(page, gone...), seen(found), ctx.Err()); err != nil {
				return err
			}
		}
		return nil
	})
}

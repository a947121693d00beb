package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// sweepEvery is the shortest time between two sweeps of a line by one Client or Server.
	sweepEvery = time.Second

	// sweepMost is about the number of tickets that a sweep looks at. Servers drop the others when they take them.
	sweepMost = 10_000

	// sweepTimeout is after how long a sweep begins no further page. The page under way takes up to 5 s more.
	sweepTimeout = 2 * time.Second
)

// DropOptions are the options of Client.Drop.
type DropOptions struct {
	// Delete deletes the tasks. By default they are archived: of each queue asynq keeps the last 9,999 for 90 days.
	Delete bool

	// Policy and Tenant select the tasks. Both are required.
	Policy, Tenant string
}

// Drop removes the tasks of a tenant from a policy's line, and archives or deletes them. It returns their number, or
// less if a reply of asynq's Redis was lost. These stay: tasks that run, wait for their ProcessAt, come meanwhile, or
// joined by scopes that the policy no longer has. asynq's counters of failures and retries do not change.
//
// It works page by page. If it fails, or ctx ends, the other tasks still wait, and it can be called again. Every task
// that has left the line is dropped. The limiter needs the policy. Errors are throttle.ErrUnknownPolicy,
// throttle.ErrUnavailable, the context's, or of asynq's Redis.
func (c *Client) Drop(ctx context.Context, o DropOptions) (int, error) {
	if o.Tenant == "" {
		return 0, errors.New("worker: DropOptions.Tenant is empty: must be the name of a tenant")
	}
	to := asynqredis.Archive
	if o.Delete {
		to = asynqredis.Delete
	}
	results, err := c.drop(ctx, c.limiter.LineOf(o.Policy, o.Tenant), o.Tenant, to, math.MaxInt)
	return results[asynqredis.Moved], err
}

var errSweptEnough = errors.New("worker: a sweep has seen enough tickets")

// sweep removes tickets of deleted tasks from a line, after a task was refused because too many tickets wait. It
// reports whether the line may be shorter than at refusedAt.
func (l *link) sweep(ctx context.Context, line string, refusedAt time.Time) bool {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	unlocked := make(chan time.Time, 1)
	unlocked <- time.Time{}
	known, _ := l.sweeps.LoadOrStore(line, unlocked)
	lock, last := known.(chan time.Time), time.Time{} // a caller that has received the time of the last sweep may sweep
	select {
	case last = <-lock:
	case <-ctx.Done():
		return false
	}
	defer func() { lock <- last }()
	if time.Since(last) < sweepEvery {
		return last.After(refusedAt)
	}
	results, _ := l.drop(ctx, line, "", asynqredis.Look, sweepMost) // after an error it has still removed some
	last = time.Now()
	return results[asynqredis.NotThere] > 0
}

// drop drops the tasks of a line, or looks at them, page by page, and counts the results of asynqredis.Client.Apply.
// It removes the tickets of tasks that it moved, or that are gone or have ended. The tenant "" is all tenants. When ctx
// ends, it finishes the queue under way. After about `most` tickets it returns errSweptEnough.
func (l *link) drop(ctx context.Context, line, tenant, to string, most int) (results map[int64]int, err error) {
	database, err := l.tasks.Database(ctx)
	if err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
	results = map[int64]int{}
	err = l.limiter.Line(line).Tickets(ctx, tenant, func(tickets []throttle.Ticket) error {
		byQueue := map[string][]asynqredis.Move{}
		for _, t := range tickets {
			if owner, queue, _ := strings.Cut(t.Queue, "/"); owner == database {
				byQueue[queue] = append(byQueue[queue], asynqredis.Move{ID: t.ID, JoinKey: asynqredis.AnyKey, To: to})
			}
		}
		page, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
		defer cancel()
		for queue, moves := range byQueue {
			var leave []throttle.Ticket
			found, err := l.tasks.Apply(page, queue, moves)
			for i, result := range found {
				results[result]++
				if result != asynqredis.MayRun {
					leave = append(leave, throttle.Ticket{Queue: database + "/" + queue, ID: moves[i].ID})
				}
			}
			if err = errors.Join(err, l.limiter.Line(line).Leave(page, leave...), ctx.Err()); err != nil {
				return err
			}
		}
		if most -= len(tickets); most <= 0 {
			return errSweptEnough
		}
		return nil
	})
	return results, err
}

package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// putOffFrom: forward looks at a task storedFor after it was stored. A join that would move that by less leaves it.
const putOffFrom = time.Minute

// join makes stored tasks of one queue join a line, and moves or deletes them as the decisions demand. Tasks that
// are not in line become pending. If the move fails, workers find the tasks as they were stored.
func (c *Client) join(ctx context.Context, queue, line string, es []*enqueueTask) {
	err := c.joinLine(ctx, line, es)
	if _, member := asynqredis.MembersOf(ctx); member && err != nil {
		// The tasks stay scheduled until forward finds them: thousands of pending ones would take slots in vain.
		for _, e := range es {
			e.Err = err
		}
		return
	}
	policy, _ := c.limiter.Lookup(line)
	now, nudge := time.Now(), false
	var moves []asynqredis.Move
	var moved []*enqueueTask
	for _, e := range es {
		decision, move := e.decision, asynqredis.Move{ID: e.call.ID, JoinKey: e.request.Key} // without a time: to pending
		switch {
		case decision.Exempt:
			e.Start = ExpectedStart{At: now}
		case errors.As(decision.Err, new(*throttle.RequestError)), errors.As(decision.Err, new(*throttle.DeniedError)):
			e.refuse(decision.Err)
			move.To = asynqredis.Delete
		case !decision.Queued, err != nil && decision.AlreadyQueued: // it becomes pending, and joins if it is denied
		default:
			e.Start = ExpectedStart{Joined: true, At: now.Add(decision.RetryIn), Binds: decision.Binds}
			if decision.Latest >= decision.RetryIn {
				e.Start.Latest = now.Add(decision.Latest)
			}
			nudge = nudge || decision.Nudge
			wait := dispatch.Fallback(policy, decision.RetryIn)
			if wait <= storedFor+putOffFrom {
				continue
			}
			move.At = asynqredis.WholeSecond(now.Add(wait))
			move.Message, move.Reason = e.call.Message, dispatch.Reason(e.request, decision, now)
			e.Info.NextProcessAt = move.At
		}
		moves, moved = append(moves, move), append(moved, e)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	if nudge {
		_ = c.tasks.Nudge(ctx, queue, line) // else a worker asks by itself, some seconds later
	}
	if len(moves) == 0 {
		return
	}
	_, err = c.tasks.Apply(ctx, queue, moves)
	for i, e := range moved {
		switch {
		case moves[i].To != "" && err != nil:
			e.Err = fmt.Errorf("%w; and it was enqueued all the same: %w", e.Err, err)
		case moves[i].To == "" && moves[i].At.IsZero() && err == nil:
			e.Info.State, e.Info.NextProcessAt = asynq.TaskStatePending, time.Now()
		}
	}
}

// joinLine makes tasks join. A ticket that was in line already belongs to an earlier task with the same ID:
// it leaves, and the task joins again. A task that was refused because of others that wait also joins again,
// if tickets of deleted tasks have left the line since.
//
// A ticket may join after the context has ended. It is dropped when it is taken, as its task is not scheduled then.
func (c *Client) joinLine(ctx context.Context, line string, es []*enqueueTask) error {
	begun := time.Now()
	if err := c.ask(ctx, line, es); err != nil {
		return err
	}
	var again, refused []*enqueueTask
	var tickets []throttle.Ticket
	for _, e := range es {
		if e.decision.AlreadyQueued {
			again, tickets = append(again, e), append(tickets, e.request.Ticket)
		} else if errors.As(e.decision.Err, new(*throttle.DeniedError)) {
			refused = append(refused, e)
		}
	}
	if len(again) > 0 && c.breaker.Do(ctx, c.config.LimiterTimeout, func(ctx context.Context) error {
		return c.limiter.Line(line).Leave(ctx, tickets...)
	}) != nil {
		again = nil // these tasks keep the positions of the earlier ones
	}
	if len(refused) > 0 && c.sweep(ctx, line, begun) {
		again = append(again, refused...)
	}
	return c.ask(ctx, line, again)
}

// askMax is the most tickets of one call of ask to the limiter. askers is the most such calls of a client at a time:
// while one is answered, another is on its way.
const askMax, askers = 128, 2

// ask makes tasks join, unless the limiter did not answer a moment ago. The timeout begins when the caller
// has its turn, as a wait for other callers does not mean that the limiter is silent.
func (c *Client) ask(ctx context.Context, line string, es []*enqueueTask) (err error) {
	for part := range slices.Chunk(es, askMax) {
		requests := make([]throttle.Request, len(part))
		for i, e := range part {
			requests[i] = e.request
		}
		select {
		case c.asking <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		err = cmp.Or(err, c.breaker.Do(ctx, c.config.LimiterTimeout, func(ctx context.Context) error {
			decisions, err := c.limiter.Line(line).Join(ctx, requests)
			for i, decision := range decisions {
				part[i].decision = decision
			}
			return err
		}))
		<-c.asking
	}
	return err
}

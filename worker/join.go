package worker

import (
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

const (
	// rescoreFrom is the shortest wait for which a stored task gets another time, which asynq's
	// tools show.
	rescoreFrom = time.Minute

	// tidyTimeout bounds the calls after the join. They are made even if the caller's context has
	// ended.
	tidyTimeout = 5 * time.Second
)

// join makes stored tasks join a line, and makes the calls that their places ask for.
func (c *Client) join(ctx context.Context, line string, es []*enqueuing) {
	places, err := c.places(ctx, line, es)
	if _, member := asynqredis.MembersOf(ctx); member && err != nil {
		// Thousands of them pending would take slots in vain: they join when forward finds them.
		for _, e := range es {
			e.refuse(err)
		}
		return
	}
	known, _ := c.limiter.Lookup(line)
	failOpen := known.Fail == throttle.FailOpen // workers look at such a task every two minutes
	now := time.Now()
	nudges, arranged := map[string]bool{}, map[string][]*enqueuing{} // by queue
	for i, e := range es {
		e.to = asynqredis.Arranged{Waiting: asynqredis.Waiting{ID: e.call.ID, JoinKey: e.request.Key}}
		switch {
		case err != nil: // it joins when it is denied
		case places[i].Exempt:
			e.Start = ExpectedStart{Known: true, At: now}
		case places[i].Err != nil:
			e.refuse(places[i].Err)
			e.to.Gone = true
		default:
			place := places[i]
			e.Start = ExpectedStart{Known: true, Joined: true, At: now.Add(place.RetryIn), Binds: place.Binds}
			if place.Latest >= place.RetryIn {
				e.Start.Latest = now.Add(place.Latest)
			}
			if place.Nudge {
				nudges[e.call.Queue] = true
			}
			if place.RetryIn <= rescoreFrom || failOpen {
				continue
			}
			e.to.At = asynqredis.WholeSecond(now.Add(dispatch.Fallback(place.RetryIn, failOpen)))
			e.to.Message, e.to.Reason = e.call.Message, dispatch.Reason(e.request, place, now)
			e.Info.NextProcessAt = e.to.At
		}
		arranged[e.call.Queue] = append(arranged[e.call.Queue], e)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyTimeout)
	defer cancel()
	for queue := range nudges {
		_ = c.asynq.Nudge(ctx, queue, line) // else a worker asks some seconds later
	}
	for queue, es := range arranged {
		c.arrange(ctx, queue, es)
	}
}

// arrange does with tasks of one queue what their joins have said. If it fails workers find them as
// they were stored.
func (c *Client) arrange(ctx context.Context, queue string, es []*enqueuing) {
	tasks := make([]asynqredis.Arranged, len(es))
	for i, e := range es {
		tasks[i] = e.to
	}
	err := c.asynq.Arrange(ctx, queue, tasks)
	for _, e := range es {
		switch {
		case e.to.Gone && err != nil:
			e.Err = fmt.Errorf("%w; and it was enqueued all the same: %w", e.Err, err)
		case !e.to.Gone && e.to.At.IsZero() && err == nil:
			e.Info.State, e.Info.NextProcessAt = asynq.TaskStatePending, time.Now()
		}
	}
}

// places makes tasks join. A ticket that was in line before is of an earlier task with the same ID:
// it leaves, and the task joins again. So does a task that was refused for those that wait, if tickets
// of deleted tasks have left the line since.
//
// A ticket that joins after the context has ended is dropped when it is taken, as its task is not
// scheduled then.
func (c *Client) places(ctx context.Context, line string, es []*enqueuing) ([]throttle.Place, error) {
	begun := time.Now()
	requests := make([]throttle.Request, len(es))
	for i, e := range es {
		requests[i] = e.request
	}
	places, err := c.placesOf(ctx, line, requests)
	if err != nil {
		return nil, err
	}
	var before []throttle.Ticket
	for i, place := range places {
		if place.AlreadyQueued {
			before = append(before, requests[i].Ticket)
		}
	}
	left := before != nil && c.breaker.Do(ctx, c.timeout, func(ctx context.Context) error {
		return leaveAll(ctx, c.limiter.Line(line), before)
	}) == nil // else they stand where the others stood
	isRefused := func(p throttle.Place) bool {
		return errors.As(p.Err, new(*throttle.TooLateError)) || errors.As(p.Err, new(*throttle.BacklogError))
	}
	swept := slices.ContainsFunc(places, isRefused) && c.sweeper.sweep(ctx, line, c.asynq, begun)
	var at []int
	var again []throttle.Request
	for i, place := range places {
		if left && place.AlreadyQueued || swept && isRefused(place) {
			at, again = append(at, i), append(again, requests[i])
		}
	}
	placed, err := c.placesOf(ctx, line, again)
	for i, place := range placed {
		places[at[i]] = place
	}
	return places, err
}

// placesOf joins, unless the limiter did not answer a moment ago.
func (c *Client) placesOf(ctx context.Context, line string, requests []throttle.Request) (
	[]throttle.Place, error) {
	var places []throttle.Place
	for some := range slices.Chunk(requests, throttle.MaxTake) { // one call each
		err := c.breaker.Do(ctx, c.timeout, func(ctx context.Context) error {
			placed, err := c.limiter.Line(line).Join(ctx, some)
			places = append(places, placed...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return places, nil
}

// leaveAll takes any number of tickets out of a line.
func leaveAll(ctx context.Context, line *throttle.Line, tickets []throttle.Ticket) error {
	for some := range slices.Chunk(tickets, throttle.MaxTake) { // one call each
		if err := line.Leave(ctx, some...); err != nil {
			return err
		}
	}
	return nil
}

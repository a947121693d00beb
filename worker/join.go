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
	begun := time.Now()
	places, err := c.places(ctx, line, es)
	if err == nil {
		c.reconsider(ctx, line, es, places, begun)
	}
	if _, member := asynqredis.MembersOf(ctx); member && err != nil {
		// Thousands of them pending would take slots in vain. Who enqueues them waits for the limiter,
		// and these join when forward finds them.
		for _, e := range es {
			e.refuse(err)
		}
		return
	}
	known, _ := c.limiter.Lookup(line)
	failOpen := known.Fail == throttle.FailOpen // workers look at such a task every two minutes
	now := time.Now()
	rests := map[string]*rest{}
	for i, e := range es {
		after := rests[e.call.Queue]
		if after == nil {
			after = &rest{}
			rests[e.call.Queue] = after
		}
		if err != nil || places[i].Exempt { // if it has to join, it does when it is denied
			if err == nil {
				e.Start = ExpectedStart{Known: true, Least: now}
			}
			after.activate = append(after.activate, e)
			continue
		}
		place := places[i]
		if place.Err != nil {
			e.refuse(place.Err)
			after.unstore = append(after.unstore, e)
			continue
		}
		e.Start = ExpectedStart{
			Known: true, Joined: true, SlotsBind: place.SlotsBind,
			At: now.Add(place.StartsIn), Least: now.Add(place.StartsInLeast), Most: now.Add(place.StartsInMost),
		}
		if place.StartsIn > rescoreFrom && !failOpen {
			e.Info.NextProcessAt = asynqredis.WholeSecond(now.Add(dispatch.Fallback(place.StartsIn, 0, failOpen)))
			e.reason = dispatch.Reason(e.request, place, now)
			after.rescore = append(after.rescore, e)
		}
		after.nudge = after.nudge || place.Nudge
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyTimeout)
	defer cancel()
	for queue, after := range rests {
		after.do(ctx, c.asynq, queue, line)
	}
}

// reconsider has tasks join again that were refused for those that wait, if some of these were
// deleted.
func (c *Client) reconsider(ctx context.Context, line string, es []*enqueuing, places []throttle.Place, refusedAt time.Time) {
	var refused []*enqueuing
	var at []int
	for i, place := range places {
		if errors.As(place.Err, new(*throttle.TooLateError)) || errors.As(place.Err, new(*throttle.BacklogError)) {
			refused, at = append(refused, es[i]), append(at, i)
		}
	}
	if refused == nil || !c.sweeper.sweep(ctx, line, c.asynq, refusedAt) {
		return
	}
	again, err := c.places(ctx, line, refused)
	if err != nil {
		return
	}
	for i, place := range again {
		places[at[i]] = place
	}
}

// places makes tasks join, unless the limiter did not answer a moment ago.
func (c *Client) places(ctx context.Context, line string, es []*enqueuing) ([]throttle.Place, error) {
	places := make([]throttle.Place, 0, len(es))
	for batch := range slices.Chunk(es, throttle.MaxTake) { // one call each
		requests := make([]throttle.Request, len(batch))
		for i, e := range batch {
			requests[i] = e.request
		}
		var some []throttle.Place
		err := c.silence.Bound(ctx, c.timeout, func(ctx context.Context) (err error) {
			some, err = c.placesOf(ctx, line, requests)
			return err
		})
		if err != nil {
			return nil, err
		}
		places = append(places, some...)
	}
	return places, nil
}

// placesOf joins. A ticket that was in line before is of an earlier task with the same ID: it
// leaves first. One that joins after the context has ended is dropped when it is taken, as its task is
// not scheduled then.
func (c *Client) placesOf(ctx context.Context, line string, requests []throttle.Request) ([]throttle.Place, error) {
	places, err := c.limiter.Line(line).Join(ctx, requests)
	if err != nil {
		return nil, err
	}
	var before []int
	var leaving []throttle.Ticket
	var again []throttle.Request
	for i, place := range places {
		if place.AlreadyQueued {
			before, leaving, again = append(before, i), append(leaving, requests[i].Ticket), append(again, requests[i])
		}
	}
	if len(before) == 0 {
		return places, nil
	}
	if err := c.limiter.Line(line).Leave(ctx, leaving...); err != nil {
		return places, nil // then they stand where the others stood
	}
	placed, err := c.limiter.Line(line).Join(ctx, again)
	if err != nil {
		return nil, err
	}
	for i, place := range placed {
		places[before[i]] = place
	}
	return places, nil
}

// A rest is the calls to make for stored tasks of one queue after their joins.
type rest struct {
	activate, rescore, unstore []*enqueuing
	nudge                      bool
}

func (r *rest) do(ctx context.Context, client *asynqredis.Client, queue, line string) {
	if r.nudge {
		_ = client.Nudge(ctx, queue, line) // else a worker asks some seconds later
	}
	if len(r.unstore) > 0 {
		if err := client.Unstore(ctx, queue, waitings(r.unstore)); err != nil {
			for _, e := range r.unstore { // workers find it
				e.Err = fmt.Errorf("%w; and it was enqueued all the same: %w", e.Err, err)
			}
		}
	}
	if len(r.activate) > 0 {
		// If it fails workers find the tasks.
		if err := client.Activate(ctx, queue, waitings(r.activate)); err == nil {
			for _, e := range r.activate {
				e.Info.State, e.Info.NextProcessAt = asynq.TaskStatePending, time.Now()
			}
		}
	}
	if len(r.rescore) > 0 {
		scores := make([]asynqredis.Rescored, len(r.rescore))
		for i, e := range r.rescore {
			scores[i] = asynqredis.Rescored{Waiting: e.waiting(), At: e.Info.NextProcessAt, Message: e.call.Message, Reason: e.reason}
		}
		_ = client.Rescore(ctx, queue, scores) // else workers look at it sooner than they need to
	}
}

func waitings(es []*enqueuing) []asynqredis.Waiting {
	tasks := make([]asynqredis.Waiting, len(es))
	for i, e := range es {
		tasks[i] = e.waiting()
	}
	return tasks
}

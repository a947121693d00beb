package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

const (
	// storedFor is when workers look at a stored task whose join was lost.
	storedFor = 2 * time.Minute

	// rescoreFrom is the shortest wait for which a stored task gets another time, which asynq's
	// tools show.
	rescoreFrom = time.Minute

	// tidyTimeout bounds the calls after the join. They are made even if the caller's context has
	// ended.
	tidyTimeout = 5 * time.Second
)

// An enqueuing is one task on its way into a line.
type enqueuing struct {
	Enqueued
	task    *asynq.Task
	call    asynqredis.EnqueueCall
	reason  string // why it waits for long
	request throttle.Request
}

func (e *enqueuing) refuse(err error) {
	e.Info, e.Err = nil, fmt.Errorf("worker: task type %q: %w", e.task.Type(), err)
}

func (e *enqueuing) waiting() asynqredis.Waiting {
	return asynqredis.Waiting{ID: e.call.ID, JoinKey: e.request.Key}
}

// A task is enqueued in four steps. Asynq's client makes its message (message). The message is
// stored as scheduled (store). The task joins its line (join). At last the calls that its place
// asks for are made (rest). In this order no worker can take a task that is not there. Whatever is
// lost between two steps is found by workers two minutes later.

// enqueue enqueues tasks together, which are those of a batch from an index on.
func (c *Client) enqueue(ctx context.Context, tasks []*asynq.Task, from int, opts []asynq.Option) []Enqueued {
	all := make([]enqueuing, len(tasks))
	var joining []*enqueuing
	members, firing := asynqredis.MembersOf(ctx)
	for i, task := range tasks {
		e := &all[i]
		e.task = task
		own := opts
		if firing {
			own = append(slices.Clip(opts), asynq.Queue(members.Queue), asynq.TaskID(members.ID(members.From+from+i)))
		}
		if c.message(ctx, e, own) {
			joining = append(joining, e)
		}
	}
	c.commit(ctx, joining)
	results := make([]Enqueued, len(all))
	for i := range all {
		results[i] = all[i].Enqueued
	}
	return results
}

// commit does all steps but the first.
func (c *Client) commit(ctx context.Context, tasks []*enqueuing) {
	byQueue := map[string][]*enqueuing{}
	for _, e := range tasks {
		byQueue[e.call.Queue] = append(byQueue[e.call.Queue], e)
	}
	byLine := map[string][]*enqueuing{}
	for queue, es := range byQueue {
		for _, e := range c.store(ctx, queue, es) {
			line := c.limiter.LineOf(e.request.Policy, e.request.Tenant)
			byLine[line] = append(byLine[line], e)
		}
	}
	for _, line := range slices.Sorted(maps.Keys(byLine)) {
		c.join(ctx, line, byLine[line])
	}
}

// message makes the task's message by asynq's client, and reports whether the task joins a line. If
// it does not, it has its result: asynq has enqueued it, or it was refused.
func (c *Client) message(ctx context.Context, e *enqueuing, opts []asynq.Option) bool {
	var caught captured
	if e.task != nil {
		var err error
		if caught.matched, err = c.request(ctx, e, opts, &caught); err != nil {
			e.Err = err
			return false
		}
		if c.headers != nil {
			caught.headers = maps.Clone(c.headers(ctx, e.task))
		}
		if caught.class != "" {
			if caught.headers == nil {
				caught.headers = map[string]string{}
			}
			caught.headers[classHeader] = string(caught.class)
		}
		if caught.matched || len(caught.headers) > 0 {
			ctx = context.WithValue(ctx, capturedKey{}, &caught)
		}
		if _, member := asynqredis.MembersOf(ctx); member && !caught.join {
			e.refuse(errMember)
			return false
		}
	}
	info, err := c.client.EnqueueContext(ctx, e.task, opts...)
	var late *throttle.TooLateError
	switch {
	case errors.As(caught.err, &late):
		late.Decision = throttle.Decision{At: time.Now(), Policy: e.request.Policy, Tenant: e.request.Tenant}
		fallthrough
	case caught.err != nil:
		e.refuse(caught.err)
		return false
	case err != nil:
		e.Err = err
		return false
	}
	now := time.Now()
	e.Info = info
	if !caught.ok {
		e.Start = ExpectedStart{Known: true, Least: now}
		if info.State == asynq.TaskStateScheduled {
			e.Start.Least = info.NextProcessAt
		}
		return false
	}
	e.call = caught.call
	e.request.Key = e.call.Message.JoinKey()
	e.request.MaxHold = e.call.Message.TimeLimit(now)
	if deadline := e.call.Message.Deadline(); !deadline.IsZero() {
		if e.request.Deadline = deadline; !deadline.After(now) {
			e.refuse(missed(e.request.Policy, e.request.Tenant, deadline, now))
			return false
		}
	}
	return true
}

// request makes the task's request, and reports whether a policy matches it.
func (c *Client) request(ctx context.Context, e *enqueuing, opts []asynq.Option, caught *captured) (bool, error) {
	policy, ok := c.limiter.Match(e.task.Type())
	if !ok {
		return false, nil
	}
	request, err := c.identify.request(policy.Name, e.task)
	if err != nil {
		return false, err
	}
	e.request = request
	for _, o := range opts {
		switch o := o.(type) {
		case maxWait:
			e.request.MaxWait = o.value.(time.Duration)
		case backlog:
			e.request.Backlog = o.value.(int)
		case class:
			caught.class = o.value.(throttle.Class)
			e.request.Class = caught.class
		}
	}
	if err := c.limiter.Check(ctx, e.request); isInvalid(err) {
		return false, fmt.Errorf("worker: task type %q: %w", e.task.Type(), err)
	}
	caught.join = policy.Requeue != throttle.RequeueEarliestReset
	_, caught.member = asynqredis.MembersOf(ctx)
	caught.backlog, caught.maxWait = e.request.Backlog > 0, max(0, e.request.MaxWait)
	return true, nil
}

// store stores tasks of one queue, and returns those that were.
func (c *Client) store(ctx context.Context, queue string, es []*enqueuing) []*enqueuing {
	identity, err := c.asynq.Identity(ctx)
	at := asynqredis.WholeSecond(time.Now().Add(storedFor))
	calls := make([]asynqredis.EnqueueCall, len(es))
	for i, e := range es {
		calls[i] = e.call
	}
	var results []asynqredis.Result
	if err == nil {
		results, err = c.asynq.Store(ctx, queue, calls, at)
	}
	var stored []*enqueuing
	for i, e := range es {
		switch {
		case i >= len(results):
			e.Info, e.Err = nil, err
		case results[i] == asynqredis.IDTaken:
			e.Info, e.Err = nil, fmt.Errorf("%w", asynq.ErrTaskIDConflict)
		case results[i] == asynqredis.LockTaken:
			e.Info, e.Err = nil, fmt.Errorf("%w", asynq.ErrDuplicateTask)
		default:
			e.Info.State, e.Info.NextProcessAt = asynq.TaskStateScheduled, at
			e.request.Ticket = throttle.Ticket{Queue: identity + "/" + queue, ID: e.call.ID}
			stored = append(stored, e)
		}
	}
	return stored
}

// join makes stored tasks join a line, and makes the calls that their places ask for.
func (c *Client) join(ctx context.Context, line string, es []*enqueuing) {
	begun := time.Now()
	places, err := c.places(ctx, line, es)
	if err == nil {
		c.reconsider(ctx, line, es, places, begun)
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
		err := c.silence.bound(ctx, c.timeout, func(ctx context.Context) (err error) {
			some, err = c.placesInTime(ctx, line, requests)
			return err
		})
		if err != nil {
			return nil, err
		}
		places = append(places, some...)
	}
	return places, nil
}

// placesInTime waits for placesOf until the context ends. A call to a silent Redis takes longer. A
// ticket that joins after that is dropped when it is taken, as its task is not scheduled then.
func (c *Client) placesInTime(ctx context.Context, line string, requests []throttle.Request) ([]throttle.Place, error) {
	type result struct {
		places []throttle.Place
		err    error
	}
	done := make(chan result, 1)
	go func() {
		places, err := c.placesOf(ctx, line, requests)
		done <- result{places, err}
	}()
	select {
	case r := <-done:
		return r.places, r.err
	case <-ctx.Done():
	}
	select {
	case r := <-done: // just in time
		return r.places, r.err
	default:
		return nil, ctx.Err()
	}
}

// placesOf joins. A ticket that was in line before is of an earlier task with the same ID: it
// leaves first.
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

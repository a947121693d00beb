package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// A gatherer commits the tasks of many callers together (group commit). A task that comes while no commit is under way
// is committed alone, at once. Tasks that come during a commit are in the next commit. After a commit of
// such tasks, their callers have a moment to come with their next tasks (await).
type gatherer struct {
	commit func(ctx context.Context, tasks []*enqueueTask)

	mu      sync.Mutex
	busy    bool // a commit is under way
	waiting []*enqueueTask
}

const (
	// gatherFor is how long the next commit waits for one more caller of the last commit to come again.
	gatherFor = 50 * time.Microsecond

	// maxYields bounds that wait where time stands still, as under testing/synctest.
	maxYields = 1000

	// commitTimeout bounds a commit of many callers, whose contexts end at different times.
	commitTimeout = 5 * time.Second

	// storedFor is the time after which workers look at a stored task, whose join may have been lost.
	storedFor = 2 * time.Minute
)

// do commits a task, and waits for the commit. If the context ends before the commit begins, the task fails with the
// context's error.
func (g *gatherer) do(ctx context.Context, e *enqueueTask) {
	g.mu.Lock()
	if !g.busy {
		g.busy = true
		g.mu.Unlock()
		defer g.next() // also if a hook of the connection panics
		g.commit(ctx, []*enqueueTask{e})
		return
	}
	e.done = make(chan struct{})
	g.waiting = append(g.waiting, e)
	g.mu.Unlock()
	select {
	case <-e.done:
		return
	case <-ctx.Done():
	}
	g.mu.Lock()
	i := slices.Index(g.waiting, e)
	if i >= 0 {
		g.waiting = slices.Delete(g.waiting, i, i+1)
		e.Info, e.Err = nil, ctx.Err()
	}
	g.mu.Unlock()
	if i < 0 {
		<-e.done
	}
}

// next commits, in the background, the tasks that have come during a commit.
func (g *gatherer) next() {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := min(len(g.waiting), maxCommit)
	if n == 0 {
		g.busy = false
		return
	}
	tasks := g.waiting[:n:n]
	g.waiting = g.waiting[n:]
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), commitTimeout)
		g.commit(ctx, tasks)
		cancel()
		for _, e := range tasks {
			close(e.done)
		}
		g.await(n)
		g.next()
	}()
}

// await gives the callers of a commit the time to come again, as some do at once. Otherwise the next commit would have
// only the few tasks that came during this one: large and small commits would alternate.
func (g *gatherer) await(callers int) {
	count := func() int {
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.waiting)
	}
	came, last := count(), time.Now()
	for all, yields := callers+came, 0; came < all && yields < maxYields && time.Since(last) < gatherFor; yields++ {
		runtime.Gosched()
		if n := count(); n > came {
			came, last = n, time.Now()
		}
	}
}

// commit stores tasks, and makes them join their lines.
func (c *Client) commit(ctx context.Context, tasks []*enqueueTask) {
	type route struct{ queue, line string }
	byRoute := map[route][]*enqueueTask{}
	for _, e := range tasks {
		to := route{e.call.Queue, c.limiter.LineOf(e.request.Policy, e.request.Tenant)}
		byRoute[to] = append(byRoute[to], e)
	}
	for to, es := range byRoute {
		if stored := c.store(ctx, to.queue, to.line, es); len(stored) > 0 {
			c.join(ctx, to.queue, to.line, stored)
		}
	}
}

// store stores tasks of one queue and line as scheduled. It returns the tasks that it stored, and refuses the others.
func (c *Client) store(ctx context.Context, queue, line string, es []*enqueueTask) (stored []*enqueueTask) {
	database, err := c.tasks.Database(ctx)
	forwardAt := asynqredis.WholeSecond(time.Now().Add(storedFor))
	calls := make([]asynqredis.EnqueueCall, len(es))
	for i, e := range es {
		calls[i] = e.call
	}
	var results []int64
	if err == nil {
		results, err = c.tasks.Store(ctx, queue, line, calls, forwardAt)
	}
	for i, e := range es {
		switch {
		case i >= len(results):
			e.refuse(err)
		case results[i] == asynqredis.IDTaken:
			e.refuse(asynq.ErrTaskIDConflict)
		case results[i] == asynqredis.LockTaken:
			e.refuse(asynq.ErrDuplicateTask)
		default:
			e.Info.State, e.Info.NextProcessAt = asynq.TaskStateScheduled, forwardAt
			e.request.Ticket = throttle.Ticket{Queue: database + "/" + queue, ID: e.call.ID}
			stored = append(stored, e)
		}
	}
	return stored
}

// Forward looks at a task storedFor after it was stored. A join puts that off only if by more than putOffFrom.
const putOffFrom = time.Minute

// join makes stored tasks of one queue join a line, and moves or deletes them as the decisions demand. Tasks that
// are not in line become pending. If the move fails, workers find the tasks as they were stored.
func (c *Client) join(ctx context.Context, queue, line string, es []*enqueueTask) {
	err := c.joinLine(ctx, line, es)
	if _, member := asynqredis.MembersOf(ctx); member && err != nil {
		// The tasks stay scheduled until forward finds them: thousands of pending tasks would take slots in vain.
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
		decision, move := e.decision, asynqredis.Move{ID: e.call.ID, JoinKey: e.request.Key} // becomesPending, unless changed below
		// After an error, the ticket that was in line already may be an earlier task's, and may have left.
		isInLine := decision.Queued && (err == nil || !decision.AlreadyQueued)
		switch {
		case decision.Exempt:
			e.Start = ExpectedStart{At: now}
		case errors.As(decision.Err, new(*throttle.RequestError)), errors.As(decision.Err, new(*throttle.DeniedError)):
			e.refuse(decision.Err)
			move.To = asynqredis.Delete
		case isInLine:
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
		case becomesPending(moves[i]) && err == nil:
			e.Info.State, e.Info.NextProcessAt = asynq.TaskStatePending, time.Now()
		}
	}
}

// becomesPending reports whether a move makes its task pending, to join when a worker denies it.
func becomesPending(m asynqredis.Move) bool { return m.At.IsZero() && m.To == "" }

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
	if len(again) > 0 {
		err := c.breaker.Do(ctx, c.config.LimiterTimeout, func(ctx context.Context) error {
			return c.limiter.Line(line).Leave(ctx, tickets...)
		})
		if err != nil {
			again = nil // these tasks keep the positions of earlier tasks
		}
	}
	if len(refused) > 0 && c.sweep(ctx, line, begun) {
		again = append(again, refused...)
	}
	return c.ask(ctx, line, again)
}

// askMax is the most tickets of one call of ask to the limiter. askers is the most of such calls that a client makes at
// a time: while one is answered, another is on its way.
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

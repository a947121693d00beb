package worker

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A gatherer commits the tasks of many callers together (group commit). A task that comes while no commit is under way
// is committed alone, at once. Tasks that come during a commit are in the next one. After a commit of
// such tasks, their callers have a moment to come with their next ones (await).
type gatherer struct {
	commit func(ctx context.Context, tasks []*enqueueTask)

	mu      sync.Mutex
	busy    bool // a commit is under way
	waiting []*enqueueTask
}

const (
	// gatherFor is how long the next commit waits for one more caller of the last one to come again.
	gatherFor = 50 * time.Microsecond

	// maxYields bounds that wait where time stands still, as under testing/synctest.
	maxYields = 1000

	// commitTimeout bounds a commit of many callers, whose contexts end at different times.
	commitTimeout = 5 * time.Second

	// storedFor is the time after which workers look at a stored task, whose join may have been lost.
	storedFor = 2 * time.Minute
)

// do commits a task, and waits for that. If the context ends before the commit begins, the task fails with its error.
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

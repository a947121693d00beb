package worker

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"
)

// A gatherer commits the tasks of many callers together (group commit). A task that comes while no
// commit is under way is committed at once, alone. Tasks that come meanwhile are in the next
// commit, and with them those of callers that come again at once.
type gatherer struct {
	commit func(ctx context.Context, tasks []*enqueueTask)

	mu      sync.Mutex
	busy    bool // a commit is under way
	waiting []*enqueueTask
}

const (
	// gatherFor is how long a commit waits for callers of the one before, since the last of them came.
	gatherFor = 50 * time.Microsecond

	// maxYields bounds that wait where time stands still.
	maxYields = 1000
)

// do commits a task. If the context ends before the task's commit begins, the task fails by the
// context's error. A commit that has begun is waited for.
func (g *gatherer) do(ctx context.Context, e *enqueueTask) {
	g.mu.Lock()
	if !g.busy {
		g.busy = true
		g.mu.Unlock()
		defer g.next() // even if a hook of the connection panics
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

// next commits, in the background, the tasks that have come meanwhile.
func (g *gatherer) next() {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := min(len(g.waiting), maxBulk)
	if n == 0 {
		g.busy = false
		return
	}
	now := g.waiting[:n:n]
	g.waiting = g.waiting[n:]
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
		g.commit(ctx, now)
		cancel()
		for _, e := range now {
			close(e.done)
		}
		g.await(n)
		g.next()
	}()
}

// await gives callers of a commit the time to come again, which some do at once. Without them the next
// commit would have only those few that came last: large and small commits would alternate.
func (g *gatherer) await(callers int) {
	waits := func() int {
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.waiting)
	}
	came, since := waits(), time.Now()
	for all, yields := callers+came, 0; came < all && yields < maxYields && time.Since(since) < gatherFor; yields++ {
		runtime.Gosched()
		if now := waits(); now > came {
			came, since = now, time.Now()
		}
	}
}

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
	commit func(ctx context.Context, tasks []*enqueuing)

	mu      sync.Mutex
	busy    bool // a commit is under way
	waiting []*enqueuing
}

const (
	// gatherFor is how long a commit waits for callers of the one before, since the last of them came.
	gatherFor = 50 * time.Microsecond

	// maxYields bounds that wait where time stands still.
	maxYields = 1000
)

// do commits a task. If the context ends before the task's commit begins, the task fails by the
// context's error. A commit that has begun is waited for.
func (g *gatherer) do(ctx context.Context, e *enqueuing) {
	g.mu.Lock()
	if !g.busy {
		g.busy = true
		g.mu.Unlock()
		defer g.next() // even if a hook of the connection panics
		g.commit(ctx, []*enqueuing{e})
		return
	}
	e.done = make(chan struct{})
	g.waiting = append(g.waiting, e)
	g.mu.Unlock()
	select {
	case <-e.done:
	case <-ctx.Done():
		if !g.withdraw(e) {
			<-e.done
			return
		}
		e.Info, e.Err = nil, ctx.Err()
	}
}

// withdraw removes a task whose commit has not begun, and reports whether there was time.
func (g *gatherer) withdraw(e *enqueuing) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.waiting, e)
	if i >= 0 {
		g.waiting = slices.Delete(g.waiting, i, i+1)
	}
	return i >= 0
}

// waits returns how many tasks wait.
func (g *gatherer) waits() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.waiting)
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
		// Some of these callers come again at once. Without them the next commit would have only those
		// few that came last: large and small commits would alternate.
		came, since := g.waits(), time.Now()
		for all, yields := n+came, 0; came < all && yields < maxYields && time.Since(since) < gatherFor; yields++ {
			runtime.Gosched()
			if now := g.waits(); now > came {
				came, since = now, time.Now()
			}
		}
		g.next()
	}()
}

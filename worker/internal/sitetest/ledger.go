package sitetest

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// A Ledger notes what was decided about tasks, and which ran.
type Ledger struct {
	Mu        sync.Mutex // guards what follows
	Decisions []throttle.Decision
	grants    []TaskGrant
	ran       []string       // in the order of their starts
	wakes     map[string]int // decisions about a task
}

// A TaskGrant is one grant to a task.
type TaskGrant struct {
	ID, Policy, Tenant string
	At                 time.Time
}

// Note is a worker.Config.OnDecision.
func (l *Ledger) Note(ctx context.Context, _ *asynq.Task, d throttle.Decision) {
	id, _ := asynq.GetTaskID(ctx)
	l.Mu.Lock()
	defer l.Mu.Unlock()
	if l.wakes == nil {
		l.wakes = map[string]int{}
	}
	l.wakes[id]++
	l.Decisions = append(l.Decisions, d)
	if d.Granted {
		l.grants = append(l.grants, TaskGrant{id, d.Policy, d.Tenant, d.At})
	}
}

// Ok is a handler that notes the tasks it ran, and succeeds.
func (l *Ledger) Ok(ctx context.Context, _ *asynq.Task) error {
	id, _ := asynq.GetTaskID(ctx)
	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.ran = append(l.ran, id)
	return nil
}

// Starts returns the IDs of the tasks that Ok ran, in the order of their starts.
func (l *Ledger) Starts() []string {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	return slices.Clone(l.ran)
}

// Runs returns the same, sorted.
func (l *Ledger) Runs() []string { return slices.Sorted(slices.Values(l.Starts())) }

// Done returns how many tasks have run, once or more.
func (l *Ledger) Done() int { return len(slices.Compact(l.Runs())) }

// WantOnceEach fails unless n tasks ran, each once.
func (l *Ledger) WantOnceEach(t testing.TB, n int) {
	t.Helper()
	runs := l.Runs()
	expect.That(t, len(runs) == n && l.Done() == n, len(runs), "tasks ran, want", n, ", each once:", runs)
}

// Denials returns the denials so far, in order.
func (l *Ledger) Denials() []throttle.Decision {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	return slices.DeleteFunc(slices.Clone(l.Decisions), func(d throttle.Decision) bool { return d.Granted })
}

// Grants returns the grants so far, in the order of their time.
func (l *Ledger) Grants() []TaskGrant {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	slices.SortStableFunc(l.grants, func(a, b TaskGrant) int { return a.At.Compare(b.At) })
	return slices.Clone(l.grants)
}

// GrantsOf returns the grants of one tenant.
func (l *Ledger) GrantsOf(tenant string) []TaskGrant {
	return slices.DeleteFunc(l.Grants(), func(g TaskGrant) bool { return g.Tenant != tenant })
}

// Granted returns how many grants there were.
func (l *Ledger) Granted() int {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	return len(l.grants)
}

// Order returns the IDs of the tasks granted so far, in the order of their grants.
func (l *Ledger) Order() (ids []string) {
	for _, g := range l.Grants() {
		ids = append(ids, g.ID)
	}
	return ids
}

// Wakes returns how often each task came to the middleware.
func (l *Ledger) Wakes() []int {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	var wakes []int
	for _, n := range l.wakes {
		wakes = append(wakes, n)
	}
	return wakes
}

// WakesOf returns how often a task came there.
func (l *Ledger) WakesOf(id string) int {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	return l.wakes[id]
}

// Excess is the most that was granted in any window of that period, over the limit.
func Excess(grants []TaskGrant, limit int, period time.Duration) int {
	excess, first := 0, 0
	for i := range grants {
		for grants[i].At.Sub(grants[first].At) >= period {
			first++
		}
		excess = max(excess, i-first+1-limit)
	}
	return excess
}

// WantNeverOver fails if more was granted in any window of that period than the limit.
func WantNeverOver(t testing.TB, grants []TaskGrant, limit int, period time.Duration) {
	t.Helper()
	over := Excess(grants, limit, period)
	expect.That(t, over <= 0, over, "were granted above the limit of", limit, "in", period)
}

package main

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/internal/apitest"
)

// A start is a handler that began.
type start struct {
	at      time.Time // by the clock of this machine, which is that of Redis
	granted time.Time // by the clock of Redis; zero of plain asynq
	id      string    // of the task
	server  int
	tenant  string // empty of plain asynq
}

// A startLog is the log of the handlers that servers have started. It is kept outside of Redis.
type startLog struct {
	done chan struct{} // closed when as many tasks have started as are expected

	mu       sync.Mutex
	denials  int
	expected int
	started  []start
}

func newStartLog(tasks int) *startLog {
	return &startLog{done: make(chan struct{}), expected: tasks, started: make([]start, 0, tasks)}
}

func (j *startLog) start(s start) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.started = append(j.started, s)
	if len(j.started) == j.expected {
		close(j.done)
	}
}

func (j *startLog) deny() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.denials++
}

// starts returns all starts so far, in the order of time.
func (j *startLog) starts() []start {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.SortedFunc(slices.Values(j.started), func(a, b start) int { return a.at.Compare(b.at) })
}

// wakes returns the pick-ups for each task that ran.
func (j *startLog) wakes() float64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return float64(len(j.started)+j.denials) / float64(len(j.started))
}

// await waits until all tasks have started, or until none has for half a minute.
func (j *startLog) await(ctx context.Context, say func(string, ...any)) {
	const stalled = 30 * time.Second
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	previous, changed := -1, time.Now()
	for {
		select {
		case <-j.done:
			return
		case <-ctx.Done():
			check(ctx.Err())
		case now := <-tick.C:
			j.mu.Lock()
			started := len(j.started)
			j.mu.Unlock()
			say("%d of %d tasks have started", started, j.expected)
			if started != previous {
				previous, changed = started, now
			} else if now.Sub(changed) > stalled {
				fail("no task has started for %v: %d of %d have", stalled, started, j.expected)
			}
		}
	}
}

// perSecond returns the rate from the first start to the last.
func perSecond(starts []start) float64 {
	return float64(len(starts)-1) / starts[len(starts)-1].at.Sub(starts[0].at).Seconds()
}

func byGrant(starts []start) []start {
	return slices.SortedStableFunc(slices.Values(starts), func(a, b start) int {
		return cmp.Or(a.granted.Compare(b.granted), a.at.Compare(b.at))
	})
}

// A rate is a shared sliding window that a backlog waits for.
type rate struct {
	limit  int
	period time.Duration
}

// utilization returns the least time that the grants need over the time that they took.
func (r rate) utilization(starts []start) float64 {
	granted := byGrant(starts)
	least := float64(len(granted)-r.limit) / float64(r.limit) * r.period.Seconds()
	return least / granted[len(granted)-1].granted.Sub(granted[0].granted).Seconds()
}

// excess returns the most units granted in any period, over the limit.
func (r rate) excess(starts []start) int {
	granted := make([]time.Time, len(starts))
	for i, s := range starts {
		granted[i] = s.granted
	}
	return apitest.MostIn(granted, r.period) - r.limit
}

// fits returns how long each task took to its grant and to its start, from the moment at which it
// fits: grant number k fits one period after number k - limit. All tasks must wait from the
// beginning.
func (r rate) fits(starts []start) (toTaken, toRunning []time.Duration) {
	granted := byGrant(starts)
	for k := r.limit; k < len(granted); k++ {
		fits := granted[k-r.limit].granted.Add(r.period)
		toTaken = append(toTaken, granted[k].granted.Sub(fits))
		toRunning = append(toRunning, granted[k].at.Sub(fits))
	}
	return toTaken, toRunning
}

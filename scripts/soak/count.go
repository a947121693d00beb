package main

import (
	"maps"
	"slices"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/apitest"
	"github.com/sluice-go/sluice/throttle"
)

// Evidence has all facts about one stack at the end.
type evidence struct {
	reenqueued map[string]bool  // tasks whose enqueue was repeated after a lost reply
	charged    map[string]int64 // units in the ledger, by tenant
	counts     map[string]int   // of faults and disruptions
	denials    int
	ends       map[string]endState          // what asynq has, by task
	enqueued   map[string]bool              // tasks
	excused    func(task string) []*attempt // attempts that a fault ended
	takes      []take                       // tickets that workers took shortly before they were killed
	disrupted  []disruptionEnd              // when recoveries began to count
	jobs       []job
	locks      []string       // tasks whose locks are held
	lost       map[string]int // replies that were not delivered, by kind of call
	pickUps    int
	tickets    []string // tasks that are still in line
	runs       []run    // by their begin
	ticketless []string // tasks that waited without a ticket
	stuck      []string // workers that did not end
	throttled  bool
	windows    []throttle.Window
}

// An endState is how asynq keeps a task.
type endState struct {
	state   asynq.TaskState
	retried int
}

// A tally is the result of counting evidence. Its lists have a task's ID once for each case.
type tally struct {
	archived, archivedUnexcused     []string // before their own failures had used up their retries
	burnt, burntUnexcused           []string // retries, more than the task's own failures
	duplicated, duplicatedUnexcused []string // runs, more than its own failures explain
	failed                          []string // archived by their own failures, as their jobs demand
	locked                          []string // ended well, and their locks are held
	lost                            []string // gone, and never ended well
	succeeded                       []string
	unfinished                      []string // still waiting or running

	excess          int64           // the most of any window; below 0: never full
	leaked          int64           // units charged without a run
	leakedUnexcused int64           // of these, units not explained by workers that were killed before their handlers began
	uncharged       []string        // runs that the limiter did not count
	late            []time.Duration // grants after the last expected start, of tasks that no fault hit
	recoveries      []time.Duration
	waited          int // runs of tasks that had to wait
}

// count compares what was enqueued with what became of it.
func count(e evidence) tally {
	var t tally
	runs := map[string][]run{}
	for _, r := range e.runs {
		runs[r.Task] = append(runs[r.Task], r)
	}
	for _, j := range e.jobs {
		if e.enqueued[j.ID] {
			t.add(e, j, runs[j.ID])
		}
	}
	t.locked = slices.DeleteFunc(slices.Clone(e.locks), func(id string) bool {
		return !slices.Contains(t.succeeded, id)
	})
	t.recoveries = recoveries(e.disrupted, e.runs)
	if e.throttled {
		t.grants(e, runs)
	}
	return t
}

// add counts one task.
func (t *tally) add(e evidence, j job, runs []run) {
	excused := len(e.excused(j.ID))
	end, found := e.ends[j.ID]
	failures, succeeded, retried, earlierFailures := 0, false, 0, 0
	for _, r := range runs {
		retried, earlierFailures = r.Retried, failures
		if !r.Ended.IsZero() && r.Failed {
			failures++
		}
		succeeded = succeeded || !r.Ended.IsZero() && !r.Failed
	}

	burnt := retried - earlierFailures
	if found {
		burnt = end.retried - failures
	}
	switch {
	case found && end.state == asynq.TaskStateArchived:
		burnt++ // the last failure, or what stood for it, is not in asynq's count
		if failures > j.MaxRetry {
			t.failed = append(t.failed, j.ID)
			break
		}
		t.archived = append(t.archived, j.ID)
		if failures+excused <= j.MaxRetry {
			t.archivedUnexcused = append(t.archivedUnexcused, j.ID)
		}
	case found && end.state == asynq.TaskStateCompleted, !found && succeeded && !j.Retained:
		t.succeeded = append(t.succeeded, j.ID)
	case found:
		t.unfinished = append(t.unfinished, j.ID)
	default:
		t.lost = append(t.lost, j.ID)
	}
	for i := range burnt {
		t.burnt = append(t.burnt, j.ID)
		if i >= excused {
			t.burntUnexcused = append(t.burntUnexcused, j.ID)
		}
	}
	for i := range len(runs) - j.runs() {
		t.duplicated = append(t.duplicated, j.ID)
		if i >= excused && !e.reenqueued[j.ID] {
			t.duplicatedUnexcused = append(t.duplicatedUnexcused, j.ID)
		}
	}
}

// grants counts what the limiter granted.
func (t *tally) grants(e evidence, runs map[string][]run) {
	granted := map[string]int64{}
	for _, r := range e.runs {
		if r.Granted.IsZero() {
			t.uncharged = append(t.uncharged, r.Task)
			continue
		}
		granted[r.Tenant]++
		if !r.Expected.IsZero() {
			t.waited++
			if len(e.excused(r.Task)) == 0 {
				t.late = append(t.late, r.Granted.Sub(r.Expected))
			}
		}
	}
	for tenant, n := range e.charged {
		t.leaked += n - granted[tenant]
	}
	t.leakedUnexcused = t.leaked
	for _, j := range e.jobs {
		for _, a := range e.excused(j.ID) {
			ran := func(r run) bool { return r.Holder == a.Holder && !r.Begun.Before(a.At) }
			if !a.Lost && !a.Taken && !slices.ContainsFunc(runs[j.ID], ran) {
				t.leakedUnexcused--
			}
		}
	}
	for _, taken := range e.takes {
		if !slices.ContainsFunc(runs[taken.Task], func(r run) bool { return r.Granted.Equal(taken.Granted) }) {
			t.leakedUnexcused--
		}
	}
	t.leakedUnexcused = max(t.leakedUnexcused, min(t.leaked, 0))
	t.excess = excess(e.windows, e.runs)
}

// excess returns the most units by which any sliding window was exceeded, in (t-period, t] for any
// t, by the times of the grants.
func excess(windows []throttle.Window, runs []run) int64 {
	worst := int64(-throttle.MaxLimit)
	for _, w := range windows {
		grants := map[string][]time.Time{}
		for _, r := range runs {
			whom := r.Tenant
			if w.Shared {
				whom = ""
			}
			if !r.Granted.IsZero() {
				grants[whom] = append(grants[whom], r.Granted)
			}
		}
		for times := range maps.Values(grants) {
			worst = max(worst, int64(apitest.MostIn(times, w.Period))-w.Limit)
		}
	}
	return worst
}

// recoveries returns the time from each disruption to the next run. Runs are sorted by their begin.
func recoveries(disrupted []disruptionEnd, runs []run) (took []time.Duration) {
	for _, d := range disrupted {
		i, _ := slices.BinarySearchFunc(runs, d.at, func(r run, at time.Time) int { return r.Begun.Compare(at) })
		if i < len(runs) {
			took = append(took, runs[i].Begun.Sub(d.at))
		}
	}
	return took
}

// quantile returns the value below which that part of the values lies, and 0 without values.
func quantile(values []time.Duration, part float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[int(part*float64(len(sorted)-1))]
}

package main

import (
	"maps"
	"slices"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// Evidence is all that is known of one stack at the end.
type evidence struct {
	again     map[string]bool           // tasks whose enqueue was repeated after a lost reply
	charged   map[string]int64          // units in the ledger, by tenant
	counts    map[string]int            // of faults and blows
	denials   int                       //
	ends      map[string]ending         // what asynq has, by task
	enqueued  map[string]bool           // tasks
	excused   func(task string) []*hold // attempts that a fault ended
	takes     []take                    // what workers had got when they were killed
	hits      []hit                     // blows
	jobs      []job                     //
	locks     []string                  // tasks whose locks are held
	lost      map[string]int            // replies that nobody got, by kind of call
	pickUps   int                       //
	tickets   []string                  // tasks that are still in line
	runs      []run                     // by their begin
	strays    []string                  // tasks that waited outside of the line
	stuck     []string                  // workers that did not end
	throttled bool                      //
	windows   []throttle.Window         //
}

// An ending is how asynq keeps a task.
type ending struct {
	state   asynq.TaskState
	retried int
}

// A tally is what evidence comes to. Of tasks, its lists hold IDs, one for each case.
type tally struct {
	archived, archivedUnexcused     []string // before their own failures had used up their retries
	burnt, burntUnexcused           []string // retries, beyond the task's own failures
	duplicated, duplicatedUnexcused []string // runs, beyond those that its own failures ask for
	failed                          []string // archived by their own failures, as was meant
	locked                          []string // ended well, and their locks are held
	lost                            []string // gone, and never ended well
	succeeded                       []string
	unfinished                      []string // still waiting or running

	excess          int64           // of any window, at its worst; below 0: never full
	leaked          int64           // units charged without a run
	leakedUnexcused int64           // of them, beyond those of handlers that were killed before they could begin
	uncharged       []string        // runs that the limiter did not count
	late            []time.Duration // grants after the expected start told last, of tasks that no fault held up
	recoveries      []time.Duration
	waited          int // runs of tasks that were told to wait
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
	t.locked = slices.DeleteFunc(slices.Clone(e.locks), func(id string) bool { return !slices.Contains(t.succeeded, id) })
	t.recoveries = recoveries(e.hits, e.runs)
	if e.throttled {
		t.grants(e, runs)
	}
	return t
}

// add counts one task.
func (t *tally) add(e evidence, j job, runs []run) {
	excused := len(e.excused(j.ID))
	end, there := e.ends[j.ID]
	failures, succeeded, retried, before := 0, false, 0, 0
	for _, r := range runs {
		retried, before = r.Retried, failures
		if !r.Ended.IsZero() && r.Failed {
			failures++
		}
		succeeded = succeeded || !r.Ended.IsZero() && !r.Failed
	}

	burnt := retried - before
	if there {
		burnt = end.retried - failures
	}
	switch {
	case there && end.state == asynq.TaskStateArchived:
		burnt++ // the last failure, or what stood for it, is not in asynq's count
		if failures > j.MaxRetry {
			t.failed = append(t.failed, j.ID)
			break
		}
		t.archived = append(t.archived, j.ID)
		if failures+excused <= j.MaxRetry {
			t.archivedUnexcused = append(t.archivedUnexcused, j.ID)
		}
	case there && end.state == asynq.TaskStateCompleted, !there && succeeded && !j.Retained:
		t.succeeded = append(t.succeeded, j.ID)
	case there:
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
		if i >= excused && !e.again[j.ID] {
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
		for _, h := range e.excused(j.ID) {
			if !h.Lost && !h.Taken && !slices.ContainsFunc(runs[j.ID], func(r run) bool { return r.Holder == h.Holder && !r.Begun.Before(h.At) }) {
				t.leakedUnexcused--
			}
		}
	}
	for _, one := range e.takes {
		if !slices.ContainsFunc(runs[one.Task], func(r run) bool { return r.Granted.Equal(one.Granted) }) {
			t.leakedUnexcused--
		}
	}
	t.leakedUnexcused = max(t.leakedUnexcused, min(t.leaked, 0))
	t.excess = excess(e.windows, e.runs)
}

// excess is by how many units any sliding window was exceeded at its worst, by the times of the
// grants: in (t-period, t] for any t.
func excess(windows []throttle.Window, runs []run) int64 {
	worst := int64(-throttle.MaxLimit)
	for _, w := range windows {
		by := map[string][]time.Time{}
		for _, r := range runs {
			whom := r.Tenant
			if w.Scope == throttle.Shared {
				whom = ""
			}
			if !r.Granted.IsZero() {
				by[whom] = append(by[whom], r.Granted)
			}
		}
		for times := range maps.Values(by) {
			slices.SortFunc(times, time.Time.Compare)
			from := 0
			for i, t := range times {
				for t.Sub(times[from]) >= w.Period {
					from++
				}
				worst = max(worst, int64(i-from+1)-w.Limit)
			}
		}
	}
	return worst
}

// recoveries are the times from each blow to the next run. Runs are sorted by their begin.
func recoveries(hits []hit, runs []run) (took []time.Duration) {
	for _, h := range hits {
		i, _ := slices.BinarySearchFunc(runs, h.at, func(r run, at time.Time) int { return r.Begun.Compare(at) })
		if i < len(runs) {
			took = append(took, runs[i].Begun.Sub(h.at))
		}
	}
	return took
}

// quantile is the value below which that part of the values lies; 0 of none.
func quantile(values []time.Duration, part float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[int(part*float64(len(sorted)-1))]
}

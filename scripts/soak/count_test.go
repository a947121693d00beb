package main

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func after(d time.Duration) time.Time { return noon.Add(d) }

func TestUnitsAboveALimitAreCounted(t *testing.T) {
	t.Parallel()
	perTenant := throttle.Window{Name: "own", Limit: 2, Period: time.Second}
	all := throttle.Window{Name: "all", Limit: 3, Period: time.Second, Shared: true}
	for _, row := range []struct {
		name    string
		windows []throttle.Window
		grants  string // tenant by tenant, each with its time in ms
		want    int64
	}{
		{"just full", []throttle.Window{perTenant}, "a0 a999", 0},
		{"one more, just after the period", []throttle.Window{perTenant}, "a0 a999 a1000", 0},
		{"one more, just within it", []throttle.Window{perTenant}, "a1 a999 a1000", 1},
		{"in any order", []throttle.Window{perTenant}, "a1000 a1 a999", 1},
		{"tenants count apart", []throttle.Window{perTenant}, "a1 b2 a3 b4", 0},
		{"but not in a shared window", []throttle.Window{perTenant, all}, "a1 b2 a3 b4", 1},
		{"never full", []throttle.Window{all}, "a1 b2000", -2},
		{"the worst counts", []throttle.Window{perTenant}, "a0 a1 a2 a3 b0 b1 b2", 2},
		{"runs without a grant are not counted", []throttle.Window{perTenant}, "a0 a1 -2", 0},
	} {
		var runs []run
		for _, grant := range grantsIn(row.grants) {
			r := run{Tenant: grant.tenant}
			if r.Tenant != "-" {
				r.Granted = after(grant.at)
			}
			runs = append(runs, r)
		}
		expect.Equal(t, excess(row.windows, runs), row.want, row.name)
	}
}

type grant struct {
	tenant string
	at     time.Duration
}

// grantsIn reads grants such as "a0 b1000".
func grantsIn(text string) (grants []grant) {
	for _, word := range strings.Fields(text) {
		ms, _ := strconv.Atoi(word[1:])
		grants = append(grants, grant{word[:1], time.Duration(ms) * time.Millisecond})
	}
	return grants
}

// Runs are written by a letter each: f failed, s succeeded, k was killed in it. A digit before: asynq's retries then.
func runsOf(text string) (runs []run) {
	retried := 0
	for i, c := range text {
		if c >= '0' && c <= '9' {
			retried = int(c - '0')
			continue
		}
		at := after(time.Duration(i) * time.Second)
		r := run{Task: "task", Tenant: "acme", Holder: "worker", Retried: retried, Begun: at, Granted: at}
		if c != 'k' {
			r.Ended, r.Failed = r.Begun.Add(time.Millisecond), c == 'f'
		}
		runs = append(runs, r)
	}
	return runs
}

func TestWhatBecameOfTasksIsCounted(t *testing.T) {
	t.Parallel()
	const gone = asynq.TaskState(0)
	for _, row := range []struct {
		name                 string
		maxRetry, fails      int
		retained             bool
		runs                 string
		state                asynq.TaskState
		retried              int
		excused              int
		reenqueued           bool
		want                 string // the list that the task is in
		burnt, burntAlone    int
		doubled, doubleAlone int
		earlyAlone           bool
	}{
		{name: "well", runs: "0s", want: "succeeded"},
		{name: "well, and kept", retained: true, runs: "0s", state: asynq.TaskStateCompleted, want: "succeeded"},
		{name: "well, but not kept", retained: true, runs: "0s", want: "lost"},
		{name: "after failures", maxRetry: 2, fails: 2, runs: "0f1f2s", want: "succeeded"},
		{name: "never ran", want: "lost"},
		{name: "never succeeded", maxRetry: 2, fails: 1, runs: "0f", want: "lost"},
		{name: "waits", state: asynq.TaskStateScheduled, want: "unfinished"},
		{name: "waits after a failure", maxRetry: 2, fails: 1, runs: "0f", state: asynq.TaskStateRetry, retried: 1, want: "unfinished"},
		{name: "archived as was meant", maxRetry: 1, fails: 2, runs: "0f1f", state: asynq.TaskStateArchived, retried: 1, want: "failed"},
		{name: "archived without a run", state: asynq.TaskStateArchived, want: "archived", burnt: 1, burntAlone: 1, earlyAlone: true},
		{name: "archived without a run, its worker killed", state: asynq.TaskStateArchived, excused: 1, want: "archived", burnt: 1},
		{name: "archived a failure too early", maxRetry: 2, fails: 3, runs: "0f2f", state: asynq.TaskStateArchived,
			retried: 2, want: "archived", burnt: 1, burntAlone: 1, earlyAlone: true},
		{name: "the same, its worker killed", maxRetry: 2, fails: 3, runs: "0f2f", state: asynq.TaskStateArchived,
			retried: 2, excused: 1, want: "archived", burnt: 1},
		{name: "a retry burnt by nobody", maxRetry: 2, runs: "1s", want: "succeeded", burnt: 1, burntAlone: 1},
		{name: "a retry burnt by a kill", maxRetry: 2, runs: "0k1s", excused: 1, want: "succeeded", burnt: 1, doubled: 1},
		{name: "two, one of them by a kill", maxRetry: 3, runs: "0k2s", excused: 1, want: "succeeded", burnt: 2, burntAlone: 1, doubled: 1},
		{name: "ran twice", runs: "0s0s", want: "succeeded", doubled: 1, doubleAlone: 1},
		{name: "enqueued twice", runs: "0s0s", reenqueued: true, want: "succeeded", doubled: 1},
		{name: "killed after a failure, which asynq then counts by itself", maxRetry: 2, fails: 1, runs: "0f1s",
			excused: 1, want: "succeeded"},
		{name: "kept, with a retry burnt", maxRetry: 2, retained: true, runs: "1s", state: asynq.TaskStateCompleted,
			retried: 1, want: "succeeded", burnt: 1, burntAlone: 1},
	} {
		j := job{ID: "task", Tenant: "acme", MaxRetry: row.maxRetry, Fails: row.fails, Retained: row.retained}
		e := evidence{
			reenqueued: map[string]bool{"task": row.reenqueued}, ends: map[string]endState{}, enqueued: map[string]bool{"task": true},
			excused: func(string) []*attempt { return make([]*attempt, row.excused) },
			jobs:    []job{j, {ID: "never enqueued"}}, runs: runsOf(row.runs),
		}
		if row.state != gone {
			e.ends["task"] = endState{row.state, row.retried}
		}
		got := count(e)
		in := ""
		for name, list := range map[string][]string{
			"archived": got.archived, "failed": got.failed, "lost": got.lost, "succeeded": got.succeeded, "unfinished": got.unfinished,
		} {
			for range list {
				in += name
			}
		}
		expect.Equal(t, in, row.want, row.name)
		numbers := []int{
			len(got.burnt), len(got.burntUnexcused),
			len(got.duplicated), len(got.duplicatedUnexcused), len(got.archivedUnexcused),
		}
		want := []int{row.burnt, row.burntAlone, row.doubled, row.doubleAlone, 0}
		if row.earlyAlone {
			want[4] = 1
		}
		expect.That(t, slices.Equal(numbers, want),
			row.name, "burnt, without excuse, duplicated, without excuse, early without excuse", numbers, "want", want)
	}
}

func TestAttemptsAreChargedOnce(t *testing.T) {
	t.Parallel()
	killed := func(at time.Duration) *attempt { return &attempt{At: after(at), Holder: "worker"} }
	for _, row := range []struct {
		name          string
		charged       int64
		runs          string
		excused       []*attempt
		leaked, alone int64
	}{
		{"every run", 2, "0f1s", nil, 0, 0},
		{"a unit too many", 3, "0f1s", nil, 1, 1},
		{"a unit too many, for a run that was killed before it began", 2, "0s", []*attempt{killed(time.Hour)}, 1, 0},
		{"two, for one such", 3, "0s", []*attempt{killed(time.Hour)}, 2, 1},
		{"a killed run that had begun explains none", 3, "0k1s", []*attempt{killed(0)}, 1, 1},
		{"a killed pick-up that was not charged", 1, "0s", []*attempt{killed(time.Hour)}, 0, 0},
		{"a lost pick-up explains none", 2, "0s", []*attempt{{At: after(time.Hour), Lost: true}}, 1, 1},
		{"a unit too few", 1, "0f1s", []*attempt{killed(time.Hour)}, -1, -1},
	} {
		e := evidence{
			charged: map[string]int64{"acme": row.charged}, enqueued: map[string]bool{"task": true},
			excused: func(string) []*attempt { return row.excused },
			jobs:    []job{{ID: "task", Tenant: "acme", MaxRetry: 1}}, runs: runsOf(row.runs), throttled: true,
		}
		if got := count(e); got.leaked != row.leaked || got.leakedUnexcused != row.alone {
			t.Errorf("%s: %d, %d without a fault to blame, want %d, %d", row.name, got.leaked, got.leakedUnexcused, row.leaked, row.alone)
		}
	}
	uncounted := evidence{excused: func(string) []*attempt { return nil }, runs: []run{{Task: "task", Tenant: "acme"}}, throttled: true}
	got := count(uncounted)
	expect.That(t, slices.Equal(got.uncharged, []string{"task"}), "runs that were let through uncounted", got.uncharged)
}

func TestLocksThatAreLeftAreFound(t *testing.T) {
	t.Parallel()
	e := evidence{
		ends: map[string]endState{"waits": {asynq.TaskStateScheduled, 0}}, enqueued: map[string]bool{"well": true, "waits": true},
		excused: func(string) []*attempt { return nil }, jobs: []job{{ID: "well", Unique: true}, {ID: "waits", Unique: true}},
		locks: []string{"well", "waits"}, runs: []run{{Task: "well", Begun: noon, Ended: after(time.Second)}},
	}
	got := count(e)
	expect.That(t, slices.Equal(got.locked, []string{"well"}), "locks left of", got.locked)
}

func TestRecoveriesAreTimed(t *testing.T) {
	t.Parallel()
	runs := []run{{Begun: after(time.Second)}, {Begun: after(3 * time.Second)}}
	disrupted := []disruptionEnd{{at: noon}, {at: after(time.Second)}, {at: after(2500 * time.Millisecond)}, {at: after(time.Hour)}}
	got := recoveries(disrupted, runs)
	want := []time.Duration{time.Second, 0, 500 * time.Millisecond}
	expect.That(t, slices.Equal(got, want), got, "want", want)
	p50, most := quantile(got, 0.5), quantile(got, 1)
	expect.That(t, p50 == 500*time.Millisecond && most == time.Second, "p50", p50, "most", most)
	expect.That(t, quantile(nil, 0.5) == 0, "of none")
}

func TestFiguresAreHeldAgainstTheirBars(t *testing.T) {
	t.Parallel()
	one, two := number(1), number(2)
	for _, row := range []struct {
		figure figure
		missed bool
	}{
		{newFigure("", "", one, two, noBar), false},
		{newFigure("", "", number(0), two, zero), false},
		{newFigure("", "", one, two, zero), true},
		{newFigure("", "", number(-3), nil, notAbove), false},
		{newFigure("", "", one, nil, notAbove), true},
		{newFigure("", "", one, one, difference), false},
		{newFigure("", "", two, one, difference), true},
		{newFigure("", "", number(0), number(0), unjudged), true},
	} {
		expect.Equal(t, row.figure.Missed, row.missed, "bar", row.figure.Bar, *row.figure.Sluice, row.figure.Control, "missed")
	}
}

// A job fails as often as it is to fail, whatever asynq counts, and a run that was killed is none.
func TestAJobFailsAsOftenAsItIsTo(t *testing.T) {
	t.Parallel()
	jobs := []job{{ID: "twice", MaxRetry: 3, Fails: 2, Work: time.Millisecond}, {ID: "always", MaxRetry: 1, Fails: 2, Panics: true}}
	calls := &Calls{newJournal(jobs)}
	for _, row := range []struct {
		task         string
		killed, fail bool
	}{
		{"twice", true, true}, {"twice", false, true}, {"twice", false, true}, {"twice", true, false}, {"twice", false, false},
		{"always", false, true}, {"always", false, true}, {"always", false, true},
	} {
		var v Verdict
		expect.Must(t, calls.Start(Started{Task: row.task}, &v))
		expect.That(t, v.Fail == row.fail && v.Panic == (row.task == "always"), row, v)
		if !row.killed {
			expect.Must(t, calls.End(Ended{v.Run, v.Fail}, &None{}))
		}
	}
	expect.Equal(t, calls.journal.begun(), 8, "runs")
}

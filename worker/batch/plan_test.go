package batch_test

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// costly are Tasks: of each tenant one for each cost.
func costly(costs ...int64) batch.Tasks {
	return func(_ context.Context, _ batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
		return func(yield func(*asynq.Task, error) bool) {
			for _, cost := range costs {
				id := worker.Identity{Cost: map[string]int64{throttle.Requests: cost}, Tenant: tenant}
				if !yield(worker.NewTask(id, "call", nil), nil) {
					return
				}
			}
		}
	}
}

// slow yields a task each millisecond.
func slow(tasks batch.Tasks) batch.Tasks {
	return func(ctx context.Context, f batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
		return func(yield func(*asynq.Task, error) bool) {
			for task, err := range tasks(ctx, f, tenant) {
				if time.Sleep(time.Millisecond); !yield(task, err) {
					return
				}
			}
		}
	}
}

// of is a tenant's part of a plan or a status.
func partOf[T any](t *testing.T, all []T, i int) T {
	t.Helper()
	expect.Require(t, i < len(all), all)
	return all[i]
}

// follows is how late an expected finish may be, as docs/reference/guarantees.md promises.
const follows = 2 * time.Second

func within(a, b time.Time) bool { return a.Sub(b).Abs() <= follows }

// A firing that would be late is refused, or begins with a warning.
func TestAFiringThatWouldBeLateIsWarnedOfOrRefused(t *testing.T) {
	sitetest.EachBubble(t, sitetest.Values(batch.LateWarn, batch.LateRefuse), func(t *testing.T, late batch.Late) {
		s := fake(t, throttle.Window{Name: "own", Limit: 1, Period: 4 * time.Second})
		tasks, tenants := calls(22), batch.List("acme", "zeta")
		b := batch.Batch{Name: "b", Ended: "report", FinishBy: "00:01", Late: late, Tasks: tasks, Tenants: tenants}
		p := s.scheduler(b)
		plan := expect.Got(p.Plan(t.Context(), "b", batch.PlanOptions{At: time.Now()}))(s)
		finish := time.Date(2000, 1, 1, 0, 1, 0, 0, time.UTC)
		expect.That(t, plan.FinishBy == finish && plan.Overdue == 12 && plan.Begins == (late == batch.LateWarn) &&
			partOf(t, plan.Tenants, 1).Overdue == plan.Overdue/2, plan)
		s.serve(succeed)
		f := s.fire(p, "b")
		// Between two looks: one that comes when tasks start, at 4 s, may count these twice.
		time.Sleep(5*time.Second + 500*time.Millisecond)
		status := s.status(p, f)
		// It began within a second. If that was not at once, one more of each tenant is late.
		isLate := func(n int) bool { return n == plan.Overdue || n == plan.Overdue+2 }
		expect.That(t, status.FinishBy == plan.FinishBy && isLate(status.Overdue), status)
		if late == batch.LateWarn {
			expect.That(t, status.State == batch.StateRunning && status.Total == 44, status)
			expect.That(t, strings.Contains(p.log.String(), "too late"), p.log.String())
			return
		}
		expect.That(t, status.State == batch.StateRefused && status.HasEnded() && status.Total == 0 &&
			strings.Contains(status.Reason, "nothing is enqueued"), status)
		ran := expect.Got(s.Inspector.ListCompletedTasks("default"))(t)
		var report batch.Status
		expect.Must(t, json.Unmarshal(ran[0].Payload, &report))
		expect.That(t, len(ran) == 1 && report.Overdue == status.Overdue && !report.Planned.IsZero(), report, status)
	})
}

// The expected finish moves within two seconds when a limit changes, is unknown during a pause, and
// goes by the rate of the last minute where handler slots bind.
func TestTheExpectedFinishIsKeptTrue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pace := throttle.Window{Name: "pace", Limit: 2, Period: time.Second}
		s := fake(t, pace)
		b := batch.Batch{Name: "b", Tasks: calls(200), Tenants: batch.List("acme")}
		s.serve(func(ctx context.Context, _ *asynq.Task) error { return work(ctx, time.Second) })
		p := s.scheduler(b)
		f := s.fire(p, "b")
		begun := time.Now()
		status := func(after time.Duration) batch.Status {
			time.Sleep(time.Until(begun.Add(after)))
			return s.status(p, f)
		}
		limit := func(n int64) {
			pace.Limit = n
			for _, l := range []*throttle.Limiter{p.limiter, s.Limiter} {
				policies := l.Policies()
				policies[0].Windows = []throttle.Window{pace}
				expect.Must(s, l.SetPolicies(policies))
			}
		}
		st := status(10 * time.Second)
		expect.That(t, within(st.Finish, begun.Add(101*time.Second)) && st.Binds == "pace", "at two a second:", st)
		limit(1)
		st = status(12 * time.Second)
		expect.That(t, within(st.Finish, begun.Add(191*time.Second)) && (st.Behind()-91*time.Second).Abs() <= follows,
			"at one a second:", st)
		expect.Must(s, p.Pause(t.Context(), f))
		st = status(15 * time.Second)
		expect.That(t, st.Finish.IsZero() && !st.Planned.IsZero(), "paused:", st)
		limit(1000) // there are eight slots, of one second
		expect.Must(s, p.Resume(t.Context(), f))
		// Tasks that were picked up and wait for a slot are not counted: up to as many as there are slots.
		st = status(27 * time.Second)
		expect.That(t, st.Binds == throttle.BySlots && begun.Add(40*time.Second).Sub(st.Finish).Abs() <= follows+time.Second, "eight slots", st)
		last := status(43 * time.Second)
		expect.That(t, last.State == batch.StateDone && last.Behind() <= (43-100)*time.Second, last)
		s.WantOnceEach(s, 200)
	})
}

func work(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// What does not fit into the hours of a day is expected on the next.
func TestPlansKnowHours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := fake(t, throttle.Window{Name: "own", Limit: 1, Period: 10 * time.Minute})
		hours := batch.Hours{From: "02:00", To: "04:00"}
		p := s.idle(
			batch.Batch{Name: "days", Hours: hours, FinishBy: "06:00", Tasks: calls(30), Tenants: batch.List("acme")},
			batch.Batch{Name: "free", Tasks: calls(30), Tenants: batch.List("acme")},
		)
		defer p.Close()
		for _, want := range []struct {
			name     string
			expected time.Time
			late     int
		}{
			{"days", time.Date(2000, 1, 3, 2, 50, 0, 0, time.UTC), 18},
			{"free", time.Date(2000, 1, 1, 5, 50, 0, 0, time.UTC), 0},
		} {
			plan, err := p.Plan(t.Context(), want.name, batch.PlanOptions{At: time.Date(2000, 1, 1, 1, 0, 0, 0, time.UTC)})
			expect.That(t, err == nil && within(plan.Finish, want.expected) && plan.Overdue == want.late,
				want.name, plan, err)
		}
	})
}

// Tasks are counted by what they ask for.
func TestPlansCountCosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := fake(t, throttle.Window{Name: "own", Algorithm: throttle.AlgorithmGCRA, Limit: 100, Burst: 100, Period: 100 * time.Second})
		var many []int64
		for i := range int64(90) {
			many = append(many, 1+i)
		}
		p := s.idle(
			batch.Batch{Name: "two", Tasks: costly(slices.Repeat([]int64{30, 1}, 10)...), Tenants: batch.List("acme")},
			batch.Batch{Name: "many", Tasks: costly(many...), Tenants: batch.List("acme")},
			batch.Batch{Name: "never", Tasks: costly(1, 101, 1), Tenants: batch.List("acme", "")},
			batch.Batch{Name: "none", Tasks: calls(0), Tenants: batch.List()},
		)
		defer p.Close()
		for _, want := range []struct {
			name       string
			total      int
			after, off time.Duration
		}{
			// One unit a second, but 100 at once.
			{"two", 20, (10*30 + 10*1 - 100) * time.Second, follows},
			// Each is planned as the mean: 91/2.
			{"many", 90, (90*91/2 - 100) * time.Second, 91 * time.Second / 2},
			{"never", 6, 0, 0},
			{"none", 0, 0, 0},
		} {
			plan, err := p.Plan(t.Context(), want.name, batch.PlanOptions{At: time.Now()})
			expect.That(t, err == nil && plan.Total == want.total && plan.Rejected == map[string]int{"never": 4}[want.name] && plan.Tenants != nil &&
				strings.Contains(plan.String(), "); otherwise, the last is expected") == (want.name == "never"), want.name, plan, err)
			expect.That(t, want.after <= 0 || (time.Until(plan.Finish)-want.after).Abs() <= want.off,
				want.name, ": expected after", time.Until(plan.Finish), ", want", want.after)
		}
		expect.That(t, expect.ErrOf(p.Plan(t.Context(), "other", batch.PlanOptions{})) != nil, "a batch that nobody knows is planned")
	})
}

// The limit that holds tasks up is named, with the smallest change by which none is overdue: not the one that the
// last task waits for.
func TestThePlanNamesTheLimitThatHoldsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pace := throttle.Window{
			Name: "pace", Algorithm: throttle.AlgorithmGCRA, Burst: 1, Limit: 20, Period: time.Minute, Shared: true,
		}
		daily := throttle.Window{
			Name: "quota", Algorithm: throttle.AlgorithmCalendar, Limit: 100, Resets: "@daily", Shared: true,
		}
		s := fake(t, pace, daily)
		p := s.idle(batch.Batch{Name: "b", FinishBy: "4h", Late: batch.LateRefuse, Tasks: calls(60), Tenants: batch.List("acme", "zeta")})
		defer p.Close()
		plan := expect.Got(p.Plan(t.Context(), "b", batch.PlanOptions{}))(s)
		expect.That(t, plan.Overdue == 20 && !plan.Begins && plan.Binds == "quota", plan)
		expect.Equal(t, fmt.Sprint(plan.Changes), "[{quota 100 120}]")
		plan = expect.Got(p.Plan(t.Context(), "b", batch.PlanOptions{Limits: map[string]int64{"quota": 120}}))(s)
		expect.That(t, plan.Overdue == 0 && plan.Begins && plan.Changes == nil, "with a quota of 120:", plan)
		for _, limits := range []map[string]int64{{"quotas": 1}, {"quota": 0}} {
			err := expect.ErrOf(p.Plan(t.Context(), "b", batch.PlanOptions{Limits: limits}))
			expect.Err(t, err, new(*throttle.RequestError), limits)
		}
	})
}

// A plan finds the least limits by which no task is overdue: of those that must rise, none if no limit helps.
// The own limit of a tenant changes nothing for others.
func TestAPlanFindsTheLimitsThatFit(t *testing.T) {
	held := func(name string, limit int64) throttle.Window {
		return throttle.Window{Name: name, Algorithm: throttle.AlgorithmConcurrency, Limit: limit, Shared: true}
	}
	for want, c := range map[string]struct {
		windows []throttle.Window
		tasks   int
		end     string
	}{
		"[{first 9 10}]":               {[]throttle.Window{held("first", 9), held("second", 100)}, 15, "31s"},
		"[{first 9 10} {second 4 10}]": {[]throttle.Window{held("first", 9), held("second", 4)}, 15, "31s"},
		"[]":                           {[]throttle.Window{held("first", 9)}, 15, "5s"},
		"[{own 2 3}]":                  {[]throttle.Window{{Name: "own", Limit: 2, Period: 10 * time.Second}}, 6, "28s"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := fake(t, c.windows...)
			policies := s.Limiter.Policies()
			if c.windows[0].Name == "own" {
				policies[0].Tenants = map[string]throttle.Tenant{"big": {Windows: map[string]throttle.Override{"own": {Limit: 100}}}}
			}
			expect.Must(s, s.Limiter.SetPolicies(policies))
			p := s.idle(batch.Batch{Name: "b", FinishBy: c.end, Duration: 10 * time.Second, Tasks: calls(c.tasks), Tenants: batch.List("a", "big")})
			defer p.Close()
			plan, err := p.Plan(t.Context(), "b", batch.PlanOptions{})
			expect.That(t, err == nil && fmt.Sprint(plan.Changes) == want, want, plan, err)
		})
	}
}

// What is not known is not counted, and the plan says so. A firing that may be late begins with a warning.
func TestPlansSayWhatTheyDoNotKnow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := fake(t, throttle.Window{Name: "at-once", Algorithm: throttle.AlgorithmConcurrency, Limit: 2, Shared: true})
		b := batch.Batch{FinishBy: "20s", Late: batch.LateRefuse, Tasks: calls(20), Tenants: batch.List("acme")}
		variant := func(name string, change func(*batch.Batch)) batch.Batch {
			b := b
			b.Name = name
			change(&b)
			return b
		}
		p := s.scheduler(
			variant("unknown", func(*batch.Batch) {}),
			variant("given", func(b *batch.Batch) { b.Duration = 3 * time.Second }),
			variant("timeout", func(b *batch.Batch) { b.Options = []asynq.Option{asynq.Timeout(4 * time.Second)} }),
		)
		ends := func(name string, unknown string, from batch.Source, after time.Duration, overdue int) {
			t.Helper()
			plan := expect.Got(p.Plan(t.Context(), name, batch.PlanOptions{}))(s)
			if fmt.Sprint(plan.Unknown) != unknown || plan.Duration.From != from || plan.Overdue != overdue ||
				plan.Begins != (overdue == 0) || !within(plan.Finish, time.Now().Add(after)) {
				t.Errorf("%s: %+v", name, plan)
			}
		}
		ends("unknown", "[at-once handler slots]", "", 0, 0)
		ends("given", "[handler slots]", batch.SourceGiven, 30*time.Second, 8)
		ends("timeout", "[handler slots]", batch.SourceTimeout, 40*time.Second, 10)
		s.serve(func(ctx context.Context, _ *asynq.Task) error { return work(ctx, time.Second) })
		f := s.fire(p, "unknown")
		s.wait(p, f, "it is done", func(st batch.Status) bool { return st.State == batch.StateDone })
		expect.That(t, strings.Contains(p.log.String(), "not all that binds them is known"), "the log says:", p.log.String())
		ends("unknown", "[]", batch.SourceMeasured, 10*time.Second, 0)
	})
}

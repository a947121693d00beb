package batch_test

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

// A forecast is a batch whose finish is predicted, and then awaited.
type forecast struct {
	name      string
	windows   []throttle.Window
	overrides map[string]throttle.Tenant
	tenants   int
	each      int           // tasks of the first tenant
	more      int           // of each other one than of the tenant before it
	costs     int64         // of the tasks: 1 to this one, in turn
	live      int           // live tasks of three tenants wait before it
	queue     string        // of these; the default is the batch's. The server serves both
	slots     int           // of handlers; the default is 100
	takes     time.Duration // each task
	hours     batch.Hours
	most      float64 // percent by which the prediction may be wrong
}

func shared(name string, algorithm throttle.Algorithm, limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: name, Algorithm: algorithm, Limit: limit, Period: period, Shared: true}
}

var (
	perTenant = throttle.Window{Name: "own", Limit: 4, Period: 4 * time.Second}
	quota     = throttle.Window{
		Name: "quota", Algorithm: throttle.AlgorithmCalendar, Limit: 60, Resets: "* * * * *", Shared: true,
	}
	held = throttle.Window{Name: "at-once", Algorithm: throttle.AlgorithmConcurrency, Limit: 3, Shared: true}
	all  = shared("all", "", 20, 4*time.Second)
)

var forecasts = []forecast{
	{name: "sliding", windows: []throttle.Window{{Name: "own", Limit: 20, Period: 4 * time.Second}}, tenants: 1, each: 70},
	{name: "fixed", windows: []throttle.Window{shared("all", throttle.AlgorithmFixed, 25, 10*time.Second)}, tenants: 12, each: 5},
	{name: "three windows", windows: []throttle.Window{perTenant, shared("all", throttle.AlgorithmGCRA, 5, time.Second), quota},
		tenants: 14, each: 5},
	{name: "over the reset of a quota", windows: []throttle.Window{{Name: "own", Limit: 4, Period: 6 * time.Second}, quota},
		tenants: 3, each: 10, more: 20},
	{name: "costs 1 to 7, two windows", windows: []throttle.Window{{Name: "own", Limit: 12, Period: 4 * time.Second},
		shared("all", "", 40, 4*time.Second)}, tenants: 10, each: 5, costs: 7},
	{name: "weights 1 to 4", windows: []throttle.Window{all}, tenants: 10, each: 6,
		overrides: map[string]throttle.Tenant{"tenant-1": {Weight: 2}, "tenant-2": {Weight: 3}, "tenant-3": {Weight: 4}}},
	{name: "behind live tasks, two windows", windows: []throttle.Window{perTenant, shared("all", throttle.AlgorithmFixed, 20, 4*time.Second)},
		tenants: 10, each: 5, live: 45},
	{name: "an override: 1 of 4", windows: []throttle.Window{perTenant, all}, tenants: 10, each: 6,
		overrides: map[string]throttle.Tenant{"tenant-3": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}},
	{name: "hours", windows: []throttle.Window{shared("all", "", 10, 10*time.Second)}, tenants: 10, each: 7,
		hours: batch.Hours{From: "00:03", To: "00:02"}, most: 1}, // the scheduler looks each second
	{name: "4 slots, 1.5 s", windows: []throttle.Window{perTenant}, tenants: 45, each: 1, slots: 4, takes: 1500 * time.Millisecond, most: 5},
	{name: "4 slots, two queues", windows: []throttle.Window{perTenant}, tenants: 70, each: 1, live: 30,
		queue: "live", slots: 4, takes: 1500 * time.Millisecond, most: 5},
	{name: "concurrency 3, 1.5 s, and a quota", windows: []throttle.Window{held, quota}, tenants: 20, each: 4, slots: 8,
		takes: 1500 * time.Millisecond, most: 5},
}

// size is how many tasks a tenant has.
func (f forecast) size(tenant string) int {
	number, _ := strconv.Atoi(strings.TrimPrefix(tenant, "tenant-"))
	return f.each + number*f.more
}

// tasks are those of the batch: each costs one more than the one before, up to the forecast's costs.
func (f forecast) tasks() batch.Tasks {
	return func(_ context.Context, _ batch.Firing, tenant string) iter.Seq2[*asynq.Task, error] {
		return func(yield func(*asynq.Task, error) bool) {
			for i := range f.size(tenant) {
				id := worker.Identity{Tenant: tenant, Cost: map[string]int64{throttle.Requests: 1 + int64(i)%max(1, f.costs)}}
				if !yield(worker.NewTask(id, "call", nil), nil) {
					return
				}
			}
		}
	}
}

// run returns when the last task of the batch was predicted to end, and when it ended, both since
// the batch was fired. Where tenants have different numbers of tasks, it wants the same of each of them.
func (f forecast) run(t *testing.T) (predicted, real time.Duration, plan batch.Plan) {
	s := fake(t, f.windows...)
	policies := s.Limiter.Policies()
	policies[0].Tenants = f.overrides
	expect.Must(s, s.Limiter.SetPolicies(policies))
	s.slots, s.queue = cmp.Or(f.slots, 100), f.queue
	tick := time.Date(2000, 1, 1, 0, 1, 0, 0, time.UTC)
	time.Sleep(time.Until(tick.Add(-2 * time.Second)))
	b := batch.Batch{Name: "b", Tasks: f.tasks(), Tenants: batch.List(tenants(f.tenants)...), Hours: f.hours, Duration: f.takes, Schedule: "1 0 * * *"}
	p := s.scheduler(b)
	client := s.Client(s.Limiter)
	last, ended := time.Time{}, map[string]time.Time{}
	s.serve(func(ctx context.Context, task *asynq.Task) error {
		time.Sleep(f.takes)
		if id, _ := worker.IdentityOf(task); id.Class == throttle.ClassBatch {
			s.Mu.Lock()
			last = time.Now()
			ended[id.Tenant] = last
			s.Mu.Unlock()
		}
		return nil
	})
	time.Sleep(time.Second)
	for i := range f.live {
		task := worker.NewTask(worker.Identity{Tenant: fmt.Sprint("live-", i%3)}, "call", nil)
		expect.Must(s, expect.ErrOf(client.Enqueue(task, asynq.Queue(cmp.Or(f.queue, "default")))))
	}
	plan = expect.Got(p.Plan(t.Context(), "b", batch.PlanOptions{}))(s)
	expect.That(t, plan.Tick == tick && len(plan.Tenants) == f.tenants && plan.Overdue == 0, plan)
	tasks := len(s.Redis.Keys(t.Context(), "asynq:*:t:*").Val())
	expect.That(t, tasks <= f.live, tasks, "tasks: the plan enqueued some")
	time.Sleep(time.Until(tick.Add(time.Second)))
	firing := batch.Firing{Batch: "b", Tick: tick}
	wrong := 0 // looks in a row: a task that was taken as the hours ended goes back to the line soon
	for status := (batch.Status{}); status.State != batch.StateDone; time.Sleep(2 * time.Second) {
		status = s.status(p, firing)
		if wrong++; status.Waiting == 0 || within(status.Finish, status.Planned) {
			wrong = 0
		}
		expect.That(t, wrong <= 1, "after", time.Since(tick), status)
		expect.Require(t, time.Since(tick) <= time.Hour, status)
		if f.more == 0 {
			continue
		}
		parts := expect.Got(p.Tenants(t.Context(), firing))(s)
		for _, part := range parts {
			expect.That(t, part.Total == part.Done+part.Waiting+part.Running && part.Total == f.size(part.Tenant) &&
				(part.Waiting == 0 || within(part.Finish, part.Planned)), "after", time.Since(tick), part)
		}
	}
	for i, part := range plan.Tenants {
		name := fmt.Sprint("tenant-", i)
		expect.That(t, part.Tenant == name && part.Total == f.size(name) &&
			(f.more == 0 || within(part.Finish, ended[name])), part, "ended", ended[name])
	}
	return plan.Finish.Sub(tick), last.Sub(tick), plan
}

// The finish of batches of all kinds is predicted, and comes. See both: go test -run TestForecasts -v ./worker/batch
func TestForecasts(t *testing.T) {
	rows := make([]string, len(forecasts))
	t.Run("all", func(t *testing.T) {
		for i, f := range forecasts {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					predicted, real, plan := f.run(t)
					off := 100 * (predicted - real).Seconds() / real.Seconds()
					seconds := func(d time.Duration) float64 { return d.Round(100 * time.Millisecond).Seconds() }
					row := fmt.Sprintf("| %s | %d x %d | %s | %.1f s |", f.name, f.tenants, f.each, plan.Binds, seconds(predicted))
					rows[i] = fmt.Sprintf("%s %.1f s | %.1f %% |", row, seconds(real), math.Abs(off))
					expect.That(t, math.Abs(off) <= max(f.most, 0.1), "predicted", predicted, "and it was", real)
				})
			})
		}
	})
	t.Log("\n| batch | tenants x tasks | binds | predicted | real | off by |\n|---|---|---|---|---|---|\n" + strings.Join(rows, "\n"))
}

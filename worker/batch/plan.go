package batch

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

// A Plan forecasts when the tasks of a firing end, before any is enqueued.
type Plan struct {
	Batch string    `json:"batch"`
	Queue string    `json:"queue"`
	Tick  time.Time `json:"tick"`

	Total    int      `json:"total"`    // tasks that the batch has
	Rejected int      `json:"rejected"` // tasks that cannot be enqueued, by their requests and the limits in force
	Duration Duration `json:"duration"`

	// Finish is when the last task is expected to end, or to start if the Duration is unknown. It is zero if no task
	// can be enqueued, one never fits, or the plan is longer than 400 days. Binds names what the last task waits
	// for the longest: a window, or throttle.BySlots; empty for nothing.
	Finish time.Time `json:"finish,omitzero"`
	Binds  string    `json:"binds,omitempty"`

	// Unknown are windows, and throttle.BySlots, that the plan cannot count: the firing may take longer.
	Unknown []string `json:"unknown,omitempty"`

	FinishBy time.Time `json:"finish_by,omitzero"` // Batch.FinishBy
	Overdue  int       `json:"overdue"`            // tasks that are expected to end after FinishBy
	Begins   bool      `json:"begins"`             // false if Batch.Late would refuse the firing

	Changes []Change     `json:"changes,omitempty"` // of limits, by which no task would be overdue; empty if none were found
	Tenants []TenantPlan `json:"tenants"`
}

// A Change is the least by which a limit must rise.
type Change struct {
	Window string `json:"window"` // or throttle.BySlots
	From   int64  `json:"from"`   // the limit in force or of PlanOptions.Limits, by which tasks are overdue
	To     int64  `json:"to"`     // the limit by which none is
}

// A TenantPlan is the part of a Plan for one tenant.
type TenantPlan struct {
	Tenant  string    `json:"tenant"`
	Total   int       `json:"total"`
	Overdue int       `json:"overdue"`
	Finish  time.Time `json:"finish,omitzero"`
	Reason  string    `json:"reason,omitempty"` // why the last rejected task cannot be enqueued
}

// PlanOptions are the options of Scheduler.Plan.
type PlanOptions struct {
	// At is when the batch fires. The default is the next tick, or now for a batch without a schedule.
	At time.Time

	// Limits replace limits in force: see inspect.PlanOptions.
	Limits map[string]int64
}

// Plan forecasts when the tasks of a batch would end if it fired, from the line as it is now. It enqueues
// nothing. It calls Tenants and Tasks, and goes through all tasks once.
func (s *Scheduler) Plan(ctx context.Context, batch string, o PlanOptions) (Plan, error) {
	b, err := s.batch(batch)
	if err != nil {
		return Plan{}, err
	}
	at := o.At
	if at.IsZero() {
		if at = time.Now(); b.schedule != nil {
			at = b.next(at)
		}
	}
	f := Firing{b.Name, at.UTC().Truncate(time.Second)}
	p, err := s.plan(ctx, b, f, at, o.Limits)
	if err != nil {
		return Plan{}, fmt.Errorf("batch: %w", err)
	}
	plan := Plan{
		Batch: b.Name, Queue: b.Queue, Tick: f.Tick, FinishBy: b.deadline(f.Tick), Duration: p.Duration,
		Finish: expected(p.all.Finish), Binds: p.all.Binds, Unknown: p.all.Unknown, Tenants: []TenantPlan{},
		Overdue: p.all.Late, Begins: !p.refused, Changes: p.all.changes, Total: p.total, Rejected: p.total - p.all.Count,
	}
	for _, t := range p.Tenants {
		plan.Tenants = append(plan.Tenants, t.TenantPlan)
	}
	return plan, nil
}

// A firingPlan has a firing's tasks, and their ends as expected when the firing begins. Redis keeps its exported fields.
type firingPlan struct {
	Tenants  []tenantTasks `json:"tenants"`
	Duration Duration      `json:"duration"`

	all     forecast
	total   int // tasks
	refused bool
}

// tenantTasks describes the tasks of one tenant, in their order.
type tenantTasks struct {
	TenantPlan
	Start int         `json:"start"`           // index of the first task, if Tasks yields what it did when counted
	Kinds []*taskKind `json:"kinds,omitempty"` // of the tasks that can be enqueued
	Order string      `json:"order,omitempty"` // a letter for the kind of each task; empty for one kind, or too many
}

// A taskKind counts tasks that ask for the same.
type taskKind struct {
	Attributes map[string]string `json:"attributes,omitempty"`
	Class      throttle.Class    `json:"class,omitempty"`
	Count      int               `json:"count"`
	Policy     string            `json:"policy"`
	Tenant     string            `json:"tenant"` // of the task
	Units      map[string]int64  `json:"units"`  // of all together
}

// plan counts the tasks of a firing, and forecasts them if it begins at `from`.
func (s *Scheduler) plan(
	ctx context.Context, b *compiled, f Firing, from time.Time, limits map[string]int64,
) (*firingPlan, error) {
	p, seen := &firingPlan{}, map[string]bool{}
	for name, err := range b.Tenants(ctx, f) {
		if err != nil {
			return nil, err
		}
		if seen[name] || !utf8.ValidString(name) { // else tasks would run twice, or JSON would store another name
			return nil, &Error{b.Name, "tenants", name, "must be UTF-8, and not come twice"}
		}
		seen[name] = true
		tenant, err := s.count(ctx, b, f, name)
		if err != nil {
			return nil, err
		}
		p.Tenants = append(p.Tenants, tenant)
	}
	var err error
	if p.Duration, err = s.duration(ctx, b); err != nil {
		return nil, err
	}
	allLeft := func(i int) (left, joined int) { return p.Tenants[i].Total, 0 }
	if p.all, err = s.forecast(ctx, b, p, b.planOptions(f.Tick, from, limits), true, allLeft); err != nil {
		return nil, err
	}
	p.refused = p.all.Late > 0 && b.Late == LateRefuse
	for i := range p.Tenants {
		t, estimate := &p.Tenants[i], p.all.tenants[i]
		t.Start, t.Finish, t.Overdue = p.total, expected(estimate), estimate.Late
		p.total += t.Total
	}
	return p, nil
}

// letters name the kinds of a tenant's tasks in their order. With more kinds than letters, tasks that differ only in
// their cost are one kind, which counts with their mean cost.
const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

func (s *Scheduler) count(ctx context.Context, b *compiled, f Firing, tenant string) (tenantTasks, error) {
	t := tenantTasks{TenantPlan: TenantPlan{Tenant: tenant}}
	indexes, byCost := map[string]int{}, true
	var order []byte
	add := func(k *taskKind) {
		key := fmt.Sprintf("%q %q %q %q", k.Policy, k.Tenant, k.Class, k.Attributes)
		if byCost {
			key += fmt.Sprint(k.Units)
		}
		i, alike := indexes[key]
		if !alike {
			i, indexes[key] = len(t.Kinds), len(t.Kinds)
			t.Kinds = append(t.Kinds, &taskKind{
				Attributes: k.Attributes, Class: k.Class, Policy: k.Policy, Tenant: k.Tenant, Units: map[string]int64{},
			})
		}
		t.Kinds[i].Count += k.Count
		for unit, n := range k.Units {
			t.Kinds[i].Units[unit] += n
		}
		order = append(order, letters[i%len(letters)])
	}
	for task, err := range b.Tasks(ctx, f, tenant) {
		if err != nil {
			return t, err
		}
		t.Total++
		r, err := s.client.RequestOf(task)
		if err != nil {
			t.Reason = err.Error() // it counts as rejected when its turn to be enqueued comes
			continue
		}
		units := map[string]int64{throttle.Requests: 1}
		maps.Copy(units, r.Cost)
		add(&taskKind{
			Attributes: r.Attributes, Class: cmp.Or(r.Class, throttle.ClassBatch), Count: 1, Policy: r.Policy, Tenant: r.Tenant,
			Units: units,
		})
		if byCost && len(t.Kinds) > len(letters) {
			kinds := t.Kinds
			indexes, byCost, t.Kinds = map[string]int{}, false, nil
			for _, k := range kinds {
				add(k)
			}
		}
	}
	if 1 < len(t.Kinds) && len(t.Kinds) <= len(letters) && byCost {
		t.Order = string(order)
	}
	return t, ctx.Err()
}

// left returns the demands of the last n tasks that can be enqueued. Of these n the first `joined` are in line.
func (t tenantTasks) left(n, joined int, duration time.Duration) (demands []inspect.Demand) {
	total, requests := 0, make([]throttle.Request, len(t.Kinds))
	for i, k := range t.Kinds {
		total, requests[i] = total+k.Count, k.request()
	}
	n = min(n, total)
	add := func(kind, count int) {
		inLine := min(joined, count)
		joined -= inLine
		demands = append(demands, inspect.Demand{Count: count, Hold: duration, Joined: inLine, Request: requests[kind]})
	}
	if t.Order != "" {
		for i := range n {
			add(strings.IndexByte(letters, t.Order[total-n+i]), 1)
		}
		return demands
	}
	sum := 0
	for kind, k := range t.Kinds { // each has its share: of n = 5, kinds of 6, 3 and 1 tasks have 3, 1 and 1
		add(kind, n*(sum+k.Count)/total-n*sum/total)
		sum += k.Count
	}
	return demands
}

// request returns the request of a task of the kind, with the mean cost.
func (k *taskKind) request() throttle.Request {
	cost := maps.Clone(k.Units)
	for unit := range cost {
		cost[unit] = (cost[unit] + int64(k.Count)/2) / int64(k.Count)
	}
	return throttle.Request{Attributes: k.Attributes, Class: k.Class, Cost: cost, Policy: k.Policy, Tenant: k.Tenant}
}

// A forecast estimates when a firing ends, as a whole and for each tenant.
type forecast struct {
	inspect.Plan
	changes []Change
	tenants []inspect.Finish
}

// forecast computes when tasks are expected to end and, if wantChanges is set, limits by which none is late. The
// function leftOf returns how many of a tenant's tasks have not started, and how many of these stand in line.
func (s *Scheduler) forecast(
	ctx context.Context, b *compiled, p *firingPlan, o inspect.PlanOptions, wantChanges bool,
	leftOf func(tenant int) (left, joined int),
) (forecast, error) {
	all := forecast{tenants: make([]inspect.Finish, len(p.Tenants))}
	database, err := s.redis.Database(ctx)
	if err != nil {
		return all, err
	}
	var demands []inspect.Demand
	for i, t := range p.Tenants {
		n, joined := leftOf(i)
		for _, d := range t.left(n, joined, p.Duration.span()) {
			d.Tenant, d.Request.Ticket.Queue = strconv.Itoa(i), database+"/"+b.Queue
			demands = append(demands, d)
		}
	}
	slots, err := s.slots(database+"/", b.Queue)
	if err != nil {
		return all, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // for the whole search
	defer cancel()
	snapshot, err := inspect.Of(s.config.Client.Limiter).Snapshot(ctx, demands, slots...)
	if err != nil {
		return all, err
	}
	if all.Plan, err = snapshot.Plan(ctx, o); err != nil {
		return all, err
	}
	for _, f := range all.Plan.Tenants {
		i, _ := strconv.Atoi(f.Tenant)
		all.tenants[i] = f
	}
	if wantChanges && all.Late > 0 {
		all.changes, err = changes(ctx, snapshot, o)
	}
	if ctx.Err() != nil { // the forecast is known all the same
		all.changes, err = nil, nil
	}
	return all, err
}

// mostRaised is the largest factor by which a limit is raised to see whether that helps.
const mostRaised = 1 << 20

// changes returns the smallest changes of limits by which no task is late.
func changes(ctx context.Context, snapshot *inspect.Snapshot, o inspect.PlanOptions) (changes []Change, err error) {
	limits := maps.Clone(snapshot.Limits)
	maps.Copy(limits, o.Limits)
	o.Limits = map[string]int64{}
	for name, limit := range limits {
		o.Limits[name] = limit * mostRaised
	}
	late := func() bool {
		var p inspect.Plan
		if err == nil {
			p, err = snapshot.Plan(ctx, o)
		}
		return p.Late > 0
	}
	if late() { // no limit helps
		return nil, err
	}
	// Each limit in turn falls to the least that still helps: it is doubled until that helps, then searched in between.
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		least := limits[name]
		for o.Limits[name] = least; late(); o.Limits[name] *= 2 {
			least = o.Limits[name] + 1
		}
		o.Limits[name] = least + int64(sort.Search(int(o.Limits[name]-least), func(more int) bool {
			o.Limits[name] = least + int64(more)
			return !late()
		}))
		if o.Limits[name] > limits[name] {
			changes = append(changes, Change{name, limits[name], o.Limits[name]})
		}
	}
	return changes, err
}

// slots returns how many tasks run at once: of the queue, and of all queues of its servers. It returns none
// if no server is known. Queues' names get the prefix that they have in line.
func (s *Scheduler) slots(prefix, queue string) ([]inspect.Slots, error) {
	servers, err := asynq.NewInspectorFromRedisClient(s.redis.Redis()).Servers()
	ofQueue, ofServers, queues := 0, 0, map[string]int{}
	for _, server := range servers {
		if server.Queues[queue] > 0 {
			ofQueue += server.Concurrency
			maps.Copy(queues, server.Queues)
		}
	}
	if ofQueue == 0 {
		return nil, err
	}
	names := slices.Collect(maps.Keys(queues))
	for _, server := range servers {
		if slices.ContainsFunc(names, func(name string) bool { return server.Queues[name] > 0 }) {
			ofServers += server.Concurrency
		}
	}
	for i := range names {
		names[i] = prefix + names[i]
	}
	return []inspect.Slots{{Count: ofQueue, Queues: []string{prefix + queue}}, {Count: ofServers, Queues: names}}, err
}

// expected returns the time to report, zero if it is unknown.
func expected(f inspect.Finish) time.Time {
	if f.Count == 0 {
		return time.Time{}
	}
	return f.Expected.UTC().Truncate(time.Millisecond)
}

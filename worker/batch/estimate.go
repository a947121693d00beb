package batch

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// estimateEvery is how often the holder forecasts its firing.
	estimateEvery = time.Second

	// estimatePart times the duration of a forecast is the delay until the next one, at most estimateMost.
	estimatePart = 20

	// estimateMost is the longest delay between two forecasts.
	estimateMost = 30 * time.Second
)

// Names of a firing's values that have keys of their own.
const (
	keptPlan     = "plan"
	keptExpected = "expected" // of each tenant
)

// An estimator keeps the expected finish of a firing up to date.
type estimator struct {
	*work
	plan *firingPlan
	last string // the fields that it wrote last, as JSON
}

func (w *work) estimate(ctx context.Context) {
	e := &estimator{work: w}
	for delay := estimateEvery; sleep(ctx, delay); {
		begun := time.Now()
		if err := e.look(ctx); errors.Is(err, asynqredis.ErrNotHolder) {
			return
		}
		delay = min(max(estimateEvery, estimatePart*time.Since(begun)), estimateMost)
	}
}

// look forecasts the rest of the firing, and writes when it is expected to end. An error does not delay the next look.
func (e *estimator) look(ctx context.Context) error {
	r, err := e.read(ctx)
	if err != nil || r.Phase != phaseEnqueue && r.Phase != phaseDrain {
		return err
	}
	if r.isHeld() { // nobody knows when it goes on
		return e.write(ctx, expectedFields(inspect.Finish{}), nil)
	}
	if e.plan == nil {
		if e.plan, err = e.readPlan(ctx, e.f); err != nil {
			return err
		}
	}
	if r.Done >= measuredTasks && r.Took > 0 {
		e.plan.Duration = r.duration()
	}
	all, previous := forecast{}, -1
	for range 3 { // again if tasks started meanwhile, which would count twice
		counts, err := e.counts(ctx, e.f, r, e.plan)
		if err != nil {
			return err
		}
		started := 0
		for _, c := range counts {
			started += c.Total - c.Waiting
		}
		if started == previous {
			break
		}
		previous = started
		waiting := func(i int) (left, joined int) {
			left, t := counts[i].Waiting, e.plan.Tenants[i]
			if r.SetAside {
				return left, 0
			}
			notEnqueued := max(0, t.end(r)-max(t.Start, r.Index))
			return left, max(0, left-notEnqueued)
		}
		all, err = e.forecast(ctx, e.b, e.plan, e.b.planOptions(e.f.Tick, time.Now(), nil), false, waiting)
		if err != nil {
			return err
		}
	}
	if all.Count == 0 { // the last estimate stays
		return nil
	}
	if r.Finish.IsZero() { // perhaps Resume has removed what was written
		e.last = ""
	}
	tenants := make([]time.Time, len(all.tenants))
	for i, t := range all.tenants {
		tenants[i] = expected(t)
	}
	return e.write(ctx, expectedFields(all.Finish), tenants)
}

// write keeps what is expected, if it has changed.
func (e *estimator) write(ctx context.Context, fields []any, tenants []time.Time) error {
	text, err := json.Marshal(tenants)
	if err != nil {
		return err
	}
	fields = append(fields, ":"+keptExpected, string(text))
	written, err := json.Marshal(fields)
	if err != nil || string(written) == e.last {
		return err
	}
	if _, err = e.redis.Update(ctx, e.f, e.holder, fields...); err == nil {
		e.last = string(written)
	}
	return err
}

func expectedFields(f inspect.Finish) []any {
	return []any{"expected", expected(f), "binds", f.Binds, "overdue", f.Late}
}

func (s *Scheduler) readPlan(ctx context.Context, f asynqredis.Firing) (*firingPlan, error) {
	data, err := s.redis.Kept(ctx, f, keptPlan)
	p := &firingPlan{}
	if err == nil && data != "" {
		err = json.Unmarshal([]byte(data), p)
	}
	return p, err
}

// fates has a letter for each task of a firing: what became of it.
type fates string

const (
	fateDone      = 'd'
	fateFailed    = 'f'
	fateRejected  = 'r'
	fateCancelled = 'c'
)

func (s *Scheduler) fates(ctx context.Context, f asynqredis.Firing) (fates, error) {
	letters, err := s.redis.Kept(ctx, f, "fates")
	return fates(letters), err
}

// at returns the fate of a task: one of the constants, or something else if it has not ended.
func (f fates) at(index int) byte {
	if index < len(f) {
		return f[index]
	}
	return 0
}

// counts returns how far the tenants of a firing are, by the fate of each task.
func (s *Scheduler) counts(ctx context.Context, f asynqredis.Firing, r record, p *firingPlan) ([]TenantStatus, error) {
	fates, err := s.fates(ctx, f)
	if err != nil {
		return nil, err
	}
	running, err := s.redis.Running(ctx, f)
	if err != nil {
		return nil, err
	}
	all := make([]TenantStatus, len(p.Tenants))
	for i, t := range p.Tenants {
		end := t.end(r)
		c := &all[i]
		c.Tenant, c.Planned, c.Total = t.Tenant, t.Finish, max(0, end-t.Start)
		number := map[byte]*int{
			fateDone: &c.Done, fateFailed: &c.Failed, fateRejected: &c.Rejected, fateCancelled: &c.Cancelled,
		}
		countOf := func(index int) *int { return cmp.Or(number[fates.at(index)], &c.Waiting) }
		for index := t.Start; index < end; index++ {
			*countOf(index)++
		}
		for _, index := range running {
			if index >= t.Start && index < end && countOf(index) == &c.Waiting {
				c.Running++
				c.Waiting--
			}
		}
	}
	return all, nil
}

// end returns the index after that of the tenant's last task.
func (t tenantTasks) end(r record) int {
	if r.Phase == phaseEnqueue {
		return t.Start + t.Total
	}
	return min(t.Start+t.Total, r.Index) // there may be fewer than were counted
}

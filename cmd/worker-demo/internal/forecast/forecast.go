// Package forecast says how long jobs take at best, and which window is the reason. It asks no Redis:
// windows are taken for empty, and calls for instant.
package forecast

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
)

// A Forecast is a lower bound of the time from the first call to the last.
type Forecast struct {
	AtBest time.Duration
	Bounds []Bound // of every window the scope that takes longest, in the order of the policies
}

// A Bound is how long one window alone takes for what one scope has to do.
type Bound struct {
	Policy    string  `json:"policy"`
	Window    string  `json:"window"`
	Limit     string  `json:"limit"` // such as "20 requests per 1m", for the scope
	Scope     string  `json:"scope"` // "tenant=acme", or "shared"
	Unit      string  `json:"unit"`
	Units     int64   `json:"units"`
	AtBestSec float64 `json:"at_best_seconds"`

	atBest time.Duration
}

// AtBest is that by the window alone.
func (b Bound) AtBest() time.Duration { return b.atBest }

// BoundBy is the window that takes longest; nil if none makes any job wait.
func (f Forecast) BoundBy() *Bound {
	i := slices.IndexFunc(f.Bounds, func(b Bound) bool { return b.atBest == f.AtBest && f.AtBest > 0 })
	if i < 0 {
		return nil
	}
	return &f.Bounds[i]
}

// load is what jobs ask of one scope of a window.
type load struct {
	jobs, units int64
	each        int64 // the cost of every job, 0 if they differ
}

// Of is the forecast of jobs that begin now. Exempt tenants are left out: nothing denies them.
func Of(limiter *throttle.Limiter, todo []jobs.Job, now time.Time) Forecast {
	loads := map[string]map[string]map[string]*load{} // by policy, unit and tenant
	for i := range todo {
		job := &todo[i]
		info, ok := limiter.Match(job.Type)
		if !ok {
			continue
		}
		cost := job.Cost
		if _, given := cost[throttle.Requests]; !given {
			add(loads, info.Name, throttle.Requests, job.Tenant, 1)
		}
		for unit, n := range cost {
			add(loads, info.Name, unit, job.Tenant, n)
		}
	}
	var f Forecast
	for _, p := range limiter.Policies() {
		for _, w := range p.Windows {
			if b, ok := longest(p, w, loads[p.Name][w.Unit], now); ok {
				f.Bounds = append(f.Bounds, b)
				f.AtBest = max(f.AtBest, b.atBest)
			}
		}
	}
	return f
}

func add(loads map[string]map[string]map[string]*load, policy, unit, tenant string, n int64) {
	if n == 0 {
		return
	}
	if loads[policy] == nil {
		loads[policy] = map[string]map[string]*load{}
	}
	if loads[policy][unit] == nil {
		loads[policy][unit] = map[string]*load{}
	}
	l := loads[policy][unit][tenant]
	if l == nil {
		l = &load{each: n}
		loads[policy][unit][tenant] = l
	}
	l.add(load{1, n, n})
}

func (l *load) add(other load) {
	if l.each != other.each {
		l.each = 0
	}
	l.jobs += other.jobs
	l.units += other.units
}

// longest is the scope of the window that takes longest.
func longest(p throttle.Policy, w throttle.Window, tenants map[string]*load, now time.Time) (Bound, bool) {
	all := map[string]*load{}
	for tenant, l := range tenants {
		if p.Tenants[tenant].Exempt {
			continue
		}
		scope := "shared"
		if perTenant(w) {
			scope = "tenant=" + tenant
		}
		if all[scope] == nil {
			all[scope] = &load{each: l.each}
		}
		all[scope].add(*l)
	}
	var bounds []Bound
	for scope, l := range all {
		own := w
		if perTenant(w) {
			o := p.Tenants[scope[len("tenant="):]].Windows[w.Name]
			own.Limit, own.Burst = cmp.Or(o.Limit, w.Limit), cmp.Or(o.Burst, w.Burst)
		}
		at := lastFits(own, *l, now)
		bounds = append(bounds, Bound{
			Policy: p.Name, Window: w.Name, Limit: show.Limit(own), Scope: scope, Unit: w.Unit, Units: l.units,
			AtBestSec: show.Round(at.Seconds()), atBest: at,
		})
	}
	if len(bounds) == 0 {
		return Bound{}, false
	}
	return slices.MaxFunc(bounds, func(a, b Bound) int {
		return cmp.Or(cmp.Compare(a.atBest, b.atBest), cmp.Compare(a.Units, b.Units), cmp.Compare(b.Scope, a.Scope))
	}), true
}

// perTenant reports whether each tenant has a count of its own. Jobs have no other attributes.
func perTenant(w throttle.Window) bool {
	return slices.Contains(w.Scope.Attributes(), throttle.TenantAttribute)
}

// lastFits is when the last of the jobs fits an empty window, if they begin now and are alone.
func lastFits(w throttle.Window, l load, now time.Time) time.Duration {
	rounds := full(w.Limit, l)
	long := w.Period + w.Margin
	switch w.Algorithm {
	case throttle.Concurrency:
		return 0 // it depends on how long calls take
	case throttle.GCRA:
		beyond := float64(max(0, l.units-w.Burst))
		return duration(beyond * float64(long) / float64(w.Limit))
	case throttle.Calendar:
		return nthReset(w, rounds, now)
	case throttle.Fixed:
		if w.Anchor == throttle.AnchorClock && rounds > 0 {
			first := w.Period - time.Duration(now.UnixNano()%int64(w.Period))
			return duration(float64(first) + float64(rounds-1)*float64(w.Period))
		}
	}
	return duration(float64(rounds) * float64(long))
}

// full is how many times the window fills up before the last job. A job's cost is not divided.
func full(limit int64, l load) int64 {
	if l.each > 0 {
		return (l.jobs - 1) / max(1, limit/l.each)
	}
	return (l.units - 1) / limit
}

func nthReset(w throttle.Window, n int64, now time.Time) time.Duration {
	zone, err := time.LoadLocation(w.Timezone)
	schedule, err2 := cron.ParseStandard(w.Resets)
	if err != nil || err2 != nil || n == 0 {
		return 0
	}
	tick := now.In(zone)
	for range n {
		if next := schedule.Next(tick); !next.IsZero() {
			tick = next
		}
	}
	return tick.Add(w.Margin).Sub(now)
}

// duration is the longest there is where more would not fit.
func duration(nanoseconds float64) time.Duration {
	if nanoseconds >= math.MaxInt64 {
		return math.MaxInt64
	}
	return time.Duration(nanoseconds)
}

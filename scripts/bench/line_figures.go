package main

import (
	"cmp"
	"context"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/internal/apitest"
	"github.com/sluice-go/sluice/throttle"
)

// grants returns the tasks that ran, in the order of their grants.
func (f *fleet) grants() []*logged {
	f.mu.Lock()
	defer f.mu.Unlock()
	ran := slices.DeleteFunc(slices.Collect(maps.Values(f.tasks)), func(l *logged) bool { return l.started.IsZero() })
	slices.SortFunc(ran, func(a, b *logged) int {
		return cmp.Or(a.granted.Compare(b.granted), a.started.Compare(b.started))
	})
	return ran
}

// excess returns the most units by which any window was exceeded.
func (f *fleet) excess(at func(*logged) time.Time) int {
	worst := math.MinInt
	for _, w := range f.policy.Windows {
		for _, ran := range f.by(w) {
			times := make([]time.Time, len(ran))
			for i, l := range ran {
				times[i] = at(l)
			}
			worst = max(worst, apitest.MostIn(times, w.Period)-int(w.Limit))
		}
	}
	return worst
}

// ideal returns the time from the first to the last of n grants if none is late. For one window
// that is (n - limit) x period / limit. For several it is computed grant by grant.
func (f *fleet) ideal(n int) time.Duration {
	windows := f.policy.Windows
	if len(windows) == 1 {
		w := windows[0]
		return time.Duration(float64(n-int(w.Limit)) / float64(w.Limit) * float64(w.Period))
	}
	at := make([]time.Duration, n)
	for k := range at {
		for _, w := range windows {
			if i := k - int(w.Limit); i >= 0 {
				at[k] = max(at[k], at[i]+w.Period)
			}
		}
	}
	return at[n-1]
}

func (f *fleet) utilization() float64 {
	ran := f.grants()
	return f.ideal(len(ran)).Seconds() / took(ran)
}

// took returns the seconds from the first grant to the last.
func took(ran []*logged) float64 { return ran[len(ran)-1].granted.Sub(ran[0].granted).Seconds() }

// wakes returns the mean wakes of a task, and the most.
func (f *fleet) wakes() (mean float64, most int) {
	ran, sum := f.grants(), 0
	for _, l := range ran {
		sum += l.wakes
		most = max(most, l.wakes)
	}
	return float64(sum) / float64(len(ran)), most
}

// A ride is how a task got from the moment at which the next in line fits to its handler.
type ride struct {
	of   *logged
	fits time.Time
	took time.Duration
}

// fitToRunning returns the rides of tasks that waited: grant number k of a window with a backlog
// fits one period after number k - limit. All windows of the policy must have the same scope.
func (f *fleet) fitToRunning() []ride {
	var rides []ride
	for _, ran := range f.by(f.policy.Windows[0]) {
		for k, l := range ran {
			fits := time.Time{}
			for _, w := range f.policy.Windows {
				if i := k - int(w.Limit); i >= 0 {
					if at := ran[i].granted.Add(w.Period); at.After(fits) {
						fits = at
					}
				}
			}
			// A task that came later did not wait for it.
			if !fits.IsZero() && !l.promised.IsZero() && !l.came.After(fits) {
				rides = append(rides, ride{l, fits, l.started.Sub(fits)})
			}
		}
	}
	return rides
}

// by returns the grants, in order, by the value of the window's scope.
func (f *fleet) by(w throttle.Window) map[string][]*logged {
	by := map[string][]*logged{}
	for _, l := range f.grants() {
		by[l.scope(w)] = append(by[l.scope(w)], l)
	}
	return by
}

// scope returns the value by which a window counts the task.
func (l *logged) scope(w throttle.Window) string {
	values := map[string]string{"tenant": l.tenant, "region": l.region}
	var of []string
	for _, attribute := range w.Scope.Attributes() {
		of = append(of, values[attribute])
	}
	return strings.Join(of, "/")
}

// lateness returns how long after their last expected start the handlers started; below 0 is
// before.
func (f *fleet) lateness() []time.Duration {
	var late []time.Duration
	for _, l := range f.grants() {
		if !l.promised.IsZero() {
			late = append(late, l.started.Sub(l.promised))
		}
	}
	return late
}

// busy returns the part of their time that handler slots spent in calls of the limiter.
func (f *fleet) busy() float64 {
	ran := f.grants()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.waited.Seconds() / (took(ran) * float64(f.o.servers*f.o.slots))
}

// drained returns the figures of a drained backlog. Each case has bars of its own.
func (f *fleet) drained(ctx context.Context, wakes, wakesMost, utilization *float64) []figure {
	mean, most := f.wakes()
	late := f.lateness()
	figures := []figure{
		{Name: "wakes per task", Value: mean, AtMost: wakes},
		{Name: "wakes of one task, most", Value: float64(most), AtMost: wakesMost},
	}
	if utilization != nil {
		figures = append(figures, figure{Name: "utilization", Value: f.utilization(), AtLeast: utilization})
	}
	over := float64(f.excess(func(l *logged) time.Time { return l.granted }))
	byArrival := float64(f.excess(func(l *logged) time.Time { return l.started }))
	return append(figures,
		figure{Name: "excess", Value: over, Unit: "units", AtMost: new(0.)},
		figure{Name: "excess by arrival", Value: byArrival, Unit: "units"},
		figure{Name: "Redis calls per task", Value: f.redis.calls(ctx, "ping") / float64(len(f.grants()))},
		figure{Name: "lateness p50", Value: milliseconds(quantile(late, 0.5)), Unit: "ms"},
		figure{Name: "lateness p99", Value: milliseconds(quantile(late, 0.99)), Unit: "ms"},
		figure{Name: "slots waiting for the limiter", Value: f.busy(), AtMost: new(0.05)},
	)
}

// reaction returns the figures of fitToRunning. The bars, in milliseconds, are those of an earlier
// engine that polled every 20 ms.
func (f *fleet) reaction(p50, p99 float64) []figure {
	rides := f.fitToRunning()
	slices.SortFunc(rides, func(a, b ride) int { return cmp.Compare(b.took, a.took) })
	var took, own []time.Duration
	for i, r := range rides {
		held := f.stalls.between(r.fits, r.of.started)
		took, own = append(took, r.took), append(own, r.took-held)
		if i < 3 {
			f.o.say("%s: fits at %s, picked up %v later, granted %v, running %v; the machine stood still for %v of it",
				r.of.id, r.fits.Format("15:04:05.000"), r.of.picked.Sub(r.fits), r.of.granted.Sub(r.fits), r.took, held)
		}
	}
	return []figure{
		{Name: "fits to running p50", Value: milliseconds(quantile(took, 0.5)), Unit: "ms", AtMost: &p50},
		{Name: "fits to running p99", Value: milliseconds(quantile(took, 0.99)), Unit: "ms", AtMost: &p99},
		{Name: "the same without the machine's stalls, p99", Value: milliseconds(quantile(own, 0.99)), Unit: "ms"},
		{Name: "the same, longest", Value: milliseconds(quantile(own, 1)), Unit: "ms"},
		{Name: "stall of this machine, longest", Value: milliseconds(f.stalls.longest()), Unit: "ms"},
	}
}

// shareError returns the largest difference between a tenant's part of the grants and its weight's
// part, between two times.
func (f *fleet) shareError(from, to time.Time) float64 {
	grants, all, weights := map[string]float64{}, 0., 0.
	for _, l := range f.grants() {
		if _, ok := grants[l.tenant]; !ok {
			grants[l.tenant] = 0
			weights += f.weight(l.tenant)
		}
		if !l.granted.Before(from) && l.granted.Before(to) {
			grants[l.tenant]++
			all++
		}
	}
	worst := 0.
	for tenant, n := range grants {
		due := f.weight(tenant) / weights
		worst = max(worst, math.Abs(n/all-due)/due)
	}
	return worst
}

func (f *fleet) weight(tenant string) float64 {
	if t, ok := f.policy.Tenants[tenant]; ok && t.Weight > 0 {
		return t.Weight
	}
	return 1
}

// line measures the waiting line with whole fleets of workers.
func line(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	s := suite{name: "line", scenarios: lineScenarios()}
	flags := s.flags(stderr, "about an hour in place of about six minutes")
	flags.IntVar(&s.options.servers, "servers", 2, "`number` of asynq servers, each with a limiter of its own")
	flags.IntVar(&s.options.slots, "slots", 16, "`tasks` that a server runs at once")
	if err := flags.Parse(args); err != nil {
		return &usageError{err}
	}
	if s.options.servers < 1 || s.options.slots < 1 || flags.NArg() > 0 {
		return wrongUsage(stderr, "-servers and -slots must be at least 1, and nothing may follow the flags")
	}
	return s.run(ctx, stdout, stderr)
}

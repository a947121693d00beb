package drain

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

const (
	expectEvery   = time.Second     // how often the rest is planned, or less if that takes long
	expectPart    = 20              // of all time
	expectTimeout = 5 * time.Second // of one plan
)

// An Outlook is when the last job is expected to start.
type Outlook struct {
	At      time.Time // zero if that is unknown
	AtLeast bool      // concurrency windows may hold it up longer: no plan knows how long calls take
}

// expect plans what is open, again and again, until the context ends.
func (d *Drain) expect(ctx context.Context, client *worker.Client) {
	for {
		begun := time.Now()
		d.Progress.Expect(d.outlook(ctx, client), d.Counts())
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(expectEvery, expectPart*time.Since(begun))):
		}
	}
}

// outlook plans what is open, by the line as it is now.
func (d *Drain) outlook(ctx context.Context, client *worker.Client) Outlook {
	d.mu.Lock()
	demands := Demands(d.Limiter, d.Queue, func(yield func(*jobs.Job) bool) {
		for id := range d.open {
			if !yield(d.jobs[id]) {
				return
			}
		}
	})
	d.mu.Unlock()
	for i := range demands {
		demands[i].Joined = demands[i].Count // or they join in a moment
	}
	ctx, cancel := context.WithTimeout(ctx, expectTimeout)
	defer cancel()
	plan, err := client.Plan(ctx, demands, throttle.PlanOptions{})
	if err != nil || !plan.Known || len(demands) == 0 {
		return Outlook{}
	}
	return Outlook{At: plan.Last, AtLeast: slices.ContainsFunc(d.Limiter.Policies(), func(p throttle.Policy) bool {
		return slices.ContainsFunc(p.Windows, func(w throttle.Window) bool { return w.Algorithm.Leases() })
	})}
}

// Demands returns what jobs ask of the lines of a limiter, equal ones together. Jobs that never wait
// in a line are left out.
func Demands(limiter *throttle.Limiter, queue string, list iter.Seq[*jobs.Job]) []throttle.Demand {
	demands, of := []throttle.Demand{}, map[string]int{}
	for job := range list {
		info, ok := limiter.Match(job.Type)
		if !ok || info.Requeue == throttle.RequeueEarliestReset {
			continue
		}
		key := fmt.Sprintf("%q %q %v", info.Name, job.Tenant, job.Cost)
		i, known := of[key]
		if !known {
			i = len(demands)
			of[key] = i
			demands = append(demands, throttle.Demand{
				Queue: queue, Request: throttle.Request{Cost: job.Cost, Policy: info.Name, Tenant: job.Tenant},
			})
		}
		demands[i].Count++
	}
	return demands
}

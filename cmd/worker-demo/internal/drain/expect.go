package drain

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
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
	kinds, of := []throttle.Demand{}, map[string]int{}
	d.mu.Lock()
	for id := range d.open {
		job := d.jobs[id]
		key := fmt.Sprintf("%q %q %v", job.Type, job.Tenant, job.Cost)
		i, known := of[key]
		if !known {
			i = len(kinds)
			of[key], kinds = i, append(kinds, d.demand(job))
		}
		kinds[i].Count++
		kinds[i].Joined++ // or it joins in a moment
	}
	d.mu.Unlock()
	kinds = slices.DeleteFunc(kinds, func(k throttle.Demand) bool { return k.Request.Policy == "" })
	ctx, cancel := context.WithTimeout(ctx, expectTimeout)
	defer cancel()
	plan, err := client.Plan(ctx, kinds, throttle.PlanOptions{})
	if err != nil || !plan.Known || len(kinds) == 0 {
		return Outlook{}
	}
	return Outlook{At: plan.Last, AtLeast: slices.ContainsFunc(d.Limiter.Policies(), func(p throttle.Policy) bool {
		return slices.ContainsFunc(p.Windows, func(w throttle.Window) bool { return w.Algorithm == throttle.Concurrency })
	})}
}

// demand is that of jobs like one, without their number.
func (d *Drain) demand(job *jobs.Job) throttle.Demand {
	info, ok := d.Limiter.Match(job.Type)
	if !ok || info.Requeue == throttle.RequeueEarliestReset {
		return throttle.Demand{}
	}
	return throttle.Demand{Queue: d.Queue, Request: throttle.Request{Cost: job.Cost, Policy: info.Name, Tenant: job.Tenant}}
}

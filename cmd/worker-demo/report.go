package main

import (
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// introduce prints what the demo is going to do.
func (d *demo) introduce() {
	fmt.Fprintf(d.out, "%d jobs of %d tenants, for an API that allows\n", allJobs(), len(tenants))
	for _, l := range d.api.limits {
		fmt.Fprintf(d.out, "  %v\n", l)
	}
	fmt.Fprintln(d.out, "and answers 429 to any call beyond. All jobs are enqueued at once.")
	for _, t := range tenants {
		if t.plain {
			fmt.Fprintf(d.out, "Those of %q come from a plain asynq client.\n", t.name)
		}
	}
	fmt.Fprintf(d.out, "After %v the API grants half of its last limit, for %v, without notice.\n\n",
		d.api.troubleAfter, d.api.troubleFor)
}

// progress prints how many jobs are done.
func (d *demo) progress() {
	d.note(func() {
		fmt.Fprintf(d.out, "%4.0f s: %d of %d jobs done\n", time.Since(d.begun).Seconds(), d.done(), allJobs())
	})
}

// report prints the results.
func (d *demo) report() {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintf(d.out, "\nAll %d jobs are done, in %.0f s.\n\n", d.done(), time.Since(d.begun).Seconds())
	t := tabwriter.NewWriter(d.out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, "TENANT\tJOBS\tWAITED, TYPICALLY\tWAITED, AT MOST\tCALLS REFUSED")
	refused, denied := 0, 0
	for _, tenant := range tenants {
		waits := d.waits[tenant.name]
		slices.Sort(waits)
		fmt.Fprintf(t, "%s\t%d\t%.1f s\t%.1f s\t%d\n", tenant.name, len(waits),
			waits[len(waits)/2].Seconds(), waits[len(waits)-1].Seconds(), d.refused[tenant.name])
		refused += d.refused[tenant.name]
		for id := range d.denied {
			if tenant.plain && strings.HasPrefix(id, tenant.name+"-") {
				denied++
			}
		}
	}
	fmt.Fprintln(t)
	fmt.Fprintln(t, "THE API'S LIMIT\tMOST THAT IT SERVED, BY ITS OWN LOG")
	for _, l := range d.api.limits {
		fmt.Fprintf(t, "%v\t%d\n", l, d.api.mostServed(l))
	}
	t.Flush()
	fmt.Fprintf(d.out, `
%d jobs of the plain client were denied when a worker picked them up. They joined the line then. The
other client's jobs joined it when they were enqueued, and a worker took each when it fitted.
When the API halved its limit, it refused %d calls. The first refusal paused the policy on every
worker, and calls came back gradually. The jobs have used %d retries.
`, denied, refused, d.retries)
}

package scenario

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/drain"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/worker/batch"
)

// A Report is what "worker-demo -json" prints.
type Report struct {
	OK          bool           `json:"ok"`           // every job is done, and there were no more 429s than may be
	Refused     int            `json:"refused"`      // 429s that all workers saw
	RefusedMost int            `json:"refused_most"` // how many there may be
	Summary     drain.Summary  `json:"summary"`
	Tenants     []TenantReport `json:"tenants"`
	Limits      []LimitReport  `json:"limits"`
	Denials     []DenialReport `json:"denials"`
	Nightly     *batch.Status  `json:"nightly,omitempty"` // the batch beside the jobs
}

type TenantReport struct {
	Tenant      string  `json:"tenant"`
	Jobs        int     `json:"jobs"`
	Done        int     `json:"done"`
	WakesPerJob float64 `json:"wakes_per_job"`
	WaitP50MS   int64   `json:"wait_p50_ms"`
	WaitMaxMS   int64   `json:"wait_max_ms"`
	Refused     int     `json:"refused"` // 429s
}

// A LimitReport sets what the API saw in one span beside what the throttle counted in its
// window, which is longer by its margin.
type LimitReport struct {
	Limit    string `json:"limit"`
	SpanMS   int64  `json:"span_ms"`
	Calls    int    `json:"calls"`
	By       string `json:"by"`
	Served   int    `json:"most_served"`
	Counted  int64  `json:"most_counted"`
	spanText string
}

func (s Scenario) report(list []jobs.Job, results *jobs.Log, summary drain.Summary, nightly batch.Status) Report {
	r := Report{RefusedMost: s.refusedMost(), Summary: summary}
	for _, t := range s.Tenants {
		row := TenantReport{Tenant: t.Name, Jobs: t.Jobs, Refused: s.API.Refused(t.Name)}
		var waits []int64
		wakes := 0
		for _, job := range list {
			result, done := results.Get(job.ID)
			if done && job.Tenant == t.Name && result.Error == "" {
				waits = append(waits, result.WaitedMS)
				wakes += result.Wakes
			}
		}
		if row.Done = len(waits); row.Done > 0 {
			slices.Sort(waits)
			row.WakesPerJob = show.Round(float64(wakes) / float64(row.Done))
			row.WaitP50MS, row.WaitMaxMS = waits[(len(waits)-1)/2], waits[len(waits)-1]
		}
		r.Refused += row.Refused
		r.Tenants = append(r.Tenants, row)
	}
	r.OK = summary.Succeeded == len(list) && r.Refused <= r.RefusedMost
	if s.Nightly.Each > 0 {
		r.Nightly = &nightly
		r.OK = r.OK && nightly.State == batch.StateDone && nightly.Done == s.Nightly.Each*len(s.Nightly.Tenants)
	}
	for _, l := range s.API.Limits {
		r.Limits = append(r.Limits, s.limitReports(l, summary)...)
	}
	return r
}

// refusedMost is how many calls a limit that is suddenly halved may refuse: those under way. Without
// such a trouble there must be none.
func (s Scenario) refusedMost() int {
	most := 0
	for _, l := range s.API.Limits {
		if s.API.Trouble.For > 0 && l.Name == s.API.Trouble.Limit {
			most = min(concurrency, l.Calls)
		}
	}
	return most
}

func (s Scenario) limitReports(l APILimit, summary drain.Summary) []LimitReport {
	whose := []string{""}
	if l.PerTenant {
		whose = nil
		for _, t := range s.Tenants {
			whose = append(whose, t.Name)
		}
	}
	var rows []LimitReport
	for _, tenant := range whose {
		row := LimitReport{
			Limit: l.Name, SpanMS: l.Span.Milliseconds(), Calls: l.Calls, By: cmp.Or(tenant, "all"),
			Served: s.API.MostServed(l, tenant), spanText: show.Short(l.Span),
		}
		for _, w := range summary.Windows {
			if w.Window == l.Name && strings.TrimPrefix(w.Scope, "tenant=") == cmp.Or(tenant, "shared") {
				row.Counted = max(row.Counted, w.MaxUsed)
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// Print writes the report for people.
func (r Report) Print(w io.Writer) {
	s := r.Summary
	fmt.Fprintf(w, "\n%d of %d jobs succeeded in %.1f s, with %d wakes (%.1f a job) and %d denials.\n\n",
		s.Succeeded, s.Jobs, s.DrainSeconds, s.Dequeues, s.WakesPerJob, s.Denials)
	t := show.Table(w)
	fmt.Fprintln(t, "TENANT\tJOBS\tWAKES PER JOB\tWAITED (P50)\tWAITED (MAX)\t429s")
	for _, row := range r.Tenants {
		fmt.Fprintf(t, "%s\t%d\t%.1f\t%.1f s\t%.1f s\t%d\n", row.Tenant, row.Jobs, row.WakesPerJob,
			float64(row.WaitP50MS)/1000, float64(row.WaitMaxMS)/1000, row.Refused)
	}
	t.Flush()
	fmt.Fprintln(w)
	t = show.Table(w)
	fmt.Fprintln(t, "WINDOW\tLIMIT\tOF\tMOST SERVED (API'S LOG)\tMOST COUNTED (THROTTLE)")
	for _, row := range r.Limits {
		fmt.Fprintf(t, "%s\t%d per %s\t%s\t%d\t%d\n",
			row.Limit, row.Calls, row.spanText, row.By, row.Served, row.Counted)
	}
	t.Flush()
	r.printDenials(w)
	if n := r.Nightly; n != nil {
		fmt.Fprintf(w, "\nThe nightly batch: %d of %d tasks done, %s.\n", n.Done, n.Total, against(*n))
	}
	verdict := "Every job is done, and the API never answered 429."
	if r.RefusedMost > 0 {
		verdict = fmt.Sprintf("Every job is done. "+
			"When the API halved a limit, all workers together saw %d times 429 (%d may be):\n"+
			"the first pauses the policy on every worker, no job loses a retry or its place, "+
			"and calls come back gradually.", r.Refused, r.RefusedMost)
	}
	if !r.OK {
		verdict = fmt.Sprintf("Not as it should be: every job must be done, "+
			"and the API must answer 429 at most %d times.", r.RefusedMost)
	}
	fmt.Fprintf(w, `
A wake is a worker picking a job up. A job that joins the line when it is enqueued is taken when it
fits all windows: one wake. One that was denied has two, and one that the API refused has one more.
Expected starts move when a limit changes, as they do while the API has its trouble.

%s
`, verdict)
}

func (r Report) printDenials(w io.Writer) {
	if len(r.Denials) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := show.Table(w)
	fmt.Fprintln(t, "DENIED\tAT\tITS LAST ERROR IN ASYNQ, WHILE IT WAITS IN LINE\tEXPECTED START\tTAKEN\tRETRIES USED")
	for _, row := range r.Denials {
		fmt.Fprintf(t, "%s\t%.1f s\t%s\t%.1f s\t%.1f s\t%d\n", row.Job, float64(row.AtMS)/1000, row.Reason,
			float64(row.ExpectedMS)/1000, float64(row.TakenMS)/1000, row.Retried)
	}
	t.Flush()
}

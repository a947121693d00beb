package main

import (
	"cmp"
	"context"
	_ "embed"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

//go:embed scenario.yml
var scenarioPolicies []byte

// A Scenario is what the program runs without arguments: tenants with work for an API that
// publishes its limits.
type Scenario struct {
	API     *API
	Tenants []ScenarioTenant
}

// A ScenarioTenant is a tenant and how many jobs it has.
type ScenarioTenant struct {
	Jobs  int
	Name  string
	Plain bool // they are enqueued by an asynq.Client that knows of no line
}

// concurrency is how many calls of the scenario run at once.
const concurrency = 16

const scenarioQueue = "worker-demo:scenario"

// DefaultScenario takes about 25 s.
func DefaultScenario() Scenario {
	return Scenario{
		API: &API{
			Latency: 20 * time.Millisecond,
			Limits: []APILimit{
				{Name: "tenant-burst", Calls: 4, Span: time.Second, PerTenant: true},
				{Name: "tenant-steady", Calls: 14, Span: 7 * time.Second, PerTenant: true},
				{Name: "everybody", Calls: 8, Span: time.Second},
			},
			Trouble: Trouble{After: 2 * time.Second, For: 5 * time.Second, Limit: "everybody"},
		},
		Tenants: []ScenarioTenant{{Jobs: 40, Name: "large"}, {Jobs: 24, Name: "medium"}, {Jobs: 8, Name: "small"}, {Jobs: 6, Name: "plain", Plain: true}},
	}
}

// ScenarioCommand runs the scenario on an embedded Redis, and shows what happened.
type ScenarioCommand struct {
	*Main

	JSON bool
}

func (c *ScenarioCommand) ParseFlags(args []string) error {
	flags := flag.NewFlagSet("worker-demo", flag.ContinueOnError)
	flags.BoolVar(&c.JSON, "json", false, "")
	return parse(flags, args)
}

func (c *ScenarioCommand) Run(ctx context.Context) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("starting the API: %w", err)
	}
	web := &http.Server{Handler: c.Scenario.API}
	go web.Serve(listener)
	defer web.Close()

	policies, err := policyfile.Parse("scenario.yml", scenarioPolicies)
	if err != nil {
		return err
	}
	server, err := openRedis(ctx, "")
	if err != nil {
		return err
	}
	defer server.Close()
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies})
	if err != nil {
		return err
	}
	jobs := c.Scenario.jobs("http://" + listener.Addr().String())
	results := NewResultLog(io.Discard)
	denials := newDenialLog()
	c.introduce(jobs)
	drain := &Drain{
		Caller:      NewCaller(10*time.Second, concurrency),
		Client:      server.Client,
		Concurrency: concurrency,
		Jobs:        jobs,
		Limiter:     limiter,
		OnDecision:  denials.decided,
		Progress:    NewProgress(c.Stderr, 2*time.Second),
		Queue:       scenarioQueue,
		Redis:       server.Opt,
		Results:     results,
	}
	summary, err := drain.Run(ctx)
	if err != nil && ctx.Err() == nil {
		return err
	}
	report := c.Scenario.report(jobs, results, summary)
	report.Denials = denials.reports(asynq.NewInspectorFromRedisClient(server.Client))
	if c.JSON {
		err = writeJSON(c.Stdout, report)
	} else {
		err = report.print(c.Stdout)
	}
	switch {
	case ctx.Err() != nil:
		return errInterrupted
	case err == nil && !report.OK:
		return errJobsFailed
	}
	return err
}

// introduce goes to stderr: what a machine may read goes to stdout alone.
func (c *ScenarioCommand) introduce(jobs []Job) {
	fmt.Fprintf(c.Stderr, "%d jobs of %d tenants, for an API that allows\n", len(jobs), len(c.Scenario.Tenants))
	for _, l := range c.Scenario.API.Limits {
		fmt.Fprintf(c.Stderr, "  %-14s %2d calls per %s, %s\n", l.Name, l.Calls, short(l.Span), l.scope())
	}
	fmt.Fprintln(c.Stderr, "and answers 429 to any call beyond. All jobs are enqueued at once, and throttled by the same limits.")
	for _, t := range c.Scenario.Tenants {
		if t.Plain {
			fmt.Fprintf(c.Stderr, "Those of %q come from a plain asynq client: they join the line only when a worker has denied them.\n", t.Name)
		}
	}
	if t := c.Scenario.API.Trouble; t.For > 0 {
		fmt.Fprintf(c.Stderr, "After %s the API grants half of %q, for %s, and tells nobody before.\n", short(t.After), t.Limit, short(t.For))
	}
}

func (l APILimit) scope() string {
	if l.PerTenant {
		return "each tenant"
	}
	return "all together"
}

// jobs are those of all tenants, mixed as they would come.
func (s Scenario) jobs(base string) []Job {
	var jobs []Job
	for i := 0; ; i++ {
		before := len(jobs)
		for _, t := range s.Tenants {
			if i < t.Jobs {
				id := fmt.Sprintf("%s-%03d", t.Name, i+1)
				jobs = append(jobs, Job{
					ID: id, MaxRetry: defaultMaxRetry, Method: http.MethodGet,
					Tenant: t.Name, Type: "demo:call", URL: base + "/" + t.Name + "/" + id, plain: t.Plain,
				})
			}
		}
		if len(jobs) == before {
			return jobs
		}
	}
}

// A ScenarioReport is what "worker-demo -json" prints.
type ScenarioReport struct {
	OK          bool           `json:"ok"`           // every job is done, and there were no more 429s than may be
	Refused     int            `json:"refused"`      // 429s that all workers saw
	RefusedMost int            `json:"refused_most"` // how many there may be
	Summary     Summary        `json:"summary"`
	Tenants     []TenantReport `json:"tenants"`
	Limits      []LimitReport  `json:"limits"`
	Denials     []DenialReport `json:"denials"`
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

func (s Scenario) report(jobs []Job, results *ResultLog, summary Summary) ScenarioReport {
	r := ScenarioReport{RefusedMost: s.refusedMost(), Summary: summary}
	for _, t := range s.Tenants {
		row := TenantReport{Tenant: t.Name, Jobs: t.Jobs, Refused: s.API.Refused(t.Name)}
		var waits []int64
		wakes := 0
		for _, job := range jobs {
			result, done := results.Get(job.ID)
			if done && job.Tenant == t.Name && result.Error == "" {
				waits = append(waits, result.WaitedMS)
				wakes += result.Wakes
			}
		}
		if row.Done = len(waits); row.Done > 0 {
			slices.Sort(waits)
			row.WakesPerJob = round(float64(wakes) / float64(row.Done))
			row.WaitP50MS, row.WaitMaxMS = waits[(len(waits)-1)/2], waits[len(waits)-1]
		}
		r.Refused += row.Refused
		r.Tenants = append(r.Tenants, row)
	}
	r.OK = summary.Succeeded == len(jobs) && r.Refused <= r.RefusedMost
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

func (s Scenario) limitReports(l APILimit, summary Summary) []LimitReport {
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
			Served: s.API.MostServed(l, tenant), spanText: short(l.Span),
		}
		for _, w := range summary.Windows {
			if w.Window == l.Name && strings.TrimPrefix(w.Scope, "tenant=") == cmp.Or(tenant, "shared") {
				row.Counted = w.MaxUsed
			}
		}
		rows = append(rows, row)
	}
	return rows
}

func (r ScenarioReport) print(w io.Writer) error {
	s := r.Summary
	fmt.Fprintf(w, "\n%d of %d jobs succeeded in %.1f s, with %d wakes (%.1f a job) and %d denials.\n\n",
		s.Succeeded, s.Jobs, s.DrainSeconds, s.Dequeues, s.WakesPerJob, s.Denials)
	t := newTable(w)
	fmt.Fprintln(t, "TENANT\tJOBS\tWAKES PER JOB\tWAITED (P50)\tWAITED (MAX)\t429s")
	for _, row := range r.Tenants {
		fmt.Fprintf(t, "%s\t%d\t%.1f\t%.1f s\t%.1f s\t%d\n", row.Tenant, row.Jobs, row.WakesPerJob,
			float64(row.WaitP50MS)/1000, float64(row.WaitMaxMS)/1000, row.Refused)
	}
	t.Flush()
	fmt.Fprintln(w)
	t = newTable(w)
	fmt.Fprintln(t, "WINDOW\tLIMIT\tOF\tMOST SERVED (API'S LOG)\tMOST COUNTED (THROTTLE)")
	for _, row := range r.Limits {
		fmt.Fprintf(t, "%s\t%d per %s\t%s\t%d\t%d\n", row.Limit, row.Calls, row.spanText, row.By, row.Served, row.Counted)
	}
	t.Flush()
	r.printDenials(w)
	verdict := "Every job is done, and the API never answered 429."
	if r.RefusedMost > 0 {
		verdict = fmt.Sprintf("Every job is done. When the API halved a limit, all workers together saw %d times 429 (%d may be):\n"+
			"the first pauses the policy on every worker, no job loses a retry or its place, and calls come back gradually.", r.Refused, r.RefusedMost)
	}
	if !r.OK {
		verdict = fmt.Sprintf("Not as it should be: every job must be done, and the API must answer 429 at most %d times.", r.RefusedMost)
	}
	_, err := fmt.Fprintf(w, `
A wake is a worker picking a job up. A job that joins the line when it is enqueued is taken when it
fits all windows: one wake. One that was denied has two, and one that the API refused has one more.
Expected starts move when a limit changes, as they do while the API has its trouble.

%s
`, verdict)
	return err
}

func (r ScenarioReport) printDenials(w io.Writer) {
	if len(r.Denials) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := newTable(w)
	fmt.Fprintln(t, "DENIED\tAT\tITS LAST ERROR IN ASYNQ, WHILE IT WAITS IN LINE\tEXPECTED START\tTAKEN\tRETRIES USED")
	for _, row := range r.Denials {
		fmt.Fprintf(t, "%s\t%.1f s\t%s\t%.1f s\t%.1f s\t%d\n", row.Job, float64(row.AtMS)/1000, row.Reason,
			float64(row.ExpectedMS)/1000, float64(row.TakenMS)/1000, row.Retried)
	}
	t.Flush()
}

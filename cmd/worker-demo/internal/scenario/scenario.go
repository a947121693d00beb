// Package scenario is what the demo runs without arguments: tenants with work for an API.
package scenario

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/call"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/drain"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/worker/batch"
)

//go:embed scenario.yml
var policyText []byte

// A Scenario is what the program runs without arguments: tenants with work for an API that
// publishes its limits.
type Scenario struct {
	API     *API
	Nightly Nightly
	Tenants []Tenant

	// Watch, if not nil, is given the limiter before the first job. What it returns is called at the end.
	Watch func(*throttle.Limiter) (stop func(), err error)
}

// A Tenant is a tenant and how many jobs it has.
type Tenant struct {
	Jobs  int
	Name  string
	Plain bool // they are enqueued by an asynq.Client that knows of no line
}

// concurrency is how many calls of the scenario run at once.
const concurrency = 16

const queue = "worker-demo:scenario"

// Default takes about 25 s.
func Default() Scenario {
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
		Nightly: Nightly{Each: 6, Tenants: []string{"medium", "small"}},
		Tenants: []Tenant{
			{Jobs: 40, Name: "large"},
			{Jobs: 24, Name: "medium"},
			{Jobs: 8, Name: "small"},
			{Jobs: 6, Name: "plain", Plain: true},
		},
	}
}

// Run runs the scenario on a Redis, and shows on stderr how it goes. The report is that of what was
// done even if the context ends.
func (s Scenario) Run(ctx context.Context, server *redisconn.Server, stderr io.Writer) (Report, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return Report{}, fmt.Errorf("starting the API: %w", err)
	}
	web := &http.Server{Handler: s.API}
	go web.Serve(listener)
	defer web.Close()

	policies, err := policyfile.Parse("scenario.yml", policyText)
	if err != nil {
		return Report{}, err
	}
	progress := drain.NewProgress(stderr, 2*time.Second)
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Logger: progress.Logger(), Policies: policies})
	if err != nil {
		return Report{}, err
	}
	if s.Watch != nil {
		stop, err := s.Watch(limiter)
		if err != nil {
			return Report{}, err
		}
		defer stop()
	}
	base := "http://" + listener.Addr().String()
	list := s.jobs(base)
	results := jobs.NewLog(io.Discard)
	denials, windows := newDenialLog(), &drain.Windows{}
	s.introduce(stderr, list)
	caller, err := call.New(call.Config{
		Concurrency: concurrency, Limiter: limiter, Logger: progress.Logger(), Timeout: 10 * time.Second,
	})
	if err != nil {
		return Report{}, err
	}
	d := &drain.Drain{
		Caller:      caller,
		Client:      server.Client,
		Concurrency: concurrency,
		Jobs:        list,
		Limiter:     limiter,
		OnDecision:  denials.decided,
		Progress:    progress,
		Queue:       queue,
		Redis:       server.Opt,
		Results:     results,
		Windows:     windows,
	}
	night := &night{
		caller: caller, limiter: limiter, nightly: s.Nightly,
		progress: progress, server: server, windows: windows,
	}
	ended := make(chan batch.Status, 1)
	d.OnEnqueued = func() { go func() { ended <- night.run(ctx, base) }() }
	summary, err := d.Run(ctx)
	if err != nil && ctx.Err() == nil {
		return Report{}, err
	}
	var nightly batch.Status
	select {
	case nightly = <-ended:
	case <-ctx.Done():
	}
	summary.Windows = windows.List(limiter)
	report := s.report(list, results, summary, nightly)
	report.Denials = denials.reports(asynq.NewInspectorFromRedisClient(server.Client))
	return report, nil
}

// introduce goes to stderr: what a machine may read goes to stdout alone.
func (s Scenario) introduce(w io.Writer, list []jobs.Job) {
	fmt.Fprintf(w, "%d jobs of %d tenants, for an API that allows\n", len(list), len(s.Tenants))
	for _, l := range s.API.Limits {
		fmt.Fprintf(w, "  %-14s %2d calls per %s, %s\n", l.Name, l.Calls, show.Short(l.Span), l.scope())
	}
	fmt.Fprintln(w, "and answers 429 to any call beyond. "+
		"All jobs are enqueued at once, and throttled by the same limits.")
	for _, t := range s.Tenants {
		if t.Plain {
			fmt.Fprintf(w, "Those of %q come from a plain asynq client: "+
				"they join the line only when a worker has denied them.\n", t.Name)
		}
	}
	if n := s.Nightly; n.Each > 0 {
		fmt.Fprintf(w, "Beside them a nightly batch has %d tasks for each of %s: it yields to the jobs.\n",
			n.Each, strings.Join(n.Tenants, " and "))
	}
	if t := s.API.Trouble; t.For > 0 {
		fmt.Fprintf(w, "After %s the API grants half of %q, for %s, without notice.\n",
			show.Short(t.After), t.Limit, show.Short(t.For))
	}
}

func (l APILimit) scope() string {
	if l.PerTenant {
		return "each tenant"
	}
	return "all together"
}

// jobs are those of all tenants, mixed as they would come.
func (s Scenario) jobs(base string) []jobs.Job {
	var list []jobs.Job
	for i := 0; ; i++ {
		before := len(list)
		for _, t := range s.Tenants {
			if i < t.Jobs {
				id := fmt.Sprintf("%s-%03d", t.Name, i+1)
				list = append(list, jobs.Job{
					ID: id, MaxRetry: jobs.DefaultMaxRetry, Method: http.MethodGet,
					Tenant: t.Name, Type: "demo:call", URL: base + "/" + t.Name + "/" + id, Plain: t.Plain,
				})
			}
		}
		if len(list) == before {
			return list
		}
	}
}

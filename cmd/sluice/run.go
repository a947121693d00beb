package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/cmd/sluice/internal/drain"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/usage"
)

// Run checks all input, and only then begins to write.
func (c *RunCommand) Run(ctx context.Context, _ *cli.Command) error {
	if err := c.validate(); err != nil {
		return usageError{err}
	}
	if _, kept, _ := c.address(c.Env); kept && c.Out == "" && !c.DryRun {
		return badUsage("--out is missing: with a Redis that outlives this run it must say which jobs are done")
	}
	progress := drain.NewProgress(c.Stderr, 5*time.Second)
	list, err := c.readJobs()
	if err != nil {
		return inputError{err}
	}
	policies, err := c.loadPolicies(c.Policies)
	if err != nil {
		return err
	}
	headers, err := c.readHeaders()
	if err != nil {
		return inputError{err}
	}
	queue, err := c.queueName()
	if err != nil {
		return inputError{err}
	}
	outcome, err := call.NewOutcome(c.Success, c.Retry)
	if err != nil {
		return inputError{err}
	}
	if c.DryRun {
		return c.dryRun(ctx, list, policies)
	}
	server, err := c.open(ctx, c.Env)
	if err != nil {
		return inputError{err}
	}
	defer server.Close()
	counter := usage.New()
	limiter, err := throttle.New(throttle.Config{
		Client: server.Client, Logger: progress.Logger(), Observer: counter.Observer(throttle.Observer{}),
		Policies: policies, Prefix: c.prefix(),
	})
	if err != nil {
		return inputError{err}
	}
	caller, err := call.New(call.Config{
		Concurrency: c.Concurrency, Env: c.Env, Headers: headers, Keep: c.Keep, Limiter: limiter,
		Logger: progress.Logger(), Outcome: outcome, Timeout: c.Timeout,
	})
	if err != nil {
		return err
	}
	if err := checkJobs(ctx, limiter, c.Policies, list); err != nil {
		return err
	}
	// Another process may have worked on these jobs, and written to --out, up to now.
	if err := waitAlone(ctx, server.Client, queue, progress); err != nil {
		return err
	}
	results := jobs.NewLog(c.Stdout)
	if c.Out != "" {
		if results, err = jobs.OpenLog(c.Out); err != nil {
			return badInput("--out: %w", err)
		}
		defer results.Close()
	}
	for _, p := range policies {
		for _, warning := range p.Warnings() {
			progress.Say("warning: %s", warning)
		}
	}

	store, err := control.NewStore(limiter)
	if err != nil {
		return err
	}
	follower, err := control.Follow(ctx, control.FollowConfig{KeepPolicies: true, Store: store}) // operators may pause and override
	if err != nil {
		return err
	}
	defer follower.Close()
	defer counter.Start(limiter)()
	d := &drain.Drain{
		Caller:      caller,
		Client:      server.Client,
		Concurrency: c.Concurrency,
		Jobs:        list,
		Limiter:     limiter,
		Progress:    progress,
		Queue:       queue,
		Redis:       server.Opt,
		Results:     results,
		RetryFailed: c.RetryFailed,
	}
	summary, err := d.Run(ctx)
	interrupted := err != nil && ctx.Err() != nil
	if err != nil && !interrupted {
		return err
	}
	if err := c.report(summary); err != nil {
		return err
	}
	if interrupted {
		progress.Say("%s", c.howToGoOn(summary))
		return errInterrupted
	}
	if summary.Failed > 0 {
		return errJobsFailed
	}
	return nil
}

// checkJobs asks the limiter whether every job can be granted at all. Redis is not asked.
func checkJobs(ctx context.Context, limiter *throttle.Limiter, policyFile string, list []jobs.Job) error {
	var errs []error
	checked := map[string]error{} // jobs are many, but few of them differ in what they ask for
	for _, job := range list {
		policy, ok := limiter.Match(job.Type)
		if !ok {
			errs = append(errs, fmt.Errorf("%s: type %q: no policy in %s matches it: must match one",
				job.At, jobs.Shorten(job.Type), policyFile))
			continue
		}
		key := fmt.Sprintf("%q %q %v", policy.Name, job.Tenant, job.Cost)
		err, ok := checked[key]
		if !ok {
			err = limiter.Check(ctx, throttle.Request{Cost: job.Cost, Policy: policy.Name, Tenant: job.Tenant})
			checked[key] = err
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", job.At, err))
		}
	}
	if len(errs) > 0 {
		return inputError{jobs.Join(errs)}
	}
	return nil
}

// waitAlone waits until no server works on the queue: one that was killed is seen there for up
// to 10 s.
func waitAlone(ctx context.Context, client redis.UniversalClient, queue string, progress *drain.Progress) error {
	inspector := asynq.NewInspectorFromRedisClient(client)
	warned := false
	for end := time.Now().Add(15 * time.Second); ; {
		servers, err := inspector.Servers()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(servers, func(s *asynq.ServerInfo) bool { return s.Queues[queue] > 0 })
		if i < 0 {
			return nil
		}
		other := servers[i]
		if time.Now().After(end) {
			return badInput("queue %q: process %d on %s works on it: let it end, or use another --queue",
				queue, other.PID, other.Host)
		}
		if !warned {
			warned = true
			progress.Say("process %d on %s worked on these jobs up to now: waiting until it is known to be gone",
				other.PID, other.Host)
		}
		select {
		case <-ctx.Done():
			return errInterrupted
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// report prints the summary: for people and, with --json, for programs.
func (c *RunCommand) report(s drain.Summary) error {
	fmt.Fprintf(c.Stderr, "%d jobs: %d succeeded, %d failed, in %.1f s; %d denials\n",
		s.Jobs, s.Succeeded, s.Failed, s.Seconds, s.Denials)
	if !c.json {
		return nil
	}
	return show.JSON(c.Stdout, s)
}

func (c *RunCommand) howToGoOn(s drain.Summary) string {
	text := fmt.Sprintf("stopped with %d of %d jobs done: ", s.Done(), s.Jobs)
	switch {
	case c.Out == "":
		return text + "without --out nothing of this is kept, and the same command starts over"
	case c.Jobs == "-":
		return text + "the same command with the same input goes on from here"
	default:
		return text + "the same command goes on from here"
	}
}

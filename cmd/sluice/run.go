package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/cmd/sluice/internal/drain"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/usage"
)

// Run checks all input but --out before it writes anything.
func (c *RunCommand) Run(ctx context.Context, _ *cli.Command) error {
	if err := c.validate(); err != nil {
		return usageError{err}
	}
	_, outlives, err := c.address(c.Env)
	switch {
	case err != nil:
		return err
	case outlives && c.Out == "" && !c.DryRun:
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
		Client: server.Client, Logger: progress.Logger(), Observer: counter.Observe,
		Policies: policies, Prefix: c.Prefix,
	})
	if err != nil {
		return inputError{err}
	}
	caller, err := call.New(call.Config{
		Concurrency: c.Concurrency, Headers: headers, Keep: c.Keep, Limiter: limiter,
		Logger: progress.Logger(), Timeout: c.Timeout,
	})
	if err != nil {
		return err
	}
	if err := checkJobs(ctx, limiter, c.Policies, list); err != nil {
		return err
	}
	// --out is opened, and so read, under the lock: until then another process may add results.
	lock, err := c.lockJobs(ctx, server.Client, progress)
	if err != nil {
		return err
	}
	ctx = lock.Hold(ctx)
	defer lock.Release(ctx)
	results := jobs.NewLog(c.Stdout)
	if c.Out != "" {
		if results, err = jobs.OpenLog(c.Out); err != nil {
			return badInput("--out: %w", err)
		}
		defer results.Close()
	}

	// Operators may pause the file's policies, and override them for single tenants.
	defer control.StoreOf(limiter).Follow(ctx, control.FollowConfig{KeepPolicies: true}).Close()
	defer counter.Start(limiter)()
	d := &drain.Drain{
		Caller: caller, Client: server.Client, Concurrency: c.Concurrency, Jobs: list, Limiter: limiter,
		Name: c.jobsName(), Progress: progress, Results: results, RetryFailed: c.RetryFailed,
	}
	summary, err := d.Run(ctx)
	if err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return c.report(summary, progress, err)
}

// report says how a run ended. `interrupted` is nil if all jobs are done.
func (c *RunCommand) report(s drain.Summary, progress *drain.Progress, interrupted error) error {
	fmt.Fprintf(c.Stderr, "%d jobs: %d succeeded, %d failed, in %.1f s\n", s.Jobs, s.Succeeded, s.Failed, s.Seconds)
	err := c.showAndFailIf(s.Failed > 0 && interrupted == nil, s, func() {})
	if err != nil || interrupted == nil {
		return err
	}
	next := "the same command goes on from here"
	if c.Out == "" {
		next = "without --out nothing of this is kept, and the same command starts over"
	}
	progress.Say("stopped with %d of %d jobs done: %s", s.Done(), s.Jobs, next)
	return interrupted
}

// checkJobs returns the errors of jobs that can never be granted. It needs no Redis.
func checkJobs(ctx context.Context, limiter *throttle.Limiter, policyFile string, list []jobs.Job) error {
	var errs []error
	checked := map[string]error{} // many jobs make the same request
	for _, job := range list {
		policy, ok := limiter.Match(job.Type, false)
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

// lockLease is how long the jobs of a process that was killed stay locked.
const lockLease = 10 * time.Second

// lockJobs waits up to 15 s until no other process works on the jobs. While its reservation is held, others wait.
func (c *RunCommand) lockJobs(
	ctx context.Context, client redis.UniversalClient, progress *drain.Progress,
) (throttle.Reservation, error) {
	one := throttle.Policy{Name: "sluice-run", Windows: []throttle.Window{
		{Name: "processes", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Lease: lockLease},
	}}
	limiter, err := throttle.New(throttle.Config{
		Client: client, Logger: progress.Logger(), Policies: []throttle.Policy{one}, Prefix: c.Prefix,
	})
	if err != nil {
		return throttle.Reservation{}, err
	}
	r := throttle.Request{MaxWait: -1, Policy: one.Name, Tenant: c.jobsName()}
	granted, err := limiter.Wait(ctx, r)
	if errors.As(err, new(*throttle.DeniedError)) {
		progress.Say("another process worked on these jobs up to now: waiting until it is known to be gone")
		r.MaxWait = lockLease + 5*time.Second
		granted, err = limiter.Wait(ctx, r)
	}
	if errors.As(err, new(*throttle.DeniedError)) {
		return throttle.Reservation{}, badInput("--jobs %s: another process works on these jobs: let it end", c.Jobs)
	}
	return granted.Reservation, err
}

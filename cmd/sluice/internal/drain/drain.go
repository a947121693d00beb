// Package drain makes the calls of jobs as their policies allow, until each job has its result.
package drain

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
)

const (
	shutdownTimeout = 10 * time.Second    // for calls under way when the drain is interrupted
	begunFor        = 30 * 24 * time.Hour // without a drain, before Redis forgets which calls began
)

// A Drain makes the calls of jobs until each has its result. Of each tenant's jobs by one policy, the first
// one waits in line. Results say which jobs are done: by them a drain of the same jobs goes on where one that was
// killed had come to.
type Drain struct {
	Caller      *call.Caller
	Client      redis.UniversalClient
	Concurrency int
	Jobs        []jobs.Job
	Limiter     *throttle.Limiter
	Progress    *Progress
	Name        string // of the jobs: no other drain works on them
	Results     *jobs.Log
	RetryFailed bool // jobs that failed before run again

	begun   time.Time
	slots   chan struct{}  // one for each call that may begin
	stop    func(error)    // ends the drain, with what keeps it from going on
	working sync.WaitGroup // all that a Run has started

	mu     sync.Mutex
	counts Counts
	open   int // jobs without a result
}

// A work is a job without a result. One goroutine at a time has it.
type work struct {
	job     *jobs.Job
	policy  throttle.Policy
	request throttle.Request
	result  jobs.Result // what is known so far
	used    int         // retries, those of earlier drains included

	refusedSince time.Time // by the upstream, since the job last failed by something else; zero if it was not
}

// A Summary is the result of a drain. Its Counts are of all jobs.
type Summary struct {
	Counts
	DoneBefore int     `json:"done_before"` // of these, when the drain began
	Seconds    float64 `json:"seconds"`
}

// Counts are those of the jobs so far, with those that were done before the drain began.
type Counts struct {
	Jobs      int `json:"jobs"`
	Succeeded int `json:"succeeded"`
	Failed    int `json:"failed"`
}

// Done is the number of jobs that have a result.
func (c Counts) Done() int { return c.Succeeded + c.Failed }

func (c *Counts) ended(r jobs.Result) {
	if r.Error == "" {
		c.Succeeded++
	} else {
		c.Failed++
	}
}

// errDone ends a drain whose jobs all have results.
var errDone = errors.New("all jobs are done")

// Run returns when every job has its result. Otherwise the error says why not: the context's cause if
// that ended; then the calls under way have ended, or were stopped.
func (d *Drain) Run(ctx context.Context) (Summary, error) {
	start := time.Now()
	working, stop := context.WithCancelCause(ctx)
	d.stop = stop
	calls, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	defer context.AfterFunc(working, func() { time.AfterFunc(shutdownTimeout, abort) })()
	flows, err := d.prepare(ctx)
	if err != nil {
		return Summary{}, err
	}
	before := d.Counts()
	if before.Done() < before.Jobs {
		d.Progress.Begin(before)
		for _, flow := range flows {
			d.working.Go(func() { d.serve(working, calls, flow) })
		}
		for working.Err() == nil {
			d.Progress.Show(d.Counts())
			pause(working, showEvery)
		}
		if ctx.Err() != nil {
			d.Progress.Say("stopping: calls under way have %v to end", shutdownTimeout)
		}
		d.working.Wait()
		d.Progress.End(d.Counts())
	}
	took := time.Since(start).Round(time.Millisecond).Seconds()
	s := Summary{Counts: d.Counts(), DoneBefore: before.Done(), Seconds: took}
	if s.Done() == s.Jobs {
		return s, d.Client.Del(calls, d.begunKey()).Err()
	}
	return s, context.Cause(working)
}

// prepare returns the work that is left: in the order of jobs, by policy and tenant.
func (d *Drain) prepare(ctx context.Context) (map[[2]string][]*work, error) {
	begun, err := d.Client.HGetAll(ctx, d.begunKey()).Result()
	if err != nil {
		return nil, err
	}
	d.begun, d.counts.Jobs = time.Now(), len(d.Jobs)
	d.slots = make(chan struct{}, d.Concurrency)
	for range d.Concurrency {
		d.slots <- struct{}{}
	}
	var lost []*work
	flows, repeated := map[[2]string][]*work{}, 0
	for i := range d.Jobs {
		job := &d.Jobs[i]
		r, done := d.Results.Known[job.ID]
		repeat := done && d.RetryFailed && r.Error != ""
		if done && !repeat {
			d.counts.ended(r)
			continue
		}
		d.open++
		policy, _ := d.Limiter.Match(job.Type, false)
		w := &work{job: job, policy: policy, result: jobs.Result{ID: job.ID, Tenant: job.Tenant}, request: throttle.Request{
			Cost: job.Cost, MaxHold: d.Caller.Client.Timeout, Policy: policy.Name, Tenant: job.Tenant,
		}}
		if repeat {
			repeated++
		} else {
			w.used, _ = strconv.Atoi(begun[job.ID])
		}
		if w.used > job.MaxRetry {
			lost = append(lost, w)
		} else {
			flow := [2]string{policy.Name, job.Tenant}
			flows[flow] = append(flows[flow], w)
		}
	}
	if repeated > 0 {
		d.Progress.Say("%d failed jobs run again", repeated)
	}
	if c := d.counts; c.Failed > 0 {
		d.Progress.Say("%d of %d jobs were done before, %d of them failed: --retry-failed runs those again",
			c.Done(), c.Jobs, c.Failed)
	} else if c.Done() > 0 {
		d.Progress.Say("%d of %d jobs were done before", c.Done(), c.Jobs)
	}
	for _, w := range lost {
		d.end(w, errors.New("an earlier run ended during the call, and no retry is left: the call may have been made"))
	}
	return flows, nil
}

// begunKey holds for each job how many of its retries are used if the end of its last call is not seen.
func (d *Drain) begunKey() string {
	return d.Limiter.Config().Prefix + "sluice:{run:" + d.Name + "}:begun"
}

// noteBegun stores that value.
func (d *Drain) noteBegun(ctx context.Context, w *work, used int) error {
	_, err := d.Client.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.HSet(ctx, d.begunKey(), w.job.ID, used)
		p.Expire(ctx, d.begunKey(), begunFor)
		return nil
	})
	return err
}

// Counts are as of now.
func (d *Drain) Counts() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

// end writes the result of a job that succeeded, or failed by an error.
func (d *Drain) end(w *work, failed error) {
	if failed != nil {
		w.result.Error = failed.Error()
	}
	if err := d.Results.Add(w.result); err != nil {
		d.stop(err)
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts.ended(w.result)
	if d.open--; d.open == 0 {
		d.stop(errDone)
	}
}

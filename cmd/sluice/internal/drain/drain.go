// Package drain makes the calls of jobs when their policies allow it, until each job has its result.
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
	begunTTL        = 30 * 24 * time.Hour // of the record of begun calls, since the last of them
)

// A Drain makes the calls of jobs until each has its result. Each tenant has one new job at a time in a policy's line,
// and jobs that try again. A job with a result is done: so a drain of the same jobs continues a drain that was killed.
type Drain struct {
	Caller      *call.Caller
	Client      redis.UniversalClient
	Concurrency int
	Jobs        []jobs.Job
	Limiter     *throttle.Limiter
	Progress    *Progress
	Name        string // of the jobs; no two drains of one name may run at a time
	Results     *jobs.Log
	RetryFailed bool // run jobs again that failed in an earlier drain

	begun   time.Time
	slots   chan struct{}  // has a value for each call that may begin
	stop    func(error)    // ends the drain, for the reason given
	running sync.WaitGroup // all goroutines of a Run

	mu     sync.Mutex
	counts Counts
}

// An openJob is a job without a result. One goroutine at a time has it.
type openJob struct {
	job     *jobs.Job
	policy  throttle.Policy
	request throttle.Request
	result  jobs.Result // as far as it is known
	retries int         // used, also by earlier drains

	refusedSince time.Time // the first refusal by the upstream after the last other failure; zero if there was none
}

// A Summary is the result of a drain.
type Summary struct {
	Counts
	DoneBefore int     `json:"done_before"` // jobs with a result before the first call of this drain
	Seconds    float64 `json:"seconds"`
}

// Counts are of all jobs, also of jobs that had their results when the drain began.
type Counts struct {
	Jobs      int `json:"jobs"`
	Succeeded int `json:"succeeded"`
	Failed    int `json:"failed"`
}

// Done is the number of jobs that have a result.
func (c Counts) Done() int { return c.Succeeded + c.Failed }

func (c *Counts) add(r jobs.Result) {
	if r.Error == "" {
		c.Succeeded++
	} else {
		c.Failed++
	}
}

// errDone ends a drain whose jobs all have results.
var errDone = errors.New("all jobs are done")

// A flowKey names a flow: the jobs of one policy and tenant.
type flowKey struct{ policy, tenant string }

// Run returns when every job has its result, or with an error. If that is the context's cause, the
// calls under way have ended, or were stopped.
func (d *Drain) Run(ctx context.Context) (Summary, error) {
	start := time.Now()
	beginning, stop := context.WithCancelCause(ctx) // ends when no more calls begin
	d.stop = stop
	calls, abort := context.WithCancel(context.WithoutCancel(ctx)) // for calls under way, which may end later
	defer abort()
	defer context.AfterFunc(beginning, func() { time.AfterFunc(shutdownTimeout, abort) })()
	flows, err := d.prepare(ctx)
	if err != nil {
		return Summary{}, err
	}
	before := d.Counts()
	if before.Done() < before.Jobs {
		d.Progress.Begin(before)
		for _, flow := range flows {
			d.running.Go(func() { d.serve(beginning, calls, flow) })
		}
		for beginning.Err() == nil {
			d.Progress.Show(d.Counts())
			sleep(beginning, showEvery)
		}
		if ctx.Err() != nil {
			d.Progress.Say("stopping: calls under way have %v to end", shutdownTimeout)
		}
		d.running.Wait()
		d.Progress.End(d.Counts())
	}
	s := Summary{Counts: d.Counts(), DoneBefore: before.Done(), Seconds: time.Since(start).Round(time.Millisecond).Seconds()}
	if s.Done() == s.Jobs {
		return s, d.Client.Del(calls, d.begunKey()).Err()
	}
	return s, context.Cause(beginning)
}

// prepare returns the open jobs of each flow, in the order of Jobs. It ends jobs whose last try began in an earlier
// drain.
func (d *Drain) prepare(ctx context.Context) (map[flowKey][]*openJob, error) {
	begun, err := d.Client.HGetAll(ctx, d.begunKey()).Result() // by job ID: its retries
	if err != nil {
		return nil, err
	}
	d.begun, d.counts.Jobs = time.Now(), len(d.Jobs)
	d.slots = make(chan struct{}, d.Concurrency)
	for range d.Concurrency {
		d.slots <- struct{}{}
	}
	var spent []*openJob // whose last try began
	flows, repeated := map[flowKey][]*openJob{}, 0
	for i := range d.Jobs {
		job := &d.Jobs[i]
		r, done := d.Results.Known[job.ID]
		repeat := done && d.RetryFailed && r.Error != ""
		if done && !repeat {
			d.counts.add(r)
			continue
		}
		policy, _ := d.Limiter.Match(job.Type, false)
		j := &openJob{job: job, policy: policy, result: jobs.Result{ID: job.ID, Tenant: job.Tenant}, request: throttle.Request{
			Cost: job.Cost, MaxHold: d.Caller.Client.Timeout, Policy: policy.Name, Tenant: job.Tenant,
		}}
		if repeat {
			repeated++
		} else {
			j.retries, _ = strconv.Atoi(begun[job.ID])
		}
		if j.retries > job.MaxRetry {
			spent = append(spent, j)
		} else {
			key := flowKey{policy.Name, job.Tenant}
			flows[key] = append(flows[key], j)
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
	for _, j := range spent {
		d.end(j, errors.New("an earlier run ended during the call, and no retry is left: the call may have been made"))
	}
	return flows, nil
}

// begunKey returns the key of a hash: for each job whose call began, how many retries count as used if the drain dies
// during that call.
func (d *Drain) begunKey() string {
	return d.Limiter.Config().Prefix + "sluice:{run:" + d.Name + "}:begun"
}

// noteBegun stores a job's value in the hash of begunKey.
func (d *Drain) noteBegun(ctx context.Context, j *openJob, used int) error {
	_, err := d.Client.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.HSet(ctx, d.begunKey(), j.job.ID, used)
		p.Expire(ctx, d.begunKey(), begunTTL)
		return nil
	})
	return err
}

// Counts returns the counts as of now.
func (d *Drain) Counts() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

// end writes the result of a job. The job failed if there is an error.
func (d *Drain) end(j *openJob, failed error) {
	if failed != nil {
		j.result.Error = failed.Error()
	}
	if err := d.Results.Add(j.result); err != nil {
		d.stop(err)
		return
	}
	_ = d.Client.HDel(context.Background(), d.begunKey(), j.job.ID).Err() // a run with another log begins anew
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.counts.add(j.result); d.counts.Done() == d.counts.Jobs {
		d.stop(errDone)
	}
}

// Package drain runs jobs through a throttled asynq queue until each has its result.
package drain

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

const (
	joinTimeout     = 10 * time.Second // for the limiter: jobs have time, and places in line are worth it
	shutdownTimeout = 10 * time.Second // for calls in flight when the drain is interrupted
	stalledAfter    = time.Minute      // without any event, before jobs are enqueued that may be lost
	takenBackAfter  = 2 * time.Second  // before it is seen what asynq's recoverer did at the start
)

// A Drain runs jobs through a throttled asynq queue until each has its result. A job's ID is its
// task's. Results say which jobs are done: by them a drain of the same jobs goes on where one that
// was killed had come to.
type Drain struct {
	Caller      *call.Caller
	Client      redis.UniversalClient
	Concurrency int
	Jobs        []jobs.Job
	Limiter     *throttle.Limiter
	Progress    *Progress
	Queue       string // nobody else's
	Redis       asynq.RedisConnOpt
	Results     *jobs.Log
	RetryFailed bool // jobs that failed before run again

	again     map[string]bool // those jobs, whose tasks may be archived
	broken    chan error      // the drain cannot go on
	done      chan struct{}
	inspector *asynq.Inspector
	jobs      map[string]*jobs.Job

	mu     sync.Mutex
	counts Counts
	open   map[string]*jobs.Result // of the jobs that have not ended: what is known so far, by ID
}

// A Summary is the result of a drain. Its Counts are of all jobs.
type Summary struct {
	Counts
	DoneBefore int     `json:"done_before"` // of these, when the drain began
	Seconds    float64 `json:"seconds"`
}

// Counts are events of a drain so far. Succeeded and Failed include jobs that were done before
// it began.
type Counts struct {
	Jobs      int `json:"jobs"`
	Succeeded int `json:"succeeded"`
	Failed    int `json:"failed"`
	Denials   int `json:"denials"`
	Dequeues  int `json:"dequeues"`
}

// A payload is a task's.
type payload struct {
	jobs.Job
	EnqueuedAt time.Time `json:"enqueued_at"`
}

// Run returns when every job has its result. Otherwise the error says why not: the context's
// cause if that ended; then the calls in flight have ended or were given back.
func (d *Drain) Run(ctx context.Context) (Summary, error) {
	d.prepare()
	start, before := time.Now(), d.Counts()
	d.sayBefore(before)
	var err error
	if before.Done() < before.Jobs {
		d.Progress.Begin(before)
		err = d.serve(ctx)
		d.Progress.End(d.Counts())
	}
	took := time.Since(start).Round(time.Millisecond).Seconds()
	return Summary{Counts: d.Counts(), DoneBefore: before.Done(), Seconds: took}, err
}

// sayBefore reports the jobs that need not run again.
func (d *Drain) sayBefore(c Counts) {
	if c.Done() == 0 {
		return
	}
	failed := ""
	if c.Failed > 0 {
		failed = fmt.Sprintf(", %d of them failed: --retry-failed runs those again", c.Failed)
	}
	d.Progress.Say("%d of %d jobs were done before%s", c.Done(), c.Jobs, failed)
}

func (d *Drain) prepare() {
	d.again = map[string]bool{}
	for _, job := range d.Jobs {
		if r, _ := d.Results.Get(job.ID); d.RetryFailed && r.Error != "" {
			d.again[job.ID] = true
		}
	}
	if len(d.again) > 0 {
		d.Results.Reopen()
		d.Progress.Say("%d failed jobs run again", len(d.again))
	}
	d.broken = make(chan error, 1)
	d.done = make(chan struct{})
	d.inspector = asynq.NewInspectorFromRedisClient(d.Client)
	d.jobs = make(map[string]*jobs.Job, len(d.Jobs))
	d.open = map[string]*jobs.Result{}
	d.counts.Jobs = len(d.Jobs)
	for i := range d.Jobs {
		job := &d.Jobs[i]
		d.jobs[job.ID] = job
		if r, ok := d.Results.Get(job.ID); ok {
			d.counts.ended(r)
		} else {
			d.open[job.ID] = &jobs.Result{ID: job.ID, Tenant: job.Tenant}
		}
	}
}

func (c *Counts) ended(r jobs.Result) {
	if r.Error == "" {
		c.Succeeded++
	} else {
		c.Failed++
	}
}

// Done is the number of jobs that have a result.
func (c Counts) Done() int { return c.Succeeded + c.Failed }

// Counts are as of now.
func (d *Drain) Counts() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

// serve works until all jobs are done, the context ends or the drain cannot go on.
func (d *Drain) serve(ctx context.Context) error {
	stranded, err := d.stranded(ctx)
	if err != nil {
		return err
	}
	server, err := worker.NewServer(d.Redis, asynq.Config{
		Concurrency:     d.Concurrency,
		ErrorHandler:    d,
		LogLevel:        asynq.ErrorLevel,
		Logger:          asynqLogger{d.Progress},
		Queues:          map[string]int{d.Queue: 1},
		RetryDelayFunc:  call.RetryDelay,
		ShutdownTimeout: shutdownTimeout,
	}, worker.Config{
		Limiter:    d.Limiter,
		Logger:     d.Progress.Logger(),
		OnDecision: d.decided,
		Unmatched:  worker.UnmatchedReject,
	})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	client, err := worker.NewClient(d.Redis, worker.ClientConfig{Limiter: d.Limiter, LimiterTimeout: joinTimeout})
	if err != nil {
		return err
	}
	defer client.Close()
	if err := server.Start(asynq.HandlerFunc(d.process)); err != nil {
		return err
	}

	enqueueing, stop := context.WithCancel(ctx)
	var enqueued sync.WaitGroup
	defer enqueued.Wait()
	defer stop()
	enqueued.Go(func() { d.expect(enqueueing, client) })
	enqueued.Go(func() {
		if err := d.enqueue(enqueueing, client, d.openJobs()); err != nil {
			d.breakOff(err)
		}
	})

	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	last, lookAt := d.Counts(), time.Now().Add(stalledAfter)
	takenBack := time.After(takenBackAfter)
	for {
		select {
		case <-d.done:
			return nil
		case <-ctx.Done():
			d.Progress.Say("stopping: calls under way have %v to end", shutdownTimeout)
			return context.Cause(ctx)
		case err := <-d.broken:
			return err
		case <-takenBack:
			err = d.enqueue(ctx, client, stranded)
		case <-tick.C:
		}
		now := d.Counts()
		d.Progress.Show(now)
		if time.Now().After(lookAt) {
			err = d.enqueue(ctx, client, d.openJobs())
		} else if now == last && err == nil {
			continue
		}
		if err != nil {
			d.Progress.Say("%v", err)
			err = nil
		}
		last, lookAt = now, time.Now().Add(stalledAfter)
	}
}

// openJobs returns the jobs that have not ended, in their order.
func (d *Drain) openJobs() (open []*jobs.Job) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.Jobs {
		if d.open[d.Jobs[i].ID] != nil {
			open = append(open, &d.Jobs[i])
		}
	}
	return open
}

// breakOff ends the drain with the first of such errors.
func (d *Drain) breakOff(err error) {
	select {
	case d.broken <- err:
	default:
	}
}

// asynqLogger passes on what asynq says of errors, such as those of Redis.
type asynqLogger struct{ to *Progress }

func (l asynqLogger) Debug(...any)      {}
func (l asynqLogger) Info(...any)       {}
func (l asynqLogger) Warn(...any)       {}
func (l asynqLogger) Error(args ...any) { l.to.Say("%s", fmt.Sprint(args...)) }
func (l asynqLogger) Fatal(args ...any) { l.to.Say("%s", fmt.Sprint(args...)) }

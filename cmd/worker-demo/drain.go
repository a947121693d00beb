package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

const (
	retention       = 7 * 24 * time.Hour // for which Redis knows that a job succeeded
	shutdownTimeout = 10 * time.Second   // for calls in flight when the drain is interrupted
	stalledAfter    = time.Minute        // without any event, before the queue is looked through
	takenBackAfter  = 2 * time.Second    // before it is looked through for what asynq's recoverer did at the start
)

// A Drain runs jobs through a throttled asynq queue until each has its result, which is what
// both the scenario and "run" do. A job's ID is its task's. What is known of a job is kept with
// its task, so that a drain of the same jobs goes on where one that was killed had come to.
type Drain struct {
	Caller      *Caller
	Client      redis.UniversalClient
	Concurrency int
	Jobs        []Job
	Limiter     *throttle.Limiter
	OnDecision  func(job string, d throttle.Decision) // may be nil
	Progress    *Progress
	Queue       string // nobody else's
	Redis       asynq.RedisConnOpt
	Results     *ResultLog

	broken    chan error // the drain cannot go on
	done      chan struct{}
	inspector *asynq.Inspector
	jobs      map[string]*Job

	mu     sync.Mutex
	counts Counts
	open   map[string]*Result // of the jobs that have not ended: what is known so far, by ID
	used   map[windowOf]WindowUse
}

// Counts are events of a drain so far. Succeeded and Failed include jobs that were done before
// it began.
type Counts struct {
	Jobs, Succeeded, Failed int
	Dequeues, Denials       int
}

// A record is kept with a job's task, as asynq's result of the task.
type record struct {
	Result
	Done bool `json:"done"` // the result is final
}

// A payload is a task's.
type payload struct {
	Job
	EnqueuedAt time.Time `json:"enqueued_at"`
}

// Run returns when every job has its result. Otherwise the error says why not: the context's
// cause if that ended; then the calls in flight have ended or were given back.
func (d *Drain) Run(ctx context.Context) (Summary, error) {
	d.prepare()
	start := time.Now()
	callsBefore, counted := commandCalls(ctx, d.Client)
	missing, active, err := d.reconcile()
	if err != nil {
		return Summary{}, err
	}
	before := d.Counts()
	if before.Done() < before.Jobs {
		if err := d.expireLeases(ctx, active); err != nil {
			return Summary{}, err
		}
		d.Progress.Begin(before)
		err = d.serve(ctx, missing, len(active) > 0)
		d.Progress.End(d.Counts())
	}
	s := d.summarize(time.Since(start), before)
	if callsAfter, ok := commandCalls(context.WithoutCancel(ctx), d.Client); ok && counted {
		s.setRedisCalls(callsAfter - callsBefore)
	}
	return s, err
}

func (d *Drain) prepare() {
	d.broken = make(chan error, 1)
	d.done = make(chan struct{})
	d.inspector = asynq.NewInspectorFromRedisClient(d.Client)
	d.jobs = make(map[string]*Job, len(d.Jobs))
	d.open = map[string]*Result{}
	d.used = map[windowOf]WindowUse{}
	d.counts.Jobs = len(d.Jobs)
	for i := range d.Jobs {
		job := &d.Jobs[i]
		d.jobs[job.ID] = job
		if r, ok := d.Results.Get(job.ID); ok {
			d.counts.ended(r)
		} else {
			d.open[job.ID] = &Result{ID: job.ID, Tenant: job.Tenant}
		}
	}
}

func (c *Counts) ended(r Result) {
	if r.Error == "" {
		c.Succeeded++
	} else {
		c.Failed++
	}
}

// Done is how many jobs have their result.
func (c Counts) Done() int { return c.Succeeded + c.Failed }

// Counts are as of now.
func (d *Drain) Counts() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

// serve works until all jobs are done, the context ends or the drain cannot go on.
func (d *Drain) serve(ctx context.Context, missing []*Job, stranded bool) error {
	server, err := worker.NewServer(d.Redis, asynq.Config{
		Concurrency:     d.Concurrency,
		LogLevel:        asynq.ErrorLevel,
		Logger:          asynqLogger{d.Progress},
		Queues:          map[string]int{d.Queue: 1},
		RetryDelayFunc:  retryDelay,
		ShutdownTimeout: shutdownTimeout,
	}, worker.Config{
		Limiter:    d.Limiter,
		Logger:     slog.New(slog.NewTextHandler(d.Progress, nil)),
		OnDecision: d.decided,
		Unmatched:  worker.UnmatchedReject,
	})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	client, err := worker.NewClient(d.Redis, worker.ClientConfig{Limiter: d.Limiter})
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
	enqueued.Go(func() {
		if err := d.enqueue(enqueueing, client, missing); err != nil {
			d.breakOff(err)
		}
	})

	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	last, lookAt := d.Counts(), time.Now().Add(stalledAfter)
	var takenBack <-chan time.Time
	if stranded {
		takenBack = time.After(takenBackAfter)
	}
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
			lookAt = time.Now()
		case <-tick.C:
		}
		now := d.Counts()
		d.Progress.Show(now)
		if time.Now().After(lookAt) {
			missing, _, err := d.reconcile()
			if err == nil {
				err = d.enqueue(ctx, client, missing)
			}
			if err != nil {
				d.Progress.Say("%v", err)
			}
		} else if now == last {
			continue
		}
		last, lookAt = now, time.Now().Add(stalledAfter)
	}
}

// breakOff ends the drain with the first of such errors.
func (d *Drain) breakOff(err error) {
	select {
	case d.broken <- err:
	default:
	}
}

// enqueueMost is how many jobs are enqueued at once.
const enqueueMost = 500

// enqueue enqueues jobs that take their place in line at once, and then those of a plain client.
func (d *Drain) enqueue(ctx context.Context, client *worker.Client, jobs []*Job) error {
	var joining, plain []*Job
	for _, job := range jobs {
		if job.plain {
			plain = append(plain, job)
		} else {
			joining = append(joining, job)
		}
	}
	for batch := range slices.Chunk(joining, enqueueMost) {
		tasks := make([]*asynq.Task, len(batch))
		for i, job := range batch {
			var err error
			if tasks[i], err = d.task(job); err != nil {
				return err
			}
		}
		for i, result := range client.EnqueueBatch(ctx, tasks) {
			if ctx.Err() != nil {
				return nil // whoever ended it knows
			}
			if err := enqueued(batch[i], result.Err); err != nil {
				return err
			}
		}
	}
	asynqs := asynq.NewClientFromRedisClient(d.Client)
	for _, job := range plain {
		task, err := d.task(job)
		if err != nil {
			return err
		}
		_, err = asynqs.EnqueueContext(ctx, task)
		if ctx.Err() != nil {
			return nil
		}
		if err := enqueued(job, err); err != nil {
			return err
		}
	}
	return nil
}

func (d *Drain) task(job *Job) (*asynq.Task, error) {
	body, err := json.Marshal(payload{*job, time.Now()})
	if err != nil {
		return nil, err
	}
	return worker.NewTask(worker.Identity{Cost: job.Cost, Tenant: job.Tenant}, job.Type, body,
		asynq.MaxRetry(job.MaxRetry), asynq.Queue(d.Queue), asynq.Retention(retention), asynq.TaskID(job.ID)), nil
}

// enqueued takes a job for enqueued that is there already.
func enqueued(job *Job, err error) error {
	if err == nil || errors.Is(err, asynq.ErrTaskIDConflict) {
		return nil
	}
	return fmt.Errorf("%s: enqueueing job %q: %w", job.at, job.ID, err)
}

// decided counts what the throttle decided of one task that a worker picked up.
func (d *Drain) decided(ctx context.Context, _ *asynq.Task, decision throttle.Decision) {
	id, _ := asynq.GetTaskID(ctx)
	if d.OnDecision != nil {
		d.OnDecision(id, decision)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts.Dequeues++
	if !decision.Granted {
		d.counts.Denials++
	}
	if r := d.open[id]; r != nil {
		r.Wakes++
	}
	for _, w := range decision.Windows {
		key := windowOf{decision.Policy, w.Name, w.Scope.String()}
		d.used[key] = WindowUse{
			Policy: key.policy, Window: key.window, Scope: key.scope,
			Limit: w.Limit, MaxUsed: max(w.Used, d.used[key].MaxUsed), PeriodMS: milliseconds(w.Period),
		}
	}
}

// process is asynq's handler of a task that got through.
func (d *Drain) process(ctx context.Context, t *asynq.Task) error {
	id, _ := asynq.GetTaskID(ctx)
	if d.jobs[id] == nil {
		return fmt.Errorf("the jobs hold no %q any more: %w", id, asynq.RevokeTask)
	}
	var p payload
	if err := json.Unmarshal(t.Payload(), &p); err != nil {
		return fmt.Errorf("payload of job %q: %w", id, err)
	}
	r, open := d.begin(id, p)
	if !open {
		return nil // it has its line, and asynq did not come to know
	}
	// Kept before the call, so that whoever comes after a crash knows that it was begun.
	if err := keep(t, record{Result: r}); err != nil {
		return err
	}
	var err error
	r.Status, err = d.Caller.Call(ctx, p.Job)
	if err == nil {
		return d.end(t, r)
	}
	r.Error = err.Error()
	var failure *CallError
	switch {
	case !errors.As(err, &failure):
		return err // the task was taken away, and runs again
	case failure.Refused:
		// All calls by the policy pause, and the job keeps its retries.
		return fmt.Errorf("%w: %w", err, worker.RetryAfter(failure.RetryAfter))
	case !failure.Retryable:
		err = fmt.Errorf("%w: %w", err, asynq.SkipRetry)
	case mayRetry(ctx):
		return err
	}
	return errors.Join(err, d.end(t, r))
}

func mayRetry(ctx context.Context) bool {
	retried, _ := asynq.GetRetryCount(ctx)
	most, _ := asynq.GetMaxRetry(ctx)
	return retried < most
}

// begin notes that a call begins, and returns what is known then.
func (d *Drain) begin(id string, p payload) (begun Result, open bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.open[id]
	if r == nil {
		return Result{}, false
	}
	r.StartedAt = time.Now()
	if r.Attempts == 0 {
		r.WaitedMS = r.StartedAt.Sub(p.EnqueuedAt).Milliseconds()
	}
	r.Attempts++
	return *r, true
}

// end keeps the result with the task and then writes it: a line that is missing after a crash
// can be written from what was kept.
func (d *Drain) end(t *asynq.Task, r Result) error {
	if err := keep(t, record{r, true}); err != nil {
		d.Progress.Say("job %q: %v", r.ID, err)
	}
	return d.write(r)
}

func keep(t *asynq.Task, r record) error {
	data, err := json.Marshal(r)
	if err == nil {
		_, err = t.ResultWriter().Write(data)
	}
	return err
}

// write adds the result to the log, unless it is there.
func (d *Drain) write(r Result) error {
	added, err := d.Results.Add(r)
	if err != nil {
		d.breakOff(err)
	}
	if err != nil || !added || d.jobs[r.ID] == nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, r.ID)
	d.counts.ended(r)
	if len(d.open) == 0 {
		close(d.done)
	}
	return nil
}

// reconcile looks through the queue: it takes the results of jobs that ended without a line,
// removes tasks that wait but must not run, and tells which jobs have no task and which tasks
// are active.
func (d *Drain) reconcile() (missing []*Job, active []string, err error) {
	tasks, err := d.listTasks()
	if err != nil {
		return nil, nil, err
	}
	removed := 0
	for id, info := range tasks {
		job := d.jobs[id]
		waits := info.State == asynq.TaskStatePending || info.State == asynq.TaskStateScheduled || info.State == asynq.TaskStateRetry
		var known record
		if len(info.Result) > 0 {
			if err := json.Unmarshal(info.Result, &known); err != nil {
				return nil, nil, badInput("queue %q: task %q: its result is not ours: %w: use another -queue", d.Queue, id, err)
			}
		}
		if info.State == asynq.TaskStateActive {
			active = append(active, id)
		}
		if job != nil {
			if err := d.recall(info, known); err != nil {
				return nil, nil, err
			}
		}
		_, done := d.Results.Get(id)
		if waits && (job == nil || done || !sameJob(info.Payload, job)) {
			if err := d.inspector.DeleteTask(d.Queue, id); err != nil && !errors.Is(err, asynq.ErrTaskNotFound) {
				return nil, nil, fmt.Errorf("queue %q: removing task %q: %w", d.Queue, id, err)
			}
			delete(tasks, id)
			if !done {
				removed++
			}
		}
	}
	if removed > 0 {
		d.Progress.Say("removed %d jobs of an earlier run from queue %q: the jobs do not hold them any more, or hold them changed", removed, d.Queue)
	}
	for i := range d.Jobs {
		job := &d.Jobs[i]
		if _, done := d.Results.Get(job.ID); !done && tasks[job.ID] == nil {
			missing = append(missing, job)
		}
	}
	return missing, active, nil
}

// recall takes over what a task tells of its job.
func (d *Drain) recall(info *asynq.TaskInfo, known record) error {
	if known.Done || info.State == asynq.TaskStateCompleted {
		known.ID = info.ID
		return d.write(known.Result)
	}
	d.mu.Lock()
	r := d.open[info.ID]
	if r != nil && known.Attempts > r.Attempts {
		known.Wakes = max(known.Wakes, r.Wakes)
		*r = known.Result
	}
	d.mu.Unlock()
	if r == nil || info.State != asynq.TaskStateArchived {
		return nil
	}
	// A worker died with it on its last try. If no call was begun, nothing was tried.
	if known.Attempts == 0 {
		if err := d.inspector.RunTask(d.Queue, info.ID); err != nil {
			return fmt.Errorf("queue %q: running task %q again: %w", d.Queue, info.ID, err)
		}
		return nil
	}
	known.Error = fmt.Sprintf("%s, and no retry is left: the call may have been made", info.LastErr)
	return d.write(known.Result)
}

func sameJob(data []byte, job *Job) bool {
	var p payload
	if json.Unmarshal(data, &p) != nil {
		return false
	}
	a, errA := json.Marshal(p.Job)
	b, errB := json.Marshal(job)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

// listTasks returns all tasks of the queue, by ID. It may miss one that moves meanwhile: asynq
// refuses to take it a second time.
func (d *Drain) listTasks() (map[string]*asynq.TaskInfo, error) {
	const page = 1000
	tasks := map[string]*asynq.TaskInfo{}
	for _, list := range []func(string, ...asynq.ListOption) ([]*asynq.TaskInfo, error){
		d.inspector.ListPendingTasks, d.inspector.ListActiveTasks, d.inspector.ListScheduledTasks,
		d.inspector.ListRetryTasks, d.inspector.ListArchivedTasks, d.inspector.ListCompletedTasks,
	} {
		for n := 1; ; n++ {
			infos, err := list(d.Queue, asynq.PageSize(page), asynq.Page(n))
			if errors.Is(err, asynq.ErrQueueNotFound) {
				return tasks, nil
			}
			if err != nil {
				return nil, fmt.Errorf("queue %q: %w", d.Queue, err)
			}
			for _, info := range infos {
				tasks[info.ID] = info
			}
			if len(infos) < page {
				break
			}
		}
	}
	return tasks, nil
}

// expireLeases ends the leases of tasks whose worker is known to be gone, so that asynq's
// recoverer takes them back when the server starts, and not a minute or two later. There is no
// call for this in asynq: the key is that of its internal/base.LeaseKey.
func (d *Drain) expireLeases(ctx context.Context, active []string) error {
	if len(active) == 0 {
		return nil
	}
	expired := make([]redis.Z, len(active))
	for i, id := range active {
		expired[i].Member = id
	}
	return d.Client.ZAddXX(ctx, "asynq:{"+d.Queue+"}:lease", expired...).Err()
}

// asynqLogger passes on what asynq says of errors, such as those of Redis.
type asynqLogger struct{ to *Progress }

func (l asynqLogger) Debug(...any)      {}
func (l asynqLogger) Info(...any)       {}
func (l asynqLogger) Warn(...any)       {}
func (l asynqLogger) Error(args ...any) { l.to.Say("%s", fmt.Sprint(args...)) }
func (l asynqLogger) Fatal(args ...any) { l.to.Say("%s", fmt.Sprint(args...)) }

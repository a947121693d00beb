package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A producer enqueues jobs through the proxy.
type producer struct {
	plain  *asynq.Client
	joiner *worker.Client // nil without Sluice
	stack  *stack
}

func (s *stack) produce(ctx context.Context, begin time.Time) error {
	port, err := s.proxy.listen("producer")
	if err != nil {
		return err
	}
	defer port.Close()
	opt := redisOpt{port.Addr().String(), s.cluster}
	p := &producer{plain: asynq.NewClient(opt), stack: s}
	defer p.plain.Close()
	if s.throttled {
		limits := opt.client()
		defer limits.Close()
		limiter, err := throttle.New(throttle.Config{Client: limits, Policies: []throttle.Policy{soakPolicy()}})
		if err != nil {
			return err
		}
		if p.joiner, err = worker.NewClient(opt, worker.ClientConfig{Limiter: limiter}); err != nil {
			return err
		}
		defer p.joiner.Close()
	}
	var all sync.WaitGroup
	defer all.Wait()
	room := make(chan struct{}, 16)
	for i := 0; i < len(s.jobs); {
		together := p.together(s.jobs[i:])
		i += len(together)
		select {
		case <-time.After(time.Until(begin.Add(together[0].At))):
		case <-ctx.Done():
			return nil
		}
		room <- struct{}{}
		all.Go(func() {
			p.enqueue(ctx, together)
			<-room
		})
	}
	return nil
}

// together returns the first jobs that are enqueued by one call.
func (p *producer) together(jobs []job) []job {
	first, n := jobs[0], 1
	if p.joiner == nil || !first.Batched || !first.Joins {
		return jobs[:n]
	}
	for n < len(jobs) && jobs[n].Batched && jobs[n].Joins && jobs[n].At == first.At {
		n++
	}
	return jobs[:n]
}

// enqueue tries until the tasks exist. A conflict of IDs or of locks means that a task does.
func (p *producer) enqueue(ctx context.Context, jobs []job) {
	for len(jobs) > 0 && ctx.Err() == nil {
		var failed []job
		for i, err := range p.try(ctx, jobs) {
			if err != nil && !errors.Is(err, asynq.ErrTaskIDConflict) && !errors.Is(err, asynq.ErrDuplicateTask) {
				failed = append(failed, jobs[i])
				continue
			}
			p.stack.mu.Lock()
			p.stack.enqueued[jobs[i].ID] = true
			p.stack.mu.Unlock()
		}
		if jobs = failed; len(jobs) > 0 {
			time.Sleep(100 * time.Millisecond)
		}
	}
}

func (p *producer) try(ctx context.Context, jobs []job) []error {
	tasks := make([]*asynq.Task, len(jobs))
	for i, j := range jobs {
		opts := []asynq.Option{asynq.TaskID(j.ID), asynq.MaxRetry(j.MaxRetry)}
		if j.Retained {
			opts = append(opts, asynq.Retention(24*time.Hour))
		}
		if j.Delay > 0 {
			opts = append(opts, asynq.ProcessIn(j.Delay))
		}
		if j.Unique {
			opts = append(opts, asynq.Unique(24*time.Hour))
		}
		tasks[i] = worker.NewTask(worker.Identity{Tenant: j.Tenant}, taskType, []byte(j.ID), opts...)
	}
	errs := make([]error, len(jobs))
	if p.joiner == nil || !jobs[0].Joins {
		for i, task := range tasks {
			_, errs[i] = p.plain.EnqueueContext(ctx, task)
		}
		return errs
	}
	for i, result := range p.joiner.EnqueueBulk(ctx, tasks) {
		if errs[i] = result.Err; result.Start.Joined {
			p.stack.journal.joined(jobs[i].ID, result.Start.At)
		}
	}
	return errs
}

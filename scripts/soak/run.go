package main

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

// run runs the soak, prints its report, and reports whether all bars hold.
func (o options) run(ctx context.Context, dir string, stdout, stderr io.Writer) (bool, error) {
	jobs := makeJobs(o.seed, o.length)
	say := &progress{w: stderr}
	say.line("seed %d: %d tasks in %v", o.seed, len(jobs), o.length)
	sluice, err := newStack(ctx, "sluice", dir, true, o, jobs)
	if err != nil {
		return false, err
	}
	defer sluice.close()
	control, err := newStack(ctx, "control", dir, false, o, jobs)
	if err != nil {
		return false, err
	}
	defer control.close()
	stacks := []*stack{sluice, control}
	if err := o.stress(ctx, stacks, say); err != nil {
		return false, err
	}
	interrupted := ctx.Err() != nil
	if !interrupted {
		if err := o.awaitEnd(ctx, stacks, say); err != nil {
			return false, err
		}
		interrupted = ctx.Err() != nil
	}
	each(stacks, func(s *stack) error { s.stopWorkers(); return nil })
	var found [2]evidence
	for i, s := range stacks {
		if found[i], err = s.evidence(context.WithoutCancel(ctx)); err != nil {
			return false, err
		}
	}
	all := figures(found[0], found[1], interrupted)
	if err := printFigures(stdout, all, o.seed, o.asJSON); err != nil {
		return false, err
	}
	n := missed(all)
	if n == 0 {
		say.line("all bars hold (seed %d)", o.seed)
		return true, nil
	}
	if interrupted {
		say.line("interrupted: the tasks that were waiting are not judged")
	}
	for i, s := range stacks {
		explain(stderr, s.name, found[i], s.witness.attemptsOf, interrupted)
	}
	say.line("%d figures miss their bars (seed %d)", n, o.seed)
	return false, nil
}

// each calls do for all stacks at once.
func each(stacks []*stack, do func(*stack) error) error {
	errs := make([]error, len(stacks))
	var all sync.WaitGroup
	for i, s := range stacks {
		all.Go(func() { errs[i] = do(s) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// stress enqueues the tasks and makes the disruptions.
func (o options) stress(ctx context.Context, stacks []*stack, say *progress) error {
	begin := time.Now()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	all.Go(func() {
		if err := each(stacks, func(s *stack) error { return s.produce(ctx, begin) }); err != nil {
			cancel(err)
		}
	})
	all.Go(func() {
		for _, d := range makeDisruptions(o.seed, o.length, o.every, o.workers) {
			select {
			case <-time.After(time.Until(begin.Add(d.at))):
			case <-ctx.Done():
				return
			}
			if err := each(stacks, func(s *stack) error { return s.disrupt(ctx, d) }); err != nil && ctx.Err() == nil {
				cancel(err)
			}
		}
	})
	done := make(chan struct{})
	go func() {
		all.Wait()
		select {
		case <-time.After(time.Until(begin.Add(o.length))):
		case <-ctx.Done():
		}
		close(done)
	}()
	for {
		select {
		case <-done:
			for _, s := range stacks {
				s.proxy.calm.Store(true)
			}
			if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
				return cause
			}
			return nil
		case <-time.After(time.Second):
			say.update("%v of %v: runs %d, control %d", time.Since(begin).Round(time.Second), o.length,
				stacks[0].journal.begun(), stacks[1].journal.begun())
		}
	}
}

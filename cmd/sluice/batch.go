package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
)

// BatchCommand plans and fires a batch, and shows and steers its firings. The user's own workers run the tasks.
type BatchCommand struct {
	workersCommand

	Batch  string   // "" for the only one of the file
	File   string   // of batches, and of policies if none are published; connect does not read it
	Limits []string // WINDOW=N
	Tick   string   // "" for the newest firing, or for the next if it is planned
}

// batchCommand has the flags that all of its verbs share.
func (m *Main) batchCommand() *cli.Command {
	c := &BatchCommand{workersCommand: workersCommand{Main: m}}
	batch := &cli.Command{
		Name: "batch", Usage: "plan or fire a batch, and show, pause, resume, retry or cancel it",
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "policies", Destination: &c.File, TakesFile: true,
				Usage: "the batches, and the policies if none are published: a policy `FILE`; - reads stdin"},
			&cli.StringFlag{Name: "batch", Destination: &c.Batch,
				Usage: "the batch `NAME`; by default the only one of the file"},
			&cli.StringFlag{Name: "tick", Destination: &c.Tick,
				Usage: "the firing of `TIME`, such as 2026-01-02T02:00:00Z; " +
					"by default the newest, and for plan the next"},
		}, c.flags()...),
	}
	for _, v := range batchVerbs {
		run := func(ctx context.Context, _ *cli.Command) error { return c.Run(ctx, v) }
		verb := &cli.Command{Name: v.name, Usage: v.usage, Action: run}
		if v.name == "plan" {
			verb.Flags = []cli.Flag{&cli.StringSliceFlag{Name: "limit", Destination: &c.Limits,
				Usage: "as if a limit were another: `WINDOW=N`; may be given several times"}}
		}
		batch.Commands = append(batch.Commands, verb)
	}
	return batch
}

// A batchVerb is a subcommand of batch.
type batchVerb struct {
	name, usage string
	// request asks the scheduler to change the firing; nil if nothing is changed.
	request func(*batch.Scheduler, context.Context, batch.Firing) error
	// reached is the state in which the change is done, unless the firing has ended; "" for none.
	reached batch.State
}

var batchVerbs = []batchVerb{
	{"plan", "show when its tasks would be done", nil, ""},
	{"run", "fire it, and follow it", nil, ""},
	{"status", "show how far it is", nil, ""},
	{"pause", "take its waiting tasks out of their lines", (*batch.Scheduler).Pause, batch.StatePaused},
	{"resume", "end a pause", (*batch.Scheduler).Resume, batch.StateRunning},
	{"retry", "run again what has failed, and follow it", (*batch.Scheduler).Retry, ""},
	{"cancel", "delete its waiting tasks", (*batch.Scheduler).Cancel, batch.StateCancelled},
}

func (c *BatchCommand) Run(ctx context.Context, verb batchVerb) error {
	if c.File == "" {
		return badUsage("--policies is missing: must be a policy file with batches")
	}
	tick, err := c.tick(verb)
	if err != nil {
		return err
	}
	b, policies, err := c.load()
	if err != nil {
		return inputError{err}
	}
	f, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer f.server.Close()
	if f.state.Version == 0 { // no policies are published
		if err := f.limiter.SetPolicies(policies); err != nil {
			return err
		}
	}
	scheduler, err := batch.NewScheduler(f.server.Opt, batch.Config{
		Batches: []batch.Batch{b}, ByHand: verb.name != "plan", // a plan needs the schedule, for the next tick
		Client: worker.ClientConfig{Limiter: f.limiter}, Logger: slog.New(slog.NewTextHandler(c.Stderr, nil)),
	})
	if err != nil {
		return inputError{err}
	}
	defer scheduler.Close()
	firing := batch.Firing{Batch: b.Name, Tick: tick}
	switch enqueues := slices.Contains([]string{"run", "resume", "retry"}, verb.name); {
	case enqueues && f.state.PoliciesErr != nil: // every task would be rejected
		err = f.state.PoliciesErr
	case verb.name == "plan":
		return c.plan(ctx, scheduler, firing)
	case verb.name == "run":
		firing, err = scheduler.Fire(ctx, b.Name)
	default:
		firing, err = c.find(ctx, scheduler, firing)
	}
	if err != nil {
		return err
	}
	if verb.name == "status" {
		status, err := scheduler.Status(ctx, firing)
		if err != nil {
			return err
		}
		return c.print(ctx, scheduler, status, verb)
	}
	return c.follow(ctx, scheduler, firing, verb)
}

// tick returns the time of --tick, zero without.
func (c *BatchCommand) tick(verb batchVerb) (tick time.Time, err error) {
	if c.Tick == "" {
		return tick, nil
	}
	if tick, err = time.Parse(time.RFC3339, c.Tick); err != nil {
		return tick, badUsage("--tick %q: must be a time such as 2026-01-02T02:00:00Z", c.Tick)
	}
	if verb.name == "run" {
		return tick, badUsage("--tick: run fires now: leave it out")
	}
	return tick, nil
}

// load returns the batch and the policies of the file.
func (c *BatchCommand) load() (b batch.Batch, policies []throttle.Policy, err error) {
	name, policies, batches, err := c.loadBatches(c.File)
	if err != nil {
		return b, nil, err
	}
	names := make([]string, len(batches))
	for i, b := range batches {
		names[i] = b.Name
	}
	switch i := slices.Index(names, c.Batch); {
	case len(batches) == 0:
		return b, nil, fmt.Errorf("%s has no batches: must have some under the key %q", name, "batches")
	case i >= 0:
		return batches[i], policies, nil
	case c.Batch == "" && len(batches) == 1:
		return batches[0], policies, nil
	}
	return b, nil, fmt.Errorf("--batch %q: must be one of %s", c.Batch, strings.Join(names, ", "))
}

// find returns the firing, which must exist: without a tick the newest one.
func (c *BatchCommand) find(ctx context.Context, s *batch.Scheduler, f batch.Firing) (batch.Firing, error) {
	newest, err := s.Firings(ctx, f.Batch, 10) // more than one for the message alone
	switch {
	case err != nil:
		return f, err
	case len(newest) == 0:
		return f, badInput("batch %q has not fired in the last month", f.Batch)
	case f.Tick.IsZero():
		return newest[0], nil
	}
	_, err = s.Status(ctx, f)
	if errors.Is(err, batch.ErrNoFiring) {
		ticks := make([]string, len(newest))
		for i, other := range newest {
			ticks[i] = other.Tick.Format(time.RFC3339)
		}
		err = badInput("--tick %s: batch %q did not fire then: its newest firings are %s", c.Tick, f.Batch, strings.Join(ticks, ", "))
	}
	return f, err
}

// follow requests the verb's change, and shows how far the firing is, until the change is done. Meanwhile it runs the
// scheduler, as perhaps none runs elsewhere.
func (c *BatchCommand) follow(ctx context.Context, s *batch.Scheduler, f batch.Firing, verb batchVerb) error {
	if verb.request != nil {
		switch err := verb.request(s, ctx, f); {
		case errors.Is(err, batch.ErrNoFiring):
			return inputError{err}
		case err != nil:
			return err
		}
	}
	running, stop := context.WithCancel(ctx)
	var scheduling sync.WaitGroup
	scheduling.Go(func() { _ = s.Run(running) })
	defer func() { stop(); scheduling.Wait() }()
	progress := show.NewProgress(c.Stderr, 2*time.Second)
	defer progress.Clear()
	for {
		status, err := s.Status(ctx, f)
		if ctx.Err() != nil {
			progress.Clear()
			fmt.Fprint(c.Stderr, "sluice: stopped: the firing goes on where a scheduler runs; \"sluice batch resume\" "+
				"goes on here until all tasks are enqueued, and \"batch cancel\" ends it\n")
			return context.Canceled
		}
		if err != nil {
			return err
		}
		needsHelp := status.State == batch.StateStopped && verb.name != "resume" // which restarts it
		if needsHelp || status.HasEnded() || status.State == verb.reached {
			progress.Clear()
			return c.print(ctx, s, status, verb)
		}
		progress.Show(func() string { return fmt.Sprintf("%s: %v", status.State, status) })
		select {
		case <-ctx.Done(): // the loop returns
		case <-time.After(200 * time.Millisecond):
		}
	}
}

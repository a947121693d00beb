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
	"github.com/sluice-go/sluice/worker/batchfile"
)

// BatchCommand fires batches by hand, and follows and steers firings. The tasks are run by the
// user's own workers.
type BatchCommand struct {
	workersCommand

	Batch  string   // "" for the only one of the file
	Limits []string // WINDOW=N
	Tick   string   // "" for the newest firing
}

// batchCommand has the flags of its verbs.
func (m *Main) batchCommand() *cli.Command {
	c := &BatchCommand{workersCommand: workersCommand{Main: m}}
	batch := &cli.Command{
		Name: "batch", Usage: "plan or fire a batch, and show, pause, resume, retry or cancel it",
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "policies", Destination: &c.Policies, TakesFile: true,
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

// A batchVerb is one thing to do with a firing.
type batchVerb struct {
	name, usage string
	// want asks the scheduler for it; may be nil.
	want func(*batch.Scheduler, context.Context, batch.Firing) error
	// done are the states that show that it is done, beside those of firings that have ended.
	done []batch.State
}

var batchVerbs = []batchVerb{
	{"plan", "show when its tasks would be done", nil, nil},
	{"run", "fire it, and follow it", nil, nil},
	{"status", "show how far it is", nil, nil},
	{"pause", "take its waiting tasks out of their lines", (*batch.Scheduler).Pause, []batch.State{batch.StatePaused}},
	{"resume", "end a pause", (*batch.Scheduler).Resume, []batch.State{batch.StateRunning}},
	{"retry", "run again what has failed, and follow it", (*batch.Scheduler).Retry, nil},
	{"cancel", "delete its waiting tasks", (*batch.Scheduler).Cancel, nil},
}

func (c *BatchCommand) Run(ctx context.Context, verb batchVerb) error {
	tick, err := c.tick(verb)
	if err != nil {
		return err
	}
	b, policies, err := c.load()
	if err != nil {
		return inputError{err}
	}
	c.Policies = "" // published policies go before the file
	f, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer f.server.Close()
	if f.state.Version == 0 {
		if err := f.limiter.SetPolicies(policies); err != nil {
			return inputError{err}
		}
	}
	scheduler, err := batch.NewScheduler(f.server.Opt, batch.Config{
		Batches: []batch.Batch{b}, ByHand: verb.name != "plan", // which needs the schedule: it has the next tick
		Client: worker.ClientConfig{Limiter: f.limiter}, Logger: slog.New(slog.NewTextHandler(c.Stderr, nil)),
	})
	if err != nil {
		return inputError{err}
	}
	defer scheduler.Close()
	firing := batch.Firing{Batch: b.Name, Tick: tick}
	switch verb.name {
	case "plan":
		return c.plan(ctx, scheduler, firing)
	case "run":
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
		return c.print(ctx, scheduler, status)
	}
	return c.follow(ctx, scheduler, firing, verb)
}

func (c *BatchCommand) tick(verb batchVerb) (tick time.Time, err error) {
	if c.Policies == "" {
		return tick, badUsage("--policies is missing: must be a policy file with batches")
	}
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

// load reads the batch and the policies.
func (c *BatchCommand) load() (b batch.Batch, policies []throttle.Policy, err error) {
	name, data, err := c.readPolicyFile(c.Policies)
	if err != nil {
		return b, nil, err
	}
	policies, batches, err := batchfile.Parse(name, data)
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

// find returns a firing that is there: the newest one, if it has no tick.
func (c *BatchCommand) find(ctx context.Context, s *batch.Scheduler, f batch.Firing) (batch.Firing, error) {
	const named = 10 // in place of one that is not there
	newest, err := s.Firings(ctx, f.Batch, named)
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

// follow does what the verb says, by a scheduler of its own, as none may run elsewhere.
func (c *BatchCommand) follow(ctx context.Context, s *batch.Scheduler, f batch.Firing, verb batchVerb) error {
	if verb.want != nil {
		if err := verb.want(s, ctx, f); err != nil {
			return inputError{err}
		}
	}
	working, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() { _ = s.Run(working) })
	defer func() { stop(); all.Wait() }()
	progress := show.NewProgress(c.Stderr, 2*time.Second)
	defer progress.Clear()
	for {
		status, err := s.Status(ctx, f)
		if ctx.Err() != nil {
			progress.Clear()
			fmt.Fprint(c.Stderr, "sluice: stopped: the firing goes on where a scheduler runs; "+
				"\"sluice batch resume\" goes on here, and \"batch cancel\" ends it\n")
			return errInterrupted
		}
		if err != nil {
			return err
		}
		if status.HasEnded() || status.State == batch.StateStopped && verb.name != "resume" || slices.Contains(verb.done, status.State) {
			progress.Clear()
			return c.print(ctx, s, status)
		}
		progress.Show(func() string { return fmt.Sprintf("%s: %v", status.State, status) })
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

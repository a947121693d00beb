package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/urfave/cli/v3"
	"golang.org/x/term"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/batchfile"
)

// BatchCommand fires batches by hand, and says what becomes of firings. The tasks are run by the
// user's own workers.
type BatchCommand struct {
	*Main
	redisFlags

	Batch    string // "" for the only one of the file
	Every    time.Duration
	Policies string // file, or "-" for stdin
	Prefix   string // of the limiter
	Tick     string // "" for the newest firing
}

func (c *BatchCommand) flags() []cli.Flag {
	c.Every = 2 * time.Second
	return append([]cli.Flag{
		&cli.StringFlag{Name: "policies", Usage: "policies and batches, a policy `FILE`; - reads stdin", Destination: &c.Policies, TakesFile: true},
		&cli.StringFlag{Name: "batch", Usage: "the batch `NAME`; by default the only one of the file", Destination: &c.Batch},
		&cli.StringFlag{Name: "tick", Usage: "the firing of `TIME`, such as 2026-01-02T02:00:00Z; by default the newest, and for plan the next", Destination: &c.Tick},
		&cli.StringFlag{Name: "prefix", Usage: "the workers' limiter has the Prefix `TEXT`", Destination: &c.Prefix},
	}, c.redisFlags.flags("the Redis of the workers, `URL`; by default $SLUICE_REDIS_URL")...)
}

// verbs are the commands under batch. They have its flags, and its help describes them.
func (c *BatchCommand) verbs() []*cli.Command {
	var commands []*cli.Command
	for _, verb := range batchVerbNames {
		commands = append(commands, &cli.Command{
			Name: verb, Hidden: true, CustomHelpTemplate: help("batch"), HideHelpCommand: true, OnUsageError: usageError,
			Action: func(ctx context.Context, cmd *cli.Command) error {
				return c.Run(ctx, append([]string{verb}, cmd.Args().Slice()...))
			},
		})
	}
	return commands
}

// What batch does, by verb: what is wanted of the firing, and the states that show it is done.
var batchVerbs = map[string]struct {
	want func(*batch.Scheduler, context.Context, batch.Firing) error
	done []batch.State // beside those of firings that have ended
}{
	"plan":   {},
	"run":    {},
	"status": {},
	"pause":  {(*batch.Scheduler).Pause, []batch.State{batch.Paused}},
	"resume": {(*batch.Scheduler).Resume, []batch.State{batch.Running}},
	"cancel": {(*batch.Scheduler).Cancel, nil},
}

var batchVerbNames = []string{"plan", "run", "status", "pause", "resume", "cancel"}

func (c *BatchCommand) Run(ctx context.Context, args []string) error {
	const see = `see "worker-demo batch -h"`
	if len(args) != 1 {
		return badInput("batch needs one of %s: %s", strings.Join(batchVerbNames, ", "), see)
	}
	verb := args[0]
	if !slices.Contains(batchVerbNames, verb) {
		if near := policyfile.Suggest(verb, batchVerbNames); near != "" {
			return badInput("batch %q: did you mean %q?", verb, near)
		}
		return badInput("batch %q: must be one of %s: %s", verb, strings.Join(batchVerbNames, ", "), see)
	}
	tick, err := c.validate(verb)
	if err != nil {
		return badInput("%w: %s", err, see)
	}
	b, policies, err := c.load()
	if err != nil {
		return inputError{err}
	}
	server, err := c.openWorkers(ctx, c.Env)
	if err != nil {
		return err
	}
	defer server.Close()
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies, Prefix: c.Prefix})
	if err != nil {
		return inputError{err}
	}
	scheduler, err := batch.NewScheduler(server.Opt, batch.Config{
		Batches: []batch.Batch{b}, ByHand: true, Client: worker.ClientConfig{Limiter: limiter}, Logger: slog.New(slog.NewTextHandler(c.Stderr, nil)),
	})
	if err != nil {
		return inputError{err}
	}
	defer scheduler.Close()
	f := batch.Firing{Batch: b.Name, Tick: tick}
	switch {
	case verb == "plan":
		return c.plan(ctx, server.Opt, b, limiter, tick)
	case verb == "run":
		f, err = scheduler.Fire(ctx, b.Name)
	case tick.IsZero():
		f, err = newest(ctx, scheduler, b.Name)
	}
	if err != nil {
		return err
	}
	if verb == "status" {
		status, err := scheduler.Status(ctx, f)
		if err != nil {
			return err
		}
		return c.print(ctx, scheduler, status)
	}
	return c.follow(ctx, scheduler, f, verb)
}

func (c *BatchCommand) validate(verb string) (tick time.Time, err error) {
	if c.Policies == "" {
		return tick, errors.New("--policies is missing: must be a policy file with batches")
	}
	if c.Tick != "" {
		if tick, err = time.Parse(time.RFC3339, c.Tick); err != nil {
			return tick, fmt.Errorf("--tick %q: must be a time such as 2026-01-02T02:00:00Z", c.Tick)
		}
		if verb == "run" {
			return tick, errors.New("--tick: run fires now: leave it out")
		}
	}
	return tick, c.redisFlags.validate()
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

func newest(ctx context.Context, s *batch.Scheduler, name string) (batch.Firing, error) {
	firings, err := s.Firings(ctx, name, 1)
	if err == nil && len(firings) == 0 {
		err = badInput("batch %q has not fired in the last month", name)
	}
	if err != nil {
		return batch.Firing{}, err
	}
	return firings[0], nil
}

// follow does what the verb says, by a scheduler of its own, as none may run elsewhere.
func (c *BatchCommand) follow(ctx context.Context, s *batch.Scheduler, f batch.Firing, verb string) error {
	if v := batchVerbs[verb]; v.want != nil {
		if err := v.want(s, ctx, f); err != nil {
			return inputError{err}
		}
	}
	working, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() { _ = s.Run(working) })
	defer func() { stop(); all.Wait() }()
	p := &batchProgress{every: c.Every, w: c.Stderr}
	for {
		status, err := s.Status(ctx, f)
		if ctx.Err() != nil {
			p.end()
			fmt.Fprintf(c.Stderr, "worker-demo: stopped: the firing goes on where a scheduler runs; \"worker-demo batch resume\" goes on here, and \"batch cancel\" ends it\n")
			return errInterrupted
		}
		if err != nil {
			return err
		}
		if status.HasEnded() || slices.Contains(batchVerbs[verb].done, status.State) {
			p.end()
			return c.print(ctx, s, status)
		}
		p.show(status)
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// A batchProgress shows how a firing goes on: as a bar on a terminal, elsewhere as a line from time
// to time.
type batchProgress struct {
	bar   *progressbar.ProgressBar
	every time.Duration
	shown time.Time
	w     io.Writer
}

func (p *batchProgress) show(s batch.Status) {
	f, ok := p.w.(*os.File)
	switch ended := s.Total - s.Waiting - s.Running; {
	case ok && term.IsTerminal(int(f.Fd())):
		if p.bar == nil {
			p.bar = progressbar.NewOptions(s.Total, progressbar.OptionSetWriter(f), progressbar.OptionShowCount(),
				progressbar.OptionSetWidth(30), progressbar.OptionSetPredictTime(false), progressbar.OptionClearOnFinish())
		}
		p.bar.ChangeMax(max(1, s.Total))
		p.bar.Describe(fmt.Sprintf("%s, %d failed", s.State, s.Failed))
		_ = p.bar.Set(ended)
	case time.Since(p.shown) >= p.every:
		p.shown = time.Now()
		fmt.Fprintf(p.w, "%s: %s\n", s.State, counts(s))
	}
}

func (p *batchProgress) end() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}

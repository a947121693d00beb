package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/redisconn"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// A workersCommand is about workers that run elsewhere. It connects to their Redis.
type workersCommand struct {
	*Main
	redisFlags

	Policies string // file, or "-" for stdin; "" for the published policies
	Prefix   string // of the limiter
}

// flags returns the flags given, and the flags of all such commands.
func (c *workersCommand) flags(flags ...cli.Flag) []cli.Flag {
	prefix := &cli.StringFlag{Name: "prefix", Destination: &c.Prefix,
		Usage: "the workers' limiter has the Prefix `TEXT`"}
	return slices.Concat(flags, []cli.Flag{prefix},
		c.redisFlags.flags("the Redis of the workers, `URL`; by default $SLUICE_REDIS_URL"))
}

// liveFlags is flags with --policies, which replaces the published policies.
func (c *workersCommand) liveFlags(flags ...cli.Flag) []cli.Flag {
	return c.flags(append(flags, &cli.StringFlag{Name: "policies", Destination: &c.Policies, TakesFile: true,
		Usage: "as if the policies of `FILE` were in force, - for stdin; by default those that are published"})...)
}

// A fleet is the workers that run elsewhere: their Redis, and the policies, overrides and pauses in force there.
type fleet struct {
	file    []throttle.Policy // of --policies; nil without
	limiter *throttle.Limiter
	server  *redisconn.Server
	source  string        // of the limiter's policies, for people
	state   control.State // as it was read last
	store   *control.Store
}

// connect connects to the Redis, and makes a limiter with the policies of --policies, or the policies in force. The
// limiter has none if none are published: then programs have their own.
func (c *workersCommand) connect(ctx context.Context) (f *fleet, err error) {
	f = &fleet{}
	if c.Policies != "" {
		if f.file, err = c.loadPolicies(c.Policies); err != nil {
			return nil, err
		}
	}
	if _, given, err := c.address(c.Env); err == nil && !given {
		return nil, badUsage("there is no Redis: --redis must be the URL of your workers' Redis")
	}
	if f.server, err = c.open(ctx, c.Env); err != nil {
		return nil, err
	}
	warn := slog.New(slog.NewTextHandler(c.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if f.limiter, err = throttle.New(throttle.Config{Client: f.server.Client, Logger: warn, Prefix: c.Prefix}); err != nil {
		err = inputError{err}
	} else {
		f.store = control.StoreOf(f.limiter)
		err = f.refresh(ctx, c.Policies)
	}
	if err != nil {
		f.server.Close()
	}
	return f, err
}

// refresh reads what is in force, and sets it in the limiter. `file` is the name of the file that --policies gives.
func (f *fleet) refresh(ctx context.Context, file string) (err error) {
	if f.state, err = f.store.State(ctx); err != nil {
		return err
	}
	policies, interventions := f.state.Effective()
	switch published := fmt.Sprintf("published version %d", f.state.Version); {
	case f.file == nil:
		f.source = published
	case f.state.Version > 0:
		policies, f.source = f.file, fmt.Sprintf("as if %s were in force instead of %s", file, published)
	default:
		policies, f.source = f.file, file+", as none are published"
	}
	err = f.limiter.SetPolicies(policies, f.state.Removed...)
	f.limiter.SetInterventions(interventions)
	return err
}

// inForce is connect for a command that needs policies.
func (c *workersCommand) inForce(ctx context.Context) (*fleet, error) {
	f, err := c.connect(ctx)
	if err == nil && len(f.limiter.Policies()) == 0 {
		f.server.Close()
		return nil, cmp.Or(f.state.PoliciesErr, badInput("no policies are published: "+
			"--policies must be the workers' policy file, or publish it by \"sluice limits publish\""))
	}
	return f, err
}

// onFleet returns the action of a command that works on a fleet, which it opens and closes.
func onFleet(open func(context.Context) (*fleet, error), do func(context.Context, *fleet, *cli.Command) error) cli.ActionFunc {
	return func(ctx context.Context, cmd *cli.Command) error {
		f, err := open(ctx)
		if err != nil {
			return err
		}
		defer f.server.Close()
		return do(ctx, f, cmd)
	}
}

// policy returns the limiter's policy of a name. The name "" stands for the only policy.
func (f *fleet) policy(name string) (throttle.Policy, error) {
	policies := append(f.limiter.Policies(), f.state.Removed...)
	names := make([]string, len(policies))
	for i, p := range policies {
		if p.Name == name || name == "" && len(policies) == 1 {
			return p, nil
		}
		names[i] = p.Name
	}
	return throttle.Policy{}, badInput("policy %q: must be one of %s", name, cmp.Or(strings.Join(names, ", "), "those published: there are none"))
}

// windowOf returns a policy's window of a name. The caller may change it in place.
func windowOf(p throttle.Policy, name string) (*throttle.Window, error) {
	names := make([]string, len(p.Windows))
	for i := range p.Windows {
		if p.Windows[i].Name == name {
			return &p.Windows[i], nil
		}
		names[i] = p.Windows[i].Name
	}
	return nil, badInput("window %q: must be one of %s", name, strings.Join(names, ", "))
}

// queueOf returns asynq's name of a ticket's queue: without the ID of its Redis. Calls that wait in place have none.
func queueOf(ticket string) string { return cmp.Or(ticket[strings.Index(ticket, "/")+1:], "(calls)") }

// countText returns a number and its noun, in the plural unless it is 1.
func countText(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

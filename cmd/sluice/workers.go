package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/redisconn"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/usage"
)

// A workersCommand is about workers that run elsewhere. It asks their Redis.
type workersCommand struct {
	*Main
	redisFlags

	Policies string // file, or "-" for stdin
	Prefix   string // of the limiter
}

// flags are those of a command, and those that all such commands have.
func (c *workersCommand) flags(own ...cli.Flag) []cli.Flag {
	prefix := &cli.StringFlag{Name: "prefix", Destination: &c.Prefix,
		Usage: "the workers' limiter has the Prefix `TEXT`"}
	return slices.Concat(own, []cli.Flag{prefix},
		c.redisFlags.flags("the Redis of the workers, `URL`; by default $SLUICE_REDIS_URL"))
}

func (c *workersCommand) policiesFlag(usage string) cli.Flag {
	return &cli.StringFlag{Name: "policies", Usage: usage, Destination: &c.Policies, TakesFile: true}
}

func (c *workersCommand) open(ctx context.Context) (*redisconn.Server, error) {
	if _, found, err := c.address(c.Env); err == nil && !found {
		return nil, badUsage("there is no Redis: --redis must be the URL of that of your workers")
	}
	return c.redisFlags.open(ctx, c.Env)
}

// liveFlags are those of a command that looks at the workers by their policies.
func (c *workersCommand) liveFlags(own ...cli.Flag) []cli.Flag {
	policies := c.policiesFlag("the workers' policies, a policy `FILE`; - reads stdin")
	return append([]cli.Flag{policies}, c.flags(own...)...)
}

// newLimiter returns a limiter on that Redis.
func (c *workersCommand) newLimiter(server *redisconn.Server, policies []throttle.Policy) (*throttle.Limiter, error) {
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies, Prefix: c.Prefix})
	if err != nil {
		return nil, inputError{err}
	}
	return limiter, nil
}

// connect opens the Redis, and a limiter of --policies there, with what operators have put in force.
func (c *workersCommand) connect(ctx context.Context) (*redisconn.Server, *throttle.Limiter, error) {
	if c.Policies == "" {
		return nil, nil, badUsage("--policies is missing: must be the policy file of your workers")
	}
	policies, err := c.loadPolicies(c.Policies)
	if err != nil {
		return nil, nil, err
	}
	server, err := c.open(ctx)
	if err != nil {
		return nil, nil, err
	}
	limiter, err := c.newLimiter(server, policies)
	if err != nil {
		server.Close()
		return nil, nil, err
	}
	c.intervene(ctx, server, limiter)
	return server, limiter, nil
}

// intervene applies what operators have put in force.
func (c *workersCommand) intervene(ctx context.Context, server *redisconn.Server, limiter *throttle.Limiter) {
	if store, err := control.NewStore(server.Client, c.Prefix); err == nil {
		if state, err := store.State(ctx); err == nil {
			limiter.SetInterventions(state.Interventions)
		}
	}
}

// mostUsed returns who was granted most requests of a policy, where package usage counts them.
func (c *workersCommand) mostUsed(ctx context.Context, server *redisconn.Server, policy string) ([]usage.Use, error) {
	return usage.Top(ctx, server.Client, usage.TopOptions{Max: usersShown, Policy: policy, Prefix: c.Prefix})
}

// named returns the policy of a name.
func named(policies []throttle.Policy, name string) (throttle.Policy, error) {
	names := make([]string, len(policies))
	for i, p := range policies {
		if names[i] = p.Name; p.Name == name {
			return p, nil
		}
	}
	return throttle.Policy{}, badInput("policy %q: must be one of %s", name, strings.Join(names, ", "))
}

// windowOf returns the window of a name, to be changed in place.
func windowOf(p throttle.Policy, name string) (*throttle.Window, error) {
	names := make([]string, len(p.Windows))
	for i := range p.Windows {
		if names[i] = p.Windows[i].Name; names[i] == name {
			return &p.Windows[i], nil
		}
	}
	return nil, badInput("window %q: must be one of %s", name, strings.Join(names, ", "))
}

// setLimit sets a window's limit. A burst that is the default follows it.
func setLimit(w *throttle.Window, limit int64) {
	if w.Burst == w.Limit {
		w.Burst = 0
	}
	w.Limit = limit
}

// queueOf is the queue of a ticket as asynq knows it: without the identity of its Redis.
func queueOf(ticket string) string {
	return cmp.Or(ticket[strings.Index(ticket, "/")+1:], "(calls)")
}

// count is a number with the noun that it counts.
func count(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

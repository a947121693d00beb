package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// A liveCommand looks at workers that run elsewhere: by their policies, on their Redis.
type liveCommand struct {
	*Main
	redisFlags

	Policies string // file, or "-" for stdin
	Prefix   string // of the limiter
}

func (c *liveCommand) flags(own ...cli.Flag) []cli.Flag {
	shared := []cli.Flag{
		&cli.StringFlag{Name: "policies", Usage: "the workers' policies, a policy `FILE`; - reads stdin", Destination: &c.Policies, TakesFile: true},
		&cli.StringFlag{Name: "prefix", Usage: "the workers' limiter has the Prefix `TEXT`", Destination: &c.Prefix},
	}
	return slices.Concat(shared, own, c.redisFlags.flags("the Redis of the workers, `URL`; by default $SLUICE_REDIS_URL"))
}

// validate checks what the flags alone can show.
func (c *liveCommand) validate() error {
	if c.Policies == "" {
		return errors.New("--policies is missing: must be the policy file of your workers")
	}
	if err := c.redisFlags.validate(); err != nil {
		return err
	}
	_, found, err := c.address(c.Env)
	if err == nil && !found {
		err = errNoRedis
	}
	return err
}

// connect opens the Redis, and a limiter there.
func (c *liveCommand) connect(ctx context.Context) (*redisconn.Server, *throttle.Limiter, error) {
	policies, err := c.loadPolicies(c.Policies)
	if err != nil {
		return nil, nil, inputError{err}
	}
	server, err := c.open(ctx, c.Env)
	if err != nil {
		return nil, nil, err
	}
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies, Prefix: c.Prefix})
	if err != nil {
		server.Close()
		return nil, nil, inputError{err}
	}
	c.intervene(ctx, server, limiter)
	return server, limiter, nil
}

// intervene applies what operators have put in force.
func (c *liveCommand) intervene(ctx context.Context, server *redisconn.Server, limiter *throttle.Limiter) {
	if store, err := control.NewStore(server.Client, c.Prefix); err == nil {
		if state, err := store.State(ctx); err == nil {
			limiter.SetInterventions(state.Interventions)
		}
	}
}

// named returns the policies that a command is about: the one of a name, or all.
func named(limiter *throttle.Limiter, policy string) ([]throttle.Policy, error) {
	all := limiter.Policies()
	if policy == "" {
		return all, nil
	}
	names := make([]string, len(all))
	for i, p := range all {
		if names[i] = p.Name; p.Name == policy {
			return all[i : i+1], nil
		}
	}
	return nil, badInput("--policy %q: must be one of %s", policy, strings.Join(names, ", "))
}

// queueName is the queue of a ticket as asynq knows it: without the identity of its Redis.
func queueName(ticket string) string {
	if _, name, ok := strings.Cut(ticket, "/"); ok {
		return name
	}
	return cmp.Or(ticket, "(calls)")
}

// see adds to an error where the command is explained.
func see(err error, command string) error {
	return badInput(`%w: see "worker-demo %s -h"`, err, command)
}

// count is a number with the noun that it counts.
func count(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

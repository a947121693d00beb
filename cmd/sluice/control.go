package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/redisconn"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// A ControlCommand looks at, or changes, what is in force on all programs that follow.
type ControlCommand struct {
	workersCommand

	By  string        // who makes the change
	For time.Duration // how long it lasts
	Why string

	needFor        bool   // it ends by itself
	policy, tenant string // that the change is about; the tenant may be ""
}

func (m *Main) control() *ControlCommand {
	return &ControlCommand{workersCommand: workersCommand{Main: m}}
}

// A controlDesk is a store, the Redis that it is in, and who works there.
type controlDesk struct {
	*control.Store
	by     control.By
	server *redisconn.Server
}

// A done is what a command says of a change: as JSON, or by its text.
type done struct {
	Policy  string `json:"policy,omitempty"`
	Tenant  string `json:"tenant,omitempty"`
	Changed bool   `json:"changed"`
	Count   int    `json:"count,omitempty"`
	Version int64  `json:"version,omitempty"`
	Until   string `json:"until,omitempty"`

	text string
}

// A change is what a command does with its arguments, an intervention with its policy and tenant.
type (
	change       func(ctx context.Context, d controlDesk, args cli.Args) (done, error)
	intervention func(ctx context.Context, d controlDesk) (done, error)
)

// change returns the command that makes a change.
func (c *ControlCommand) change(name, usage, args string, do change, own ...cli.Flag) *cli.Command {
	own = append(own,
		&cli.StringFlag{Name: "why", Usage: "the reason, `TEXT`, is logged; it is required", Destination: &c.Why},
		&cli.StringFlag{Name: "by", Usage: "`NAME` makes the change; by default $USER", Destination: &c.By})
	return &cli.Command{
		Name: name, Usage: usage, ArgsUsage: args, Flags: c.flags(own...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			by, err := c.by()
			if err != nil {
				return err
			}
			d, err := c.desk(ctx)
			if err != nil {
				return err
			}
			defer d.server.Close()
			d.by = by
			made, err := do(ctx, d, cmd.Args())
			if errors.As(err, new(*throttle.PolicyError)) {
				return inputError{err}
			}
			if err != nil {
				return err
			}
			return c.show(made, func() { fmt.Fprintln(c.Stdout, made.text) })
		},
	}
}

// intervention is change for a command about a policy, or a tenant of it. What it says of itself
// stands behind the name of these.
func (c *ControlCommand) intervention(name, usage, args string, do intervention, own ...cli.Flag) *cli.Command {
	did := func(ctx context.Context, d controlDesk, args cli.Args) (done, error) {
		c.policy, c.tenant = args.Get(0), args.Get(1)
		made, err := do(ctx, d)
		made.Policy, made.Tenant, made.text = c.policy, c.tenant, c.about()+made.text
		if c.needFor {
			until := time.Now().Add(c.For)
			made.Changed, made.Until = true, until.UTC().Format(time.RFC3339)
			made.text += " until " + clockText(until)
		}
		return made, err
	}
	return c.change(name, usage, args, did, own...)
}

// forFlag is of a change that ends by itself.
func (c *ControlCommand) forFlag() cli.Flag {
	c.needFor = true
	return &cli.DurationFlag{Name: "for", Usage: "it ends by itself after `DURATION`; required", Destination: &c.For}
}

// by returns who makes the change, and why, after a look at the flags that all changes have.
func (c *ControlCommand) by() (control.By, error) {
	who, _ := c.Env("USER")
	by := control.By{Who: cmp.Or(c.By, who), Why: c.Why}
	switch {
	case strings.TrimSpace(by.Why) == "":
		return by, badInput("--why is missing: must be the reason of the change")
	case c.needFor && (c.For <= 0 || c.For > control.MaxTTL):
		return by, badInput("--for %v: must be how long, such as 10m, and at most %v", c.For, control.MaxTTL)
	case strings.TrimSpace(by.Who) == "":
		return by, badInput("--by is missing, and $USER is not set: must be who makes the change")
	}
	return by, nil
}

// desk opens the store.
func (c *ControlCommand) desk(ctx context.Context) (controlDesk, error) {
	server, err := c.open(ctx)
	if err != nil {
		return controlDesk{}, err
	}
	store, err := control.NewStore(server.Client, c.Prefix)
	if err != nil {
		server.Close()
		return controlDesk{}, inputError{err}
	}
	return controlDesk{Store: store, server: server}, nil
}

// checkPolicy fails if policies are published, and none has the policy's name.
func (c *ControlCommand) checkPolicy(ctx context.Context, d controlDesk) error {
	state, err := d.State(ctx)
	if err != nil {
		return err
	}
	if len(state.Policies) == 0 {
		fmt.Fprintf(c.Stderr, "sluice: no policies are published: "+
			"whether there is a policy %q is not known\n", c.policy)
		return nil
	}
	_, err = named(state.Policies, c.policy)
	return err
}

// limiter returns a limiter that has the policy: that of --policies, or of those that are published.
func (c *ControlCommand) limiter(ctx context.Context, d controlDesk) (*throttle.Limiter, error) {
	var policies []throttle.Policy
	if c.Policies != "" {
		var err error
		if policies, err = c.loadPolicies(c.Policies); err != nil {
			return nil, err
		}
	} else {
		state, err := d.State(ctx)
		if err := cmp.Or(err, state.PoliciesErr); err != nil {
			return nil, err
		}
		if policies = state.Policies; policies == nil {
			return nil, badInput("no policies are published: --policies must be the workers' policy file")
		}
	}
	if _, err := named(policies, c.policy); err != nil {
		return nil, err
	}
	return c.newLimiter(d.server, policies)
}

// about names the policy, or the tenant of it.
func (c *ControlCommand) about() string {
	if c.tenant == "" {
		return c.policy
	}
	return fmt.Sprintf("tenant %q of %s", c.tenant, c.policy)
}

// clockText is a time as people read it.
func clockText(t time.Time) string { return t.UTC().Format(time.DateTime) + " UTC" }

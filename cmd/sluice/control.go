package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/policyfile"
	"github.com/sluice-go/sluice/throttle/usage"
)

// A ControlCommand changes what is in force on all programs that follow.
type ControlCommand struct {
	workersCommand

	By  string        // who makes the change
	For time.Duration // how long it lasts
	Why string

	author         control.Author
	needFor        bool   // it ends by itself
	policy, tenant string // that the change is about; the tenant may be ""
}

func (m *Main) control() *ControlCommand {
	return &ControlCommand{workersCommand: workersCommand{Main: m}}
}

// A done is the output about a change: as JSON, or by its text.
type done struct {
	Policy   string `json:"policy,omitempty"`
	Tenant   string `json:"tenant,omitempty"`
	Changed  bool   `json:"changed"`
	Changes  string `json:"changes,omitempty"` // of the policies
	Count    int    `json:"count,omitempty"`
	Replaces string `json:"replaces,omitempty"` // an override or a pause, and whose
	Version  int64  `json:"version,omitempty"`
	Until    string `json:"until,omitempty"`

	text string
}

// A change carries out a command with its arguments, an intervention with its policy and tenant.
type (
	change       func(ctx context.Context, f *fleet, args cli.Args) (done, error)
	intervention func(ctx context.Context, f *fleet) (done, error)
)

// whyFlags returns the flags that all changes have.
func (c *ControlCommand) whyFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "why", Usage: "the reason, `TEXT`, is logged; required", Destination: &c.Why},
		&cli.StringFlag{Name: "by", Usage: "`NAME` makes the change; by default $USER", Destination: &c.By},
	}
}

// change returns the command that makes a change.
func (c *ControlCommand) change(name, usage, args string, do change, flags ...cli.Flag) *cli.Command {
	return &cli.Command{
		Name: name, Usage: usage, ArgsUsage: args, Flags: c.flags(append(flags, c.whyFlags()...)...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := c.sign(); err != nil {
				return err
			}
			f, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer f.server.Close()
			made, err := do(ctx, f, cmd.Args())
			if errors.As(err, new(*throttle.PolicyError)) || errors.As(err, new(control.InputError)) {
				return inputError{err}
			}
			if err != nil {
				return err
			}
			return c.show(made, func() { fmt.Fprintln(c.Stdout, made.text) })
		},
	}
}

// intervention is change for a command about a policy, or a tenant of it. The text of its result follows
// their name.
func (c *ControlCommand) intervention(name, usage, args string, do intervention, flags ...cli.Flag) *cli.Command {
	change := func(ctx context.Context, f *fleet, args cli.Args) (done, error) {
		if err := c.about(ctx, f, args); err != nil {
			return done{}, err
		}
		made, err := do(ctx, f)
		return c.lasting(made), err
	}
	return c.change(name, usage, args, change, flags...)
}

// lasting adds to a change its policy and tenant, its end, and the intervention that it replaces.
func (c *ControlCommand) lasting(made done) done {
	made.Policy, made.Tenant, made.text = c.policy, c.tenant, c.name()+made.text
	if c.For > 0 {
		until := time.Now().Add(c.For)
		made.Changed, made.Until = true, until.UTC().Format(time.RFC3339)
		made.text += " until " + clockText(until)
	}
	if made.Replaces != "" {
		made.text += ", in place of " + made.Replaces
	}
	return made
}

// forFlag returns the flag of a change that ends by itself.
func (c *ControlCommand) forFlag() cli.Flag {
	c.needFor = true
	return &cli.DurationFlag{Name: "for", Usage: "it ends by itself after `DURATION`; required", Destination: &c.For}
}

// sign notes who makes the change and why, and checks the flags that all changes have.
func (c *ControlCommand) sign() error {
	who, _ := c.Env("USER")
	c.author = control.Author{Who: cmp.Or(c.By, who), Why: c.Why}
	switch {
	case strings.TrimSpace(c.author.Why) == "":
		return badInput("--why is missing: must be the reason of the change")
	case c.needFor && c.For == 0:
		return badInput("--for is missing: must be how long, such as 10m")
	case c.needFor && (c.For < 0 || c.For > control.MaxTTL):
		return badInput("--for %v: must be how long, such as 10m, and at most %v", c.For, control.MaxTTL)
	case strings.TrimSpace(c.author.Who) == "":
		return badInput("--by is missing, and $USER is not set: must be who makes the change")
	}
	return nil
}

// about reads the arguments POLICY [TENANT]. It warns if it cannot tell whether the policy or tenant exists.
func (c *ControlCommand) about(ctx context.Context, f *fleet, args cli.Args) error {
	c.policy, c.tenant = args.Get(0), args.Get(1)
	if len(f.limiter.Policies()) == 0 {
		fmt.Fprintf(c.Stderr, "sluice: warning: no policies are published: "+
			"whether there is a policy %q is not known\n", c.policy)
		return nil
	}
	p, err := f.policy(c.policy)
	if err != nil || c.tenant == "" {
		return err
	}
	seen, others, err := c.seen(ctx, f, p)
	if err != nil || seen {
		return err
	}
	hint := "is it spelt right?"
	if near := policyfile.Suggest(c.tenant, others); near != "" {
		hint = fmt.Sprintf("did you mean %q?", near)
	}
	fmt.Fprintf(c.Stderr, "sluice: warning: %s has nothing that waits, and was granted nothing lately: %s\n", c.name(), hint)
	return nil
}

// seen reports whether anything is known of the tenant, and if not, which others wait or were granted most.
func (c *ControlCommand) seen(ctx context.Context, f *fleet, p throttle.Policy) (seen bool, others []string, err error) {
	_, seen = p.Tenants[c.tenant]
	state, err := inspect.Of(f.limiter).State(ctx, inspect.Query{Policy: p.Name, Tenant: c.tenant})
	if err != nil {
		return false, nil, err
	}
	for _, t := range state.Tenants {
		seen = seen || t.Waiting > 0
		for _, w := range t.Windows {
			seen = seen || w.Used > 0
		}
	}
	for _, o := range f.state.Overrides {
		seen = seen || o.Policy == p.Name && o.Tenant == c.tenant
	}
	uses, err := usage.Top(ctx, f.limiter, p.Name, 1000)
	if err != nil || seen {
		return seen, nil, err
	}
	for _, use := range uses {
		seen = seen || use.Tenant == c.tenant
		others = append(others, use.Tenant)
	}
	all, err := inspect.Of(f.limiter).State(ctx, inspect.Query{Limit: inspect.MaxLimit, Policy: p.Name})
	for _, t := range all.Tenants {
		others = append(others, t.Tenant)
	}
	return seen, others, err
}

// name returns the name of the policy, or of its tenant, for messages.
func (c *ControlCommand) name() string {
	if c.tenant == "" {
		return c.policy
	}
	return fmt.Sprintf("tenant %q of %s", c.tenant, c.policy)
}

// clockText returns a time as people read it.
func clockText(t time.Time) string { return t.UTC().Format(time.DateTime) + " UTC" }

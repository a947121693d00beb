package main

import (
	"cmp"
	"context"
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

// A ControlCommand changes limits, or pauses, for all programs that follow the control.Store.
type ControlCommand struct {
	workersCommand

	Who string        // who makes the change
	For time.Duration // how long it lasts
	Why string

	args           cli.Args
	author         control.Author
	needsFor       bool   // the command requires --for
	policy, tenant string // its target; the tenant may be ""
}

func (m *Main) control() *ControlCommand {
	return &ControlCommand{workersCommand: workersCommand{Main: m}}
}

// An outcome is the JSON of a change. Without --json its text is shown.
type outcome struct {
	Policy   string `json:"policy,omitempty"`
	Tenant   string `json:"tenant,omitempty"`
	Changed  bool   `json:"changed"`
	Changes  string `json:"changes,omitempty"` // of the policies
	Count    int    `json:"count,omitempty"`
	Override string `json:"override,omitempty"` // of all tenants, in force on top of the published policies
	Replaces string `json:"replaces,omitempty"` // the earlier override or pause, and who made it
	Version  int64  `json:"version,omitempty"`
	Until    string `json:"until,omitempty"`

	text string // of an intervention: without its target, which complete puts first
}

// An action makes the change of a command.
type action func(ctx context.Context, f *fleet) (outcome, error)

// whyFlags returns the flags for the author of a change.
func (c *ControlCommand) whyFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "why", Usage: "the reason, `TEXT`, is logged; every change requires one", Destination: &c.Why},
		&cli.StringFlag{Name: "by", Usage: "`NAME` makes the change; by default $USER", Destination: &c.Who},
	}
}

// change returns a command that makes a change.
func (c *ControlCommand) change(name, usage, args string, do action, flags ...cli.Flag) *cli.Command {
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
			c.args = cmd.Args()
			out, err := do(ctx, f)
			if err != nil {
				return err
			}
			return c.show(out, func() { fmt.Fprintln(c.Stdout, out.text) })
		},
	}
}

// intervention returns a command that intervenes in a policy, or for one tenant of it: the target.
func (c *ControlCommand) intervention(name, usage, args string, do action, flags ...cli.Flag) *cli.Command {
	return c.change(name, usage, args, func(ctx context.Context, f *fleet) (outcome, error) {
		if err := c.readTarget(ctx, f); err != nil {
			return outcome{}, err
		}
		out, err := do(ctx, f)
		return c.complete(out), err
	}, flags...)
}

// complete adds to an intervention's outcome the target and the end, and to its text what the intervention replaces.
func (c *ControlCommand) complete(out outcome) outcome {
	out.Policy, out.Tenant, out.text = c.policy, c.tenant, c.target()+out.text
	if c.For > 0 {
		until := time.Now().Add(c.For)
		out.Changed, out.Until = true, until.UTC().Format(time.RFC3339)
		out.text += " until " + clockText(until)
	}
	if out.Replaces != "" {
		out.text += ", instead of " + out.Replaces
	}
	return out
}

// requireFor returns the flag --for, and makes sign require it.
func (c *ControlCommand) requireFor() cli.Flag {
	c.needsFor = true
	return &cli.DurationFlag{Name: "for", Usage: "it ends by itself after `DURATION`; required", Destination: &c.For}
}

// sign sets the author of the change, and checks --why, --by and --for.
func (c *ControlCommand) sign() error {
	user, _ := c.Env("USER")
	c.author = control.Author{Who: cmp.Or(c.Who, user), Why: c.Why}
	switch {
	case strings.TrimSpace(c.author.Why) == "":
		return badInput("--why is missing: must be the reason of the change")
	case c.needsFor && (c.For <= 0 || c.For > throttle.MaxPeriod):
		return badInput("--for %v: must be given, such as 10m: above 0 and at most %v", c.For, throttle.MaxPeriod)
	case strings.TrimSpace(c.author.Who) == "":
		return badInput("--by is missing, and $USER is not set: must be who makes the change")
	}
	return nil
}

// readTarget reads the arguments POLICY [TENANT]. It warns where the policy or the tenant may be misspelt.
func (c *ControlCommand) readTarget(ctx context.Context, f *fleet) error {
	c.policy, c.tenant = c.args.Get(0), c.args.Get(1)
	if len(f.limiter.Policies()) == 0 {
		fmt.Fprintf(c.Stderr, "sluice: warning: no policies are published: "+
			"whether there is a policy %q is not known\n", c.policy)
		return nil
	}
	p, err := f.policy(c.policy)
	override, pause := f.state.Describe(control.Overridden, c.policy, c.tenant), f.state.Describe(control.Paused, c.policy, c.tenant)
	if err != nil && override+pause != "" {
		return nil // no such policy is known, but its override and pause can be ended
	}
	if err != nil || c.tenant == "" || override != "" {
		return err
	}
	known, others, err := c.lookUpTenant(ctx, f, p)
	if err != nil || known {
		return err
	}
	hint := "is it spelt right?"
	if near := policyfile.Suggest(c.tenant, others); near != "" {
		hint = fmt.Sprintf("did you mean %q?", near)
	}
	fmt.Fprintf(c.Stderr, "sluice: warning: %s has nothing that waits, and is not known to have been granted anything: %s\n", c.target(), hint)
	return nil
}

// lookUpTenant reports whether the policy knows the tenant: by its settings, tickets, units used or grants of
// the last hour. If not, it returns the names of tenants that the policy knows.
func (c *ControlCommand) lookUpTenant(
	ctx context.Context, f *fleet, p throttle.Policy,
) (known bool, others []string, err error) {
	_, known = p.Tenants[c.tenant]
	state, err := inspect.Of(f.limiter).State(ctx, inspect.Query{Policy: p.Name, Tenant: c.tenant})
	if err != nil {
		return false, nil, err
	}
	for _, t := range state.Tenants {
		known = known || t.Waiting > 0
		for _, w := range t.Windows {
			known = known || w.Used > 0
		}
	}
	uses, err := usage.Top(ctx, f.limiter, p.Name, 1000)
	if err != nil || known {
		return known, nil, err
	}
	for _, use := range uses {
		known = known || use.Tenant == c.tenant
		others = append(others, use.Tenant)
	}
	all, err := inspect.Of(f.limiter).State(ctx, inspect.Query{Policy: p.Name})
	for _, t := range all.Tenants {
		others = append(others, t.Tenant)
	}
	return known, others, err
}

// target names the policy, or its tenant, in messages.
func (c *ControlCommand) target() string {
	if c.tenant == "" {
		return c.policy
	}
	return fmt.Sprintf("tenant %q of %s", c.tenant, c.policy)
}

// clockText returns a time for people, "-" for none.
func clockText(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.DateTime) + " UTC"
}

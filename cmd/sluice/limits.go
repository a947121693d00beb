package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

// limitsCommand shows and changes the policies and overrides in force.
func (m *Main) limitsCommand() *cli.Command {
	return &cli.Command{
		Name: "limits", Usage: "show and change limits while programs run",
		Commands: []*cli.Command{
			m.limitsShow(), m.limitsPublish(), m.limitsSet(), m.limitsRollback(),
			m.limitsOverride(), m.limitsClear(), m.limitsLog(),
		},
	}
}

// A limitsInForce is the JSON of "limits show".
type limitsInForce struct {
	At      time.Time `json:"at"`
	Version int64     `json:"version"`
	policyfile.Description
	Overrides []throttle.TenantOverride `json:"overrides"`
	Pauses    []throttle.Pause          `json:"pauses"`
}

func (m *Main) limitsShow() *cli.Command {
	c := m.control()
	return &cli.Command{
		Name: "show", ArgsUsage: "[POLICY]", Flags: c.flags(),
		Usage: "show what is published, overridden and paused",
		Action: onFleet(c.connect, func(_ context.Context, f *fleet, cmd *cli.Command) error {
			state := f.state
			if name := cmd.Args().First(); name != "" {
				state.Policies = slices.DeleteFunc(state.Policies, func(p throttle.Policy) bool { return p.Name != name })
				state.Overrides = slices.DeleteFunc(state.Overrides, func(o throttle.TenantOverride) bool { return o.Policy != name })
				state.Pauses = slices.DeleteFunc(state.Pauses, func(p throttle.Pause) bool { return p.Policy != name })
				if len(state.Policies)+len(state.Overrides)+len(state.Pauses) == 0 {
					return cmp.Or(state.PoliciesErr, badInput("policy %q: nothing is published of it, or in force", name))
				}
			}
			found := limitsInForce{
				At: state.At.UTC(), Version: state.Version, Description: policyfile.Describe(state.Policies),
				Overrides: append([]throttle.TenantOverride{}, state.Overrides...), Pauses: append([]throttle.Pause{}, state.Pauses...),
			}
			return cmp.Or(c.show(found, func() { c.printInForce(state) }), state.PoliciesErr)
		}),
	}
}

func (c *ControlCommand) printInForce(state control.State) {
	if state.Version == 0 {
		fmt.Fprintln(c.Stdout, "no policies are published: programs have their own")
	} else {
		fmt.Fprintf(c.Stdout, "version %d\n%s", state.Version, strings.ReplaceAll(policyfile.Describe(state.Policies).Text(), "${", "$${"))
	}
	overrides := show.NewTable(c.Stdout, "OVERRIDE", "TENANT", "WHAT", "UNTIL", "BY", "WHY")
	for _, o := range state.Overrides {
		overrides.Row(o.Policy, cmp.Or(o.Tenant, "(all)"), control.DescribeOverride(o), clockText(o.Until), o.Author, o.Why)
	}
	overrides.Flush()
	pauses := show.NewTable(c.Stdout, "PAUSE", "TENANT", "UNTIL", "BY", "WHY")
	for _, p := range state.Pauses {
		pauses.Row(p.Policy, cmp.Or(p.Tenant, "(all)"), clockText(p.Until), p.Author, p.Cause)
	}
	pauses.Flush()
}

// publish publishes policies, if those in force have the version to be replaced.
func (c *ControlCommand) publish(
	ctx context.Context, f *fleet, policies []throttle.Policy, replaced int64,
) (out outcome, err error) {
	out.Version, err = f.store.Publish(ctx, policies, replaced, c.author)
	if out.Version == replaced {
		out.text = fmt.Sprintf("these policies are published already, as version %d", replaced)
		return out, err
	}
	out.Changed, out.Changes = true, control.Differences(f.state.Policies, policies)
	out.text = fmt.Sprintf("published version %d: %s", out.Version, out.Changes)
	return out, err
}

func (m *Main) limitsPublish() *cli.Command {
	c, replaced := m.control(), int64(-1)
	publish := func(ctx context.Context, f *fleet) (outcome, error) {
		policies, err := c.loadPolicies(c.args.First())
		if err != nil {
			return outcome{}, err
		}
		if replaced < 0 {
			replaced = f.state.Version
		}
		return c.publish(ctx, f, policies, replaced)
	}
	return c.change("publish", "publish the policies of a file", "FILE", publish, &cli.Int64Flag{
		Name: "version", Usage: "replace the policies of version `N` alone, 0 for none; by default those in force",
		Value: -1, DefaultText: "-", Destination: &replaced,
	})
}

func (m *Main) limitsSet() *cli.Command {
	c := m.control()
	var limit, burst int64
	set := func(ctx context.Context, f *fleet) (outcome, error) {
		switch {
		case limit == 0 && burst == 0:
			return outcome{}, badUsage("set needs --limit, --burst or both, above 0")
		case f.state.Version == 0:
			return outcome{}, badUsage("no policies are published: publish a policy file first")
		}
		window := c.args.Get(1)
		c.policy = c.args.Get(0)
		p, err := f.policy(c.policy)
		if err != nil {
			return outcome{}, err
		}
		if _, err := windowOf(p, window); err != nil {
			return outcome{}, err
		}
		changed := map[string]throttle.Override{window: {Burst: burst, Limit: limit}}
		o := throttle.TenantOverride{Policy: c.policy, Windows: changed}
		if c.For != 0 {
			out, err := c.override(ctx, f, o)
			return c.complete(out), err
		}
		policies, err := f.state.With(o)
		if err != nil {
			return outcome{}, err
		}
		out, err := c.publish(ctx, f, policies, f.state.Version)
		out.Policy, out.Override = c.policy, f.state.Describe(control.Overridden, c.policy, "")
		if out.Override != "" {
			out.text += "; still in force for all tenants: " + out.Override
		}
		return out, err
	}
	return c.change("set", "change the numbers of a window", "POLICY WINDOW", set,
		&cli.Int64Flag{Name: "limit", Usage: "the window grants `N` units", Destination: &limit},
		&cli.Int64Flag{Name: "burst", Usage: "of a gcra window: `N` units at once", Destination: &burst},
		&cli.DurationFlag{
			Name: "for", Usage: "it ends by itself after `DURATION`; by default it is published", Destination: &c.For,
			Validator: within(time.Millisecond, throttle.MaxPeriod),
		})
}

func (m *Main) limitsRollback() *cli.Command {
	c, version := m.control(), int64(0)
	rollback := func(ctx context.Context, f *fleet) (outcome, error) {
		changes, err := f.store.Changes(ctx, 1e9) // all: the log keeps fewer
		if err != nil {
			return outcome{}, err
		}
		for _, change := range changes { // the newest first
			isTarget := change.Version == version || version == 0 && change.Version < f.state.Version
			if isTarget && len(change.Policies) > 0 {
				return c.publish(ctx, f, change.Policies, f.state.Version)
			}
		}
		if version == 0 {
			return outcome{}, badInput("the log has no policies from before version %d", f.state.Version)
		}
		return outcome{}, badInput("--version %d: the log has no policies of it", version)
	}
	return c.change("rollback", "publish earlier policies again", "", rollback, &cli.Int64Flag{
		Name: "version", Usage: "go back to the policies of version `N`; by default to those before",
		DefaultText: "-", Destination: &version,
	})
}

// override sets an override, for the time of --for.
func (c *ControlCommand) override(ctx context.Context, f *fleet, o throttle.TenantOverride) (outcome, error) {
	out := outcome{
		Replaces: f.state.Describe(control.Overridden, o.Policy, o.Tenant), text: ": " + control.DescribeOverride(o),
	}
	return out, f.store.SetOverride(ctx, o, c.For, c.author)
}

func (m *Main) limitsOverride() *cli.Command {
	c := m.control()
	var exempt string
	var weight float64
	var windows []string
	override := func(ctx context.Context, f *fleet) (outcome, error) {
		o := throttle.TenantOverride{Policy: c.policy, Tenant: c.tenant, Weight: weight}
		for _, text := range windows {
			name, number, ok := strings.Cut(text, "=")
			limit, err := strconv.ParseInt(number, 10, 64)
			isLimit, twice := ok && err == nil && limit > 0, o.Windows[name].Limit > 0
			if !isLimit || twice {
				return outcome{}, badInput("--window %q: must be a window and its limit, such as minute=50, and be there once", text)
			}
			if o.Windows == nil {
				o.Windows = map[string]throttle.Override{}
			}
			o.Windows[name] = throttle.Override{Limit: limit}
		}
		switch {
		case exempt == "yes", exempt == "no":
			o.Exempt = new(exempt == "yes")
		case exempt != "":
			return outcome{}, badInput("--exempt %q: must be yes or no", exempt)
		case o.Windows == nil && weight == 0:
			return outcome{}, badUsage("override needs --window, --weight or --exempt")
		}
		return c.override(ctx, f, o)
	}
	return c.intervention("override", "change limits or the weight of a tenant, for a time", "POLICY TENANT", override,
		c.requireFor(),
		&cli.StringSliceFlag{Name: "window", Destination: &windows,
			Usage: "`NAME=LIMIT` of a window that counts by tenant; may be given several times"},
		&cli.FloatFlag{Name: "weight", Destination: &weight,
			Usage: "the tenant's share is `N` times that of weight 1"},
		&cli.StringFlag{Name: "exempt", Destination: &exempt,
			Usage: "`yes`: counted, and denied only by operators' pauses; no: not exempt"})
}

func (m *Main) limitsClear() *cli.Command {
	c := m.control()
	return c.intervention("clear", "end an override early", "POLICY [TENANT]",
		func(ctx context.Context, f *fleet) (outcome, error) {
			found, err := f.store.End(ctx, control.Cleared, c.policy, c.tenant, c.author)
			if !found {
				return outcome{text: " had no override"}, err
			}
			return outcome{Changed: true, text: " has no override any more"}, err
		})
}

// A loggedChange is the JSON of a change in "limits log": its policies are as in a policy file.
type loggedChange struct {
	control.Change
	Policies []map[string]any `json:"policies,omitempty"`
}

func (m *Main) limitsLog() *cli.Command {
	c, last := m.control(), 0
	return &cli.Command{
		Name: "log", Usage: "show who changed what, when and why",
		Flags: c.flags(&cli.IntFlag{Name: "last", Usage: "show the newest `N` changes", Value: 20, Destination: &last,
			Validator: within(1, 10_000)}), // as many as the log keeps
		Action: onFleet(c.connect, func(ctx context.Context, f *fleet, _ *cli.Command) error {
			changes, err := f.store.Changes(ctx, last)
			if err != nil {
				return err
			}
			logged := make([]loggedChange, len(changes))
			for i, change := range changes {
				logged[i] = loggedChange{change, policyfile.Describe(change.Policies).Policies}
			}
			return c.show(logged, func() {
				t := show.NewTable(c.Stdout, "AT", "WHAT", "POLICY", "TENANT", "CHANGE", "BY", "WHY")
				for _, change := range changes {
					kind := change.Kind
					if kind == control.Published {
						kind = fmt.Sprintf("version %d", change.Version)
					}
					t.Row(clockText(change.At), kind, change.Policy, change.Tenant, change.Text, change.Who, change.Why)
				}
				t.Flush()
			})
		}),
	}
}

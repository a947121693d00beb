package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// LimitsCommand shows and changes what is in force.
type LimitsCommand struct {
	controlFlags

	Burst   int64
	Exempt  string // "", "yes" or "no"
	Last    int
	Limit   int64
	Version int64 // -1 for the present one
	Weight  float64
	Windows []string // NAME=LIMIT
}

func (c *LimitsCommand) command() *cli.Command {
	c.Version, c.Last = -1, 20
	verb := func(name, usage string, flags []cli.Flag, run cli.ActionFunc) *cli.Command {
		return &cli.Command{Name: name, Usage: usage, Flags: flags, Action: run, Hidden: true} // the help describes it
	}
	return &cli.Command{
		Name: "limits", Usage: "show and change limits while programs run", ArgsUsage: "get|publish|set|override|clear|log",
		Commands: []*cli.Command{
			verb("get", "[POLICY]", c.flags(), c.get),
			verb("publish", "FILE", c.changeFlags(
				&cli.Int64Flag{Name: "version", Usage: "replace the policies of version `N` alone, 0 for none; by default those in force", Value: c.Version, DefaultText: "-", Destination: &c.Version},
			), c.publish),
			verb("set", "POLICY WINDOW", c.changeFlags(
				&cli.Int64Flag{Name: "limit", Usage: "the window grants `N` units", Destination: &c.Limit},
				&cli.Int64Flag{Name: "burst", Usage: "of a gcra window: `N` units at once", Destination: &c.Burst},
			), c.set),
			verb("override", "POLICY TENANT", c.changeFlags(
				c.forFlag("it ends by itself after `DURATION`; required"),
				&cli.StringSliceFlag{Name: "window", Usage: "`NAME=LIMIT` of a window that counts by tenant; may be given several times", Destination: &c.Windows},
				&cli.FloatFlag{Name: "weight", Usage: "the tenant's share is `N` times that of weight 1", Destination: &c.Weight},
				&cli.StringFlag{Name: "exempt", Usage: "`yes`: counted, but never denied; no: not exempt", Destination: &c.Exempt},
			), c.override),
			verb("clear", "POLICY TENANT", c.changeFlags(), c.clear),
			verb("log", "", c.flags(
				&cli.IntFlag{Name: "last", Usage: "show the newest `N` changes", Value: c.Last, Destination: &c.Last},
			), c.log),
		},
		Action: func(_ context.Context, cmd *cli.Command) error {
			names := make([]string, len(cmd.Commands))
			for i, verb := range cmd.Commands {
				names[i] = verb.Name
			}
			if cmd.NArg() > 0 {
				return badInput("limits %q: must be one of %s: see \"worker-demo limits -h\"", cmd.Args().First(), strings.Join(names, ", "))
			}
			return badInput("limits needs one of %s: see \"worker-demo limits -h\"", strings.Join(names, ", "))
		},
	}
}

// inForce is the JSON of "limits get --json".
type inForce struct {
	At        time.Time                 `json:"at"`
	Version   int64                     `json:"version"`
	Policies  []checkedPolicy           `json:"policies"`
	Overrides []throttle.TenantOverride `json:"overrides"`
	Pauses    []throttle.OperatorPause  `json:"pauses"`
}

func (c *LimitsCommand) get(ctx context.Context, cmd *cli.Command) error {
	if cmd.NArg() > 1 {
		return badInput("limits get needs no more than a policy: see \"worker-demo limits -h\"")
	}
	d, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer d.server.Close()
	state, err := d.State(ctx)
	if err != nil {
		return err
	}
	if name := cmd.Args().First(); name != "" {
		state = onlyOf(state, name)
		if len(state.Policies)+len(state.Overrides)+len(state.Pauses) == 0 {
			return badInput("policy %q: nothing is published of it, or in force", name)
		}
	}
	if c.json {
		return show.JSON(c.Stdout, inForce{
			At: state.At.UTC(), Version: state.Version, Policies: describe(state.Policies).Policies,
			Overrides: append([]throttle.TenantOverride{}, state.Overrides...), Pauses: append([]throttle.OperatorPause{}, state.Pauses...),
		})
	}
	switch {
	case state.PoliciesErr != nil:
		fmt.Fprintf(c.Stdout, "%v\n", state.PoliciesErr)
	case state.Version == 0:
		fmt.Fprintln(c.Stdout, "no policies are published: programs have their own")
	default:
		fmt.Fprintf(c.Stdout, "version %d\n", state.Version)
	}
	for _, p := range state.Policies {
		printPolicy(c.Stdout, p)
	}
	if len(state.Overrides) > 0 {
		t := show.Table(c.Stdout)
		fmt.Fprintln(t, "OVERRIDE\tTENANT\tWHAT\tUNTIL\tBY\tWHY")
		for _, o := range state.Overrides {
			fmt.Fprintf(t, "%s\t%q\t%s\t%s\t%q\t%q\n", o.Policy, o.Tenant, control.Describe(o), clockText(o.Until), o.By, o.Why)
		}
		t.Flush()
	}
	if len(state.Pauses) > 0 {
		t := show.Table(c.Stdout)
		fmt.Fprintln(t, "PAUSE\tTENANT\tUNTIL\tBY\tWHY")
		for _, p := range state.Pauses {
			tenant := "all"
			if p.Tenant != "" {
				tenant = strconv.Quote(p.Tenant)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%q\t%q\n", p.Policy, tenant, clockText(p.Until), p.By, p.Why)
		}
		t.Flush()
	}
	return nil
}

// onlyOf is what of a state is about one policy.
func onlyOf(s control.State, policy string) control.State {
	one := control.State{PoliciesErr: s.PoliciesErr, Version: s.Version}
	one.At = s.At
	one.Policies = slices.DeleteFunc(s.Policies, func(p throttle.Policy) bool { return p.Name != policy })
	one.Overrides = slices.DeleteFunc(s.Overrides, func(o throttle.TenantOverride) bool { return o.Policy != policy })
	one.Pauses = slices.DeleteFunc(s.Pauses, func(p throttle.OperatorPause) bool { return p.Policy != policy })
	return one
}

func (c *LimitsCommand) publish(ctx context.Context, cmd *cli.Command) error {
	if cmd.NArg() != 1 {
		return badInput("limits publish needs one policy file, or - for stdin: see \"worker-demo limits -h\"")
	}
	policies, err := c.loadPolicies(cmd.Args().First())
	if err != nil {
		return inputError{err}
	}
	return c.change(ctx, func(d controlDesk, by control.By) error {
		version := c.Version
		if version < 0 {
			state, err := d.State(ctx)
			if err != nil {
				return err
			}
			version = state.Version
		}
		now, err := d.Publish(ctx, policies, version, by)
		if err != nil {
			return err
		}
		if now == version {
			return c.say(done{Version: now}, "these policies are published already, as version %d", now)
		}
		return c.say(done{Changed: true, Version: now}, "published version %d", now)
	})
}

// tries is how often a change of one number is made again after somebody else has published.
const tries = 5

func (c *LimitsCommand) set(ctx context.Context, cmd *cli.Command) error {
	policy, window := cmd.Args().First(), cmd.Args().Get(1)
	switch {
	case cmd.NArg() != 2:
		return badInput("limits set needs a policy and a window: see \"worker-demo limits -h\"")
	case c.Limit == 0 && c.Burst == 0:
		return badInput("limits set needs --limit, --burst or both: see \"worker-demo limits -h\"")
	}
	return c.change(ctx, func(d controlDesk, by control.By) error {
		for try := 1; ; try++ {
			state, err := d.State(ctx)
			if err != nil {
				return err
			}
			before, err := c.edit(&state, policy, window)
			if err != nil {
				return err
			}
			version, err := d.Publish(ctx, state.Policies, state.Version, by)
			var conflict *control.ConflictError
			if errors.As(err, &conflict) && try < tries {
				continue
			}
			if err != nil {
				return err
			}
			return c.say(done{Policy: policy, Changed: version != state.Version, Version: version},
				"%s/%s: was %s; published version %d", policy, window, before, version)
		}
	})
}

// edit changes the numbers of a window, and returns what they were.
func (c *LimitsCommand) edit(state *control.State, policy, window string) (before string, err error) {
	switch {
	case state.PoliciesErr != nil:
		return "", state.PoliciesErr
	case state.Version == 0:
		return "", badInput("no policies are published: publish a policy file first: see \"worker-demo limits -h\"")
	}
	var names []string
	for i := range state.Policies {
		p := &state.Policies[i]
		if p.Name != policy {
			names = append(names, p.Name)
			continue
		}
		var windows []string
		for j := range p.Windows {
			w := &p.Windows[j]
			if w.Name != window {
				windows = append(windows, w.Name)
				continue
			}
			before = show.Limit(*w)
			if c.Limit != 0 {
				if w.Burst == w.Limit && c.Burst == 0 {
					w.Burst = 0 // the default follows the limit
				}
				w.Limit = c.Limit
			}
			if c.Burst != 0 {
				before += fmt.Sprintf(", burst %d", w.Burst)
				w.Burst = c.Burst
			}
			return before, nil
		}
		return "", badInput("window %q: must be one of %s", window, strings.Join(windows, ", "))
	}
	return "", badInput("policy %q: must be one of %s", policy, strings.Join(names, ", "))
}

func (c *LimitsCommand) override(ctx context.Context, cmd *cli.Command) error {
	policy, tenant, err := policyAndTenant(cmd, true)
	if err != nil {
		return err
	}
	o := throttle.TenantOverride{Policy: policy, Tenant: tenant, Weight: c.Weight}
	for _, text := range c.Windows {
		name, number, ok := strings.Cut(text, "=")
		limit, err := strconv.ParseInt(number, 10, 64)
		if !ok || err != nil || limit < 1 {
			return badInput("--window %q: must be a window and its limit, such as minute=50", text)
		}
		if o.Windows == nil {
			o.Windows = map[string]throttle.Override{}
		}
		o.Windows[name] = throttle.Override{Limit: limit}
	}
	switch {
	case c.Exempt == "yes" || c.Exempt == "no":
		o.Exempt = new(c.Exempt == "yes")
	case c.Exempt != "":
		return badInput("--exempt %q: must be yes or no", c.Exempt)
	}
	if err := c.checkFor(); err != nil {
		return err
	}
	if o.Exempt == nil && o.Windows == nil && o.Weight == 0 {
		return badInput("limits override needs --window, --weight or --exempt: see \"worker-demo limits -h\"")
	}
	return c.change(ctx, func(d controlDesk, by control.By) error {
		if err := d.checkPolicy(ctx, &c.controlFlags, policy); err != nil {
			return err
		}
		if err := d.SetOverride(ctx, o, c.For, by); err != nil {
			return err
		}
		until := time.Now().Add(c.For)
		return c.say(done{Policy: policy, Tenant: tenant, Changed: true, Until: until.UTC().Format(time.RFC3339)},
			"%s: %s until %s", about(policy, tenant), control.Describe(o), clockText(until))
	})
}

func (c *LimitsCommand) clear(ctx context.Context, cmd *cli.Command) error {
	policy, tenant, err := policyAndTenant(cmd, true)
	if err != nil {
		return err
	}
	return c.change(ctx, func(d controlDesk, by control.By) error {
		found, err := d.ClearOverride(ctx, policy, tenant, by)
		if err != nil {
			return err
		}
		text := "%s has no override any more"
		if !found {
			text = "%s had no override"
		}
		return c.say(done{Policy: policy, Tenant: tenant, Changed: found}, text, about(policy, tenant))
	})
}

func (c *LimitsCommand) log(ctx context.Context, cmd *cli.Command) error {
	if cmd.NArg() > 0 || c.Last < 1 || c.Last > control.MaxChanges {
		return badInput("limits log needs no arguments, and --last 1 to %d: see \"worker-demo limits -h\"", control.MaxChanges)
	}
	d, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer d.server.Close()
	changes, err := d.Changes(ctx, "", c.Last)
	if err != nil {
		return err
	}
	if c.json {
		return show.JSON(c.Stdout, append([]control.Change{}, changes...))
	}
	t := show.Table(c.Stdout)
	fmt.Fprintln(t, "AT\tWHAT\tPOLICY\tTENANT\tCHANGE\tBY\tWHY")
	for _, e := range changes {
		fmt.Fprintf(t, "%s\t%s\t%s\t%q\t%s\t%q\t%q\n", clockText(e.At), e.What, e.Policy, e.Tenant, e.Text, e.Who, e.Why)
	}
	return t.Flush()
}

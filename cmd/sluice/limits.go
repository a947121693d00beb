package main

import (
	"cmp"
	"context"
	"errors"
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

// limitsCommand shows and changes what is in force.
func (m *Main) limitsCommand() *cli.Command {
	return &cli.Command{
		Name: "limits", Usage: "show and change limits while programs run",
		Commands: []*cli.Command{
			m.limitsGet(), m.limitsPublish(), m.limitsSet(), m.limitsOverride(), m.limitsClear(), m.limitsLog(),
		},
	}
}

// inForce is the JSON of "limits get --json".
type inForce struct {
	At      time.Time `json:"at"`
	Version int64     `json:"version"`
	policyfile.Description
	Overrides []throttle.TenantOverride `json:"overrides"`
	Pauses    []throttle.OperatorPause  `json:"pauses"`
}

func (m *Main) limitsGet() *cli.Command {
	c := m.control()
	return &cli.Command{
		Name: "get", ArgsUsage: "[POLICY]", Flags: c.flags(),
		Usage: "show what is published, overridden and paused",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			d, err := c.desk(ctx)
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
			return c.show(inForce{
				At: state.At.UTC(), Version: state.Version, Description: policyfile.Describe(state.Policies),
				Overrides: append([]throttle.TenantOverride{}, state.Overrides...),
				Pauses:    append([]throttle.OperatorPause{}, state.Pauses...),
			}, func() { c.printState(state) })
		},
	}
}

func (c *ControlCommand) printState(state control.State) {
	switch {
	case state.PoliciesErr != nil:
		fmt.Fprintf(c.Stdout, "%v\n", state.PoliciesErr)
	case state.Version == 0:
		fmt.Fprintln(c.Stdout, "no policies are published: programs have their own")
	default:
		fmt.Fprintf(c.Stdout, "version %d\n", state.Version)
	}
	if len(state.Policies) > 0 {
		fmt.Fprint(c.Stdout, policyfile.Describe(state.Policies).Text())
	}
	if len(state.Overrides) > 0 {
		t := show.Table(c.Stdout)
		fmt.Fprintln(t, "OVERRIDE\tTENANT\tWHAT\tUNTIL\tBY\tWHY")
		for _, o := range state.Overrides {
			fmt.Fprintf(t, "%s\t%q\t%s\t%s\t%q\t%q\n",
				o.Policy, o.Tenant, control.Describe(o), clockText(o.Until), o.By, o.Why)
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

func (m *Main) limitsPublish() *cli.Command {
	c, replaced := m.control(), int64(-1)
	publish := func(ctx context.Context, d controlDesk, args cli.Args) (done, error) {
		policies, err := c.loadPolicies(args.First())
		if err != nil {
			return done{}, err
		}
		if replaced < 0 {
			state, err := d.State(ctx)
			if err != nil {
				return done{}, err
			}
			replaced = state.Version
		}
		now, err := d.Publish(ctx, policies, replaced, d.by)
		if now == replaced {
			text := fmt.Sprintf("these policies are published already, as version %d", now)
			return done{Version: now, text: text}, err
		}
		return done{Changed: true, Version: now, text: fmt.Sprintf("published version %d", now)}, err
	}
	return c.change("publish", "publish the policies of a file", "FILE", publish, &cli.Int64Flag{
		Name: "version", Usage: "replace the policies of version `N` alone, 0 for none; by default those in force",
		Value: -1, DefaultText: "-", Destination: &replaced,
	})
}

// tries is how often a change of one number is made again after somebody else has published.
const tries = 5

func (m *Main) limitsSet() *cli.Command {
	c := m.control()
	var limit, burst int64
	set := func(ctx context.Context, d controlDesk, args cli.Args) (done, error) {
		policy, window := args.Get(0), args.Get(1)
		if limit == 0 && burst == 0 {
			return done{}, badUsage("set needs --limit, --burst or both")
		}
		for try := 1; ; try++ {
			state, err := d.State(ctx)
			if err != nil {
				return done{}, err
			}
			before, err := edit(&state, policy, window, limit, burst)
			if err != nil {
				return done{}, err
			}
			version, err := d.Publish(ctx, state.Policies, state.Version, d.by)
			if errors.As(err, new(*control.ConflictError)) && try < tries {
				continue
			}
			return done{
				Policy: policy, Changed: version != state.Version, Version: version,
				text: fmt.Sprintf("%s/%s: was %s; published version %d", policy, window, before, version),
			}, err
		}
	}
	return c.change("set", "change the numbers of a window", "POLICY WINDOW", set,
		&cli.Int64Flag{Name: "limit", Usage: "the window grants `N` units", Destination: &limit},
		&cli.Int64Flag{Name: "burst", Usage: "of a gcra window: `N` units at once", Destination: &burst})
}

// edit changes the numbers of a window, those that are not 0, and returns what they were.
func edit(state *control.State, policy, window string, limit, burst int64) (before string, err error) {
	switch {
	case state.PoliciesErr != nil:
		return "", state.PoliciesErr
	case state.Version == 0:
		return "", badUsage("no policies are published: publish a policy file first")
	}
	p, err := named(state.Policies, policy)
	if err != nil {
		return "", err
	}
	w, err := windowOf(p, window)
	if err != nil {
		return "", err
	}
	before = fmt.Sprintf("limit %d", w.Limit)
	if burst != 0 {
		before += fmt.Sprintf(", burst %d", w.Burst)
	}
	if limit != 0 {
		setLimit(w, limit)
	}
	w.Burst = cmp.Or(burst, w.Burst)
	return before, nil
}

func (m *Main) limitsOverride() *cli.Command {
	c := m.control()
	var exempt string
	var weight float64
	var windows []string
	override := func(ctx context.Context, d controlDesk) (done, error) {
		o := throttle.TenantOverride{Policy: c.policy, Tenant: c.tenant, Weight: weight}
		for _, text := range windows {
			name, number, ok := strings.Cut(text, "=")
			limit, err := strconv.ParseInt(number, 10, 64)
			if !ok || err != nil || limit < 1 {
				return done{}, badInput("--window %q: must be a window and its limit, such as minute=50", text)
			}
			if o.Windows == nil {
				o.Windows = map[string]throttle.Override{}
			}
			o.Windows[name] = throttle.Override{Limit: limit}
		}
		switch {
		case exempt == "yes" || exempt == "no":
			o.Exempt = new(exempt == "yes")
		case exempt != "":
			return done{}, badInput("--exempt %q: must be yes or no", exempt)
		case o.Windows == nil && weight == 0:
			return done{}, badUsage("override needs --window, --weight or --exempt")
		}
		if err := c.checkPolicy(ctx, d); err != nil {
			return done{}, err
		}
		return done{text: ": " + control.Describe(o)}, d.SetOverride(ctx, o, c.For, d.by)
	}
	return c.intervention("override", "change limits or the weight of a tenant, for a time", "POLICY TENANT", override,
		c.forFlag(),
		&cli.StringSliceFlag{Name: "window", Destination: &windows,
			Usage: "`NAME=LIMIT` of a window that counts by tenant; may be given several times"},
		&cli.FloatFlag{Name: "weight", Destination: &weight,
			Usage: "the tenant's share is `N` times that of weight 1"},
		&cli.StringFlag{Name: "exempt", Destination: &exempt,
			Usage: "`yes`: counted, but never denied; no: not exempt"})
}

func (m *Main) limitsClear() *cli.Command {
	c := m.control()
	return c.intervention("clear", "end an override early", "POLICY TENANT",
		func(ctx context.Context, d controlDesk) (done, error) {
			found, err := d.ClearOverride(ctx, c.policy, c.tenant, d.by)
			if !found {
				return done{text: " had no override"}, err
			}
			return done{Changed: true, text: " has no override any more"}, err
		})
}

func (m *Main) limitsLog() *cli.Command {
	c, last := m.control(), 0
	return &cli.Command{
		Name: "log", Usage: "show who changed what, when and why",
		Flags: c.flags(&cli.IntFlag{Name: "last", Usage: "show the newest `N` changes", Value: 20, Destination: &last}),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if last < 1 || last > control.MaxChanges {
				return badUsage("--last %d: must be 1 to %d", last, control.MaxChanges)
			}
			d, err := c.desk(ctx)
			if err != nil {
				return err
			}
			defer d.server.Close()
			changes, err := d.Changes(ctx, "", last)
			if err != nil {
				return err
			}
			return c.show(append([]control.Change{}, changes...), func() {
				t := show.Table(c.Stdout)
				fmt.Fprintln(t, "AT\tWHAT\tPOLICY\tTENANT\tCHANGE\tBY\tWHY")
				for _, e := range changes {
					fmt.Fprintf(t, "%s\t%s\t%s\t%q\t%s\t%q\t%q\n",
						clockText(e.At), e.What, e.Policy, e.Tenant, e.Text, e.Who, e.Why)
				}
				t.Flush()
			})
		},
	}
}

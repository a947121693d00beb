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
)

// SimulateCommand says when the backlog of a policy would be done by other limits or weights.
type SimulateCommand struct {
	liveCommand

	Limits  []string // WINDOW=N or WINDOW@TENANT=N
	Policy  string   // "" for the only one of the file
	Tenants int      // that are shown
	Weights []string // TENANT=W
}

func (c *SimulateCommand) flags() []cli.Flag {
	return c.liveCommand.flags(
		&cli.StringFlag{Name: "policy", Usage: "the policy `NAME`; by default the only one of the file", Destination: &c.Policy},
		&cli.StringSliceFlag{Name: "limit", Usage: "as if a limit were another: `WINDOW=N`, or WINDOW@TENANT=N for one tenant; may be given several times", Destination: &c.Limits},
		&cli.StringSliceFlag{Name: "weight", Usage: "as if a tenant's weight were another: `TENANT=W`; may be given several times", Destination: &c.Weights},
		&cli.IntFlag{Name: "tenants", Usage: "show at most `N` tenants", Value: 20, Destination: &c.Tenants},
	)
}

// A simulated is the JSON of simulate.
type simulated struct {
	Now throttle.Simulation `json:"now"` // by the policy as it is
	If  throttle.Simulation `json:"if"`  // by the changed one
}

func (c *SimulateCommand) Run(ctx context.Context) error {
	if err := c.validate(); err != nil {
		return see(err, "simulate")
	}
	server, limiter, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer server.Close()
	policies, err := named(limiter, c.Policy)
	if err != nil {
		return err
	}
	if len(policies) != 1 {
		return see(errors.New("--policy is missing: the file has several policies, and one is to be simulated"), "simulate")
	}
	changed, err := c.changed(policies[0])
	if err != nil {
		return see(err, "simulate")
	}
	backlogs, err := limiter.Simulate(ctx, policies[0], changed)
	if errors.As(err, new(*throttle.PolicyError)) {
		return inputError{err}
	}
	if err != nil {
		return err
	}
	now, then := backlogs[0], backlogs[1]
	if c.json {
		return show.JSON(c.Stdout, simulated{now, then})
	}
	c.print(now, then)
	return nil
}

func (c *SimulateCommand) validate() error {
	if len(c.Limits)+len(c.Weights) == 0 {
		return errors.New("--limit and --weight are missing: one of them must say what to change")
	}
	if c.Tenants < 1 {
		return fmt.Errorf("--tenants %d: must be at least 1", c.Tenants)
	}
	return c.liveCommand.validate()
}

// changed returns the policy as the flags would have it.
func (c *SimulateCommand) changed(p throttle.Policy) (throttle.Policy, error) {
	p = p.WithDefaults()
	names := make([]string, len(p.Windows))
	for i, w := range p.Windows {
		names[i] = w.Name
	}
	for _, flag := range c.Limits {
		what, number, _ := cutLast(flag)
		window, tenant, own := strings.Cut(what, "@")
		limit, err := strconv.ParseInt(number, 10, 64)
		i := slices.Index(names, window)
		switch {
		case err != nil || own && tenant == "":
			return p, fmt.Errorf("--limit %q: must be WINDOW=N or WINDOW@TENANT=N, with a whole number", flag)
		case i < 0:
			return p, fmt.Errorf("--limit %q: window %q: must be one of %s", flag, window, strings.Join(names, ", "))
		case own:
			t := p.Tenants[tenant]
			if t.Windows == nil {
				t.Windows = map[string]throttle.Override{}
			}
			o := t.Windows[window]
			o.Limit = limit
			t.Windows[window] = o
			p.Tenants[tenant] = t
		default:
			if p.Windows[i].Burst == p.Windows[i].Limit { // the default
				p.Windows[i].Burst = 0
			}
			p.Windows[i].Limit = limit
		}
	}
	for _, flag := range c.Weights {
		tenant, number, ok := cutLast(flag)
		weight, err := strconv.ParseFloat(number, 64)
		if !ok || err != nil || tenant == "" {
			return p, fmt.Errorf("--weight %q: must be TENANT=W, with a number", flag)
		}
		t := p.Tenants[tenant]
		t.Weight = weight
		p.Tenants[tenant] = t
	}
	return p, nil
}

// cutLast cuts at the last equals sign: names of tenants may hold some.
func cutLast(s string) (before, after string, found bool) {
	i := strings.LastIndexByte(s, '=')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

func (c *SimulateCommand) print(now, then throttle.Simulation) {
	fmt.Fprintf(c.Stdout, "policy %s: %s waiting, all started %s now, %s then\n",
		now.Policy, count(now.Waiting, "ticket"), finishText(now.Finish, now.At), finishText(then.Finish, then.At))
	if len(now.Tenants) == 0 {
		return
	}
	after := map[string]throttle.TenantSimulation{}
	for _, t := range then.Tenants {
		after[t.Tenant] = t
	}
	t := show.Table(c.Stdout)
	fmt.Fprintln(t, "  TENANT\tWAITING\tALL STARTED NOW\tTHEN\t")
	for _, tenant := range now.Tenants[:min(len(now.Tenants), c.Tenants)] {
		other := after[tenant.Tenant]
		note := ""
		if other.NeverFits != "" {
			note = "some never fit window " + other.NeverFits
		}
		fmt.Fprintf(t, "  %s\t%d\t%s\t%s\t%s\n", printable(tenant.Tenant), tenant.Waiting,
			finishText(tenant.Finish, now.At), finishText(other.Finish, then.At), note)
	}
	t.Flush()
	if more := len(now.Tenants) - c.Tenants; more > 0 {
		fmt.Fprintf(c.Stdout, "  and %s more\n", count(int64(more), "tenant"))
	}
}

func finishText(f throttle.Finish, at time.Time) string {
	switch {
	case !f.Known:
		return "never"
	case !f.Last.After(at):
		return "at once"
	}
	return "in " + since(at, f.Last)
}

package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

// SimulateCommand computes when the backlog of a policy would be done with other limits or weights.
type SimulateCommand struct {
	workersCommand

	Limits  []string // WINDOW=N or WINDOW@TENANT=N
	Tenants int      // that are shown
	Weights []string // TENANT=W
}

// A simulated is the JSON of simulate.
type simulated struct {
	Source string       `json:"source"` // of the policy
	Policy string       `json:"policy"`
	Now    inspect.Plan `json:"now"` // by the policy as it is
	If     inspect.Plan `json:"if"`  // by the changed policy
}

func (m *Main) simulateCommand() *cli.Command {
	c := &SimulateCommand{workersCommand: workersCommand{Main: m}}
	return &cli.Command{
		Name: "simulate", ArgsUsage: "[POLICY]", Usage: "say when the backlog would be done by other limits or weights", Action: onFleet(c.open, c.run),
		Flags: c.liveFlags(
			&cli.StringSliceFlag{Name: "limit", Destination: &c.Limits,
				Usage: "as if a limit were another: `WINDOW=N`, or WINDOW@TENANT=N for one tenant; " +
					"may be given several times"},
			&cli.StringSliceFlag{Name: "weight", Destination: &c.Weights,
				Usage: "as if a tenant's weight were another: `TENANT=W`; may be given several times"},
			&cli.IntFlag{Name: "tenants", Value: 20, Destination: &c.Tenants,
				Usage: "show at most `N` tenants"},
		),
	}
}

// open checks the flags before it connects.
func (c *SimulateCommand) open(ctx context.Context) (*fleet, error) {
	switch {
	case len(c.Limits)+len(c.Weights) == 0:
		return nil, badUsage("--limit and --weight are missing: one of them must say what to change")
	case c.Tenants < 1:
		return nil, badUsage("--tenants %d: must be at least 1", c.Tenants)
	}
	return c.inForce(ctx)
}

func (c *SimulateCommand) run(ctx context.Context, f *fleet, cmd *cli.Command) error {
	policy, err := f.policy(cmd.Args().First())
	if err != nil {
		return err
	}
	changed, overrides, err := c.changed(policy, f.limiter.Interventions())
	if err != nil {
		return err
	}
	now, then, err := inspect.Of(f.limiter).Simulate(ctx, changed, overrides...)
	if err != nil {
		return err
	}
	found := simulated{f.source, policy.Name, now, then}
	return c.show(found, func() { c.print(found) })
}

// changed returns the policy that the flags ask for, and overrides. A change for one tenant is an override: so it
// wins over the tenant's settings in the policy, and what else an override in force changes stays.
func (c *SimulateCommand) changed(p throttle.Policy, inForce throttle.Interventions) (
	changed throttle.Policy, overrides []throttle.TenantOverride, err error) {
	changed = p.WithDefaults()
	for _, flag := range c.Limits {
		what, number, _ := cutLast(flag)
		window, tenant, ofTenant := strings.Cut(what, "@")
		limit, err := strconv.ParseInt(number, 10, 64)
		if err != nil || ofTenant && (tenant == "" || limit == 0) {
			return changed, nil, badUsage("--limit %q: must be WINDOW=N or WINDOW@TENANT=N, with a whole number above 0", flag)
		}
		w, err := windowOf(changed, window)
		if err != nil {
			return changed, nil, badUsage("--limit %q: %w", flag, err)
		}
		if !ofTenant {
			setLimit(w, limit)
			continue
		}
		o := overrideOf(&overrides, p.Name, tenant, inForce)
		burst := o.Windows[window].Burst
		o.Windows[window] = throttle.Override{Burst: burst, Limit: limit}
	}
	for _, flag := range c.Weights {
		tenant, number, ok := cutLast(flag)
		weight, err := strconv.ParseFloat(number, 64)
		if !ok || err != nil || tenant == "" || weight == 0 {
			return changed, nil, badUsage("--weight %q: must be TENANT=W, with a number above 0", flag)
		}
		overrideOf(&overrides, p.Name, tenant, inForce).Weight = weight
	}
	return changed, overrides, nil
}

// setLimit sets a window's limit. A burst that equals the limit goes back to its default, the new limit.
func setLimit(w *throttle.Window, limit int64) {
	if w.Burst == w.Limit {
		w.Burst = 0
	}
	w.Limit = limit
}

// overrideOf returns the override of a tenant. A new one begins as a copy of the override in force.
func overrideOf(all *[]throttle.TenantOverride, policy, tenant string, inForce throttle.Interventions) *throttle.TenantOverride {
	match := func(o throttle.TenantOverride) bool { return o.Policy == policy && o.Tenant == tenant }
	i := slices.IndexFunc(*all, match)
	if i < 0 {
		o := throttle.TenantOverride{Policy: policy, Tenant: tenant}
		if j := slices.IndexFunc(inForce.Overrides, match); j >= 0 {
			o = inForce.Overrides[j]
		}
		o.Windows = throttle.Tenant{}.With(o).Windows // a copy: nobody may change the map in force
		*all = append(*all, o)
		i = len(*all) - 1
	}
	return &(*all)[i]
}

// cutLast cuts at the last equals sign, as names of tenants may contain others.
func cutLast(s string) (key, value string, found bool) {
	i := strings.LastIndexByte(s, '=')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

func (c *SimulateCommand) print(s simulated) {
	now, then := s.Now, s.If
	fmt.Fprintln(c.Stdout, "policies: "+s.Source)
	fmt.Fprintf(c.Stdout, "policy %s: %s waiting, all started %s now, %s then\n", s.Policy,
		countText(int64(now.Count), "ticket"), finishText(now.Finish, now.At), finishText(then.Finish, then.At))
	if len(now.Tenants) == 0 {
		return
	}
	thenOf := map[string]inspect.Finish{}
	for _, t := range then.Tenants {
		thenOf[t.Tenant] = t
	}
	t := show.NewTable(c.Stdout, "TENANT", "WAITING", "ALL STARTED NOW", "THEN", "")
	for _, tenant := range now.Tenants[:min(len(now.Tenants), c.Tenants)] {
		finish := thenOf[tenant.Tenant]
		note := ""
		if finish.NeverFits != "" {
			note = "some never fit window " + finish.NeverFits
		}
		t.Row(tenant.Tenant, tenant.Count, finishText(tenant, now.At), finishText(finish, then.At), note)
	}
	t.Flush()
	if more := len(now.Tenants) - c.Tenants; more > 0 {
		fmt.Fprintf(c.Stdout, "and %s more\n", countText(int64(more), "tenant"))
	}
}

func finishText(f inspect.Finish, at time.Time) string {
	switch {
	case f.Expected.IsZero():
		return "never"
	case !f.Expected.After(at):
		return "at once"
	}
	return "in " + spanText(at, f.Expected)
}

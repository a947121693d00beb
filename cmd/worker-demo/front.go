package main

import (
	"context"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// frontWeight has a tenant go before all others: it is the largest weight.
const frontWeight = 1e6

// FrontCommand lets the tasks of a tenant go before those of others.
type FrontCommand struct{ controlFlags }

func (c *FrontCommand) command() *cli.Command {
	return &cli.Command{
		Name: "front", Usage: "let the waiting tasks of a tenant go before those of others", ArgsUsage: "POLICY TENANT",
		Flags: c.changeFlags(c.forFlag("it ends by itself after `DURATION`; required")), Action: c.Run,
	}
}

func (c *FrontCommand) Run(ctx context.Context, cmd *cli.Command) error {
	policy, tenant, err := policyAndTenant(cmd, true)
	if err != nil {
		return err
	}
	if err := c.checkFor(); err != nil {
		return err
	}
	return c.change(ctx, func(d controlDesk, by control.By) error {
		if err := d.checkPolicy(ctx, &c.controlFlags, policy); err != nil {
			return err
		}
		state, err := d.State(ctx)
		if err != nil {
			return err
		}
		o := throttle.TenantOverride{Policy: policy, Tenant: tenant}
		for _, before := range state.Overrides {
			if before.Policy == policy && before.Tenant == tenant {
				if left := before.Until.Sub(state.At); before.Weight != frontWeight && left > c.For {
					return badInput("%s has an override by %q for another %v: clear it, or let front hold for as long", about(policy, tenant), before.By, left.Round(time.Second))
				}
				o = before
			}
		}
		o.Weight = frontWeight
		if err := d.SetOverride(ctx, o, c.For, by); err != nil {
			return err
		}
		until := time.Now().Add(c.For)
		return c.say(done{Policy: policy, Tenant: tenant, Changed: true, Until: until.UTC().Format(time.RFC3339)},
			"%s goes before others until %s", about(policy, tenant), clockText(until))
	})
}

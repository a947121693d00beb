package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle/control"
)

// ResetCommand empties windows.
type ResetCommand struct{ policiesFlags }

func (c *ResetCommand) command() *cli.Command {
	return &cli.Command{
		Name: "reset", Usage: "empty the windows of a policy, or of one tenant", ArgsUsage: "POLICY [TENANT]",
		Flags: c.changeFlags(c.policiesFlag()), Action: c.Run,
	}
}

func (c *ResetCommand) Run(ctx context.Context, cmd *cli.Command) error {
	policy, tenant, err := policyAndTenant(cmd, false)
	if err != nil {
		return err
	}
	return c.change(ctx, func(d controlDesk, by control.By) error {
		limiter, err := c.limiter(ctx, d, policy)
		if err != nil {
			return err
		}
		if err := d.Record(ctx, control.Change{By: by, Policy: policy, Tenant: tenant, What: control.WasReset}); err != nil {
			return err
		}
		n, err := limiter.Reset(ctx, policy, tenant)
		if err != nil {
			return err
		}
		return c.say(done{Policy: policy, Tenant: tenant, Changed: n > 0, Count: n}, "%s: emptied %d counts", about(policy, tenant), n)
	})
}

package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/worker"
)

// DropCommand archives or deletes the waiting tasks of a tenant.
type DropCommand struct {
	policiesFlags

	Delete bool
}

func (c *DropCommand) command() *cli.Command {
	return &cli.Command{
		Name: "drop", Usage: "archive or delete the waiting tasks of a tenant", ArgsUsage: "POLICY TENANT",
		Flags: c.changeFlags(
			&cli.BoolFlag{Name: "delete", Usage: "delete the tasks; by default they are archived", Destination: &c.Delete},
			c.policiesFlag(),
		),
		Action: c.Run,
	}
}

func (c *DropCommand) Run(ctx context.Context, cmd *cli.Command) error {
	policy, tenant, err := policyAndTenant(cmd, true)
	if err != nil {
		return err
	}
	return c.change(ctx, func(d controlDesk, by control.By) error {
		limiter, err := c.limiter(ctx, d, policy)
		if err != nil {
			return err
		}
		verb := "archived"
		if c.Delete {
			verb = "deleted"
		}
		if err := d.Record(ctx, control.Change{By: by, Policy: policy, Tenant: tenant, Text: "waiting tasks are " + verb, What: control.Dropped}); err != nil {
			return err
		}
		n, err := worker.Drop(ctx, d.server.Opt, limiter, worker.DropOptions{Delete: c.Delete, Policy: policy, Tenant: tenant})
		if err != nil {
			return err
		}
		return c.say(done{Policy: policy, Tenant: tenant, Changed: n > 0, Count: n}, "%s: %s %d waiting tasks", about(policy, tenant), verb, n)
	})
}

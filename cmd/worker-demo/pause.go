package main

import (
	"context"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// PauseCommand stops grants of a policy, or to one tenant of it.
type PauseCommand struct{ controlFlags }

func (c *PauseCommand) command() *cli.Command {
	return &cli.Command{
		Name: "pause", Usage: "stop a policy, or one tenant of it, for a while", ArgsUsage: "POLICY [TENANT]",
		Flags: c.changeFlags(c.forFlag("it ends by itself after `DURATION`; required")), Action: c.Run,
	}
}

func (c *PauseCommand) Run(ctx context.Context, cmd *cli.Command) error {
	policy, tenant, err := policyAndTenant(cmd, false)
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
		if err := d.Pause(ctx, policy, tenant, c.For, by); err != nil {
			return err
		}
		until := time.Now().Add(c.For)
		return c.say(done{Policy: policy, Tenant: tenant, Changed: true, Until: until.UTC().Format(time.RFC3339)},
			"%s is paused until %s", about(policy, tenant), clockText(until))
	})
}

// ResumeCommand ends a pause, by an operator or by the upstream.
type ResumeCommand struct{ controlFlags }

func (c *ResumeCommand) command() *cli.Command {
	return &cli.Command{
		Name: "resume", Usage: "end a pause early, an operator's or the upstream's", ArgsUsage: "POLICY [TENANT]",
		Flags: c.changeFlags(), Action: c.Run,
	}
}

func (c *ResumeCommand) Run(ctx context.Context, cmd *cli.Command) error {
	policy, tenant, err := policyAndTenant(cmd, false)
	if err != nil {
		return err
	}
	return c.change(ctx, func(d controlDesk, by control.By) error {
		if err := d.checkPolicy(ctx, &c.controlFlags, policy); err != nil {
			return err
		}
		found, err := d.Resume(ctx, policy, tenant, by)
		if err != nil {
			return err
		}
		ended, err := c.resumeUpstream(ctx, d, policy, tenant, by, found)
		if err != nil {
			return err
		}
		if !found && !ended {
			return c.say(done{Policy: policy, Tenant: tenant}, "%s was not paused", about(policy, tenant))
		}
		return c.say(done{Policy: policy, Tenant: tenant, Changed: true}, "%s is not paused any more", about(policy, tenant))
	})
}

// resumeUpstream ends a pause that the upstream asked for, where the published policy has a count for
// it. It is logged, unless that was.
func (c *ResumeCommand) resumeUpstream(ctx context.Context, d controlDesk, policy, tenant string, by control.By, logged bool) (bool, error) {
	state, err := d.State(ctx)
	if err != nil || state.Policies == nil {
		return false, err
	}
	limiter, err := throttle.New(throttle.Config{Client: d.server.Client, Policies: state.Policies, Prefix: c.Prefix})
	if err != nil {
		return false, err
	}
	r := throttle.Request{Policy: policy, Tenant: tenant}
	before, err := limiter.Peek(ctx, r)
	if err != nil || before.Pause == nil && before.Adapted == nil {
		return false, nil // the policy counts by more than the tenant, or nothing is paused
	}
	if !logged {
		if err := d.Record(ctx, control.Change{By: by, Policy: policy, Tenant: tenant, Text: "the upstream's pause", What: control.Resumed}); err != nil {
			return false, err
		}
	}
	return true, limiter.Resume(ctx, r)
}

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/worker"
)

// pauseCommand stops grants of a policy, or to one tenant of it.
func (m *Main) pauseCommand() *cli.Command {
	c := m.control()
	return c.intervention("pause", "stop a policy, or one tenant of it, for a while", "POLICY [TENANT]",
		func(ctx context.Context, d controlDesk) (done, error) {
			if err := c.checkPolicy(ctx, d); err != nil {
				return done{}, err
			}
			return done{text: " is paused"}, d.Pause(ctx, c.policy, c.tenant, c.For, d.by)
		}, c.forFlag())
}

// resumeCommand ends a pause, by an operator or by the upstream.
func (m *Main) resumeCommand() *cli.Command {
	c := m.control()
	return c.intervention("resume", "end a pause early, an operator's or the upstream's", "POLICY [TENANT]",
		func(ctx context.Context, d controlDesk) (done, error) {
			if err := c.checkPolicy(ctx, d); err != nil {
				return done{}, err
			}
			found, err := d.Resume(ctx, c.policy, c.tenant, d.by)
			if err != nil {
				return done{}, err
			}
			ended, err := c.resumeUpstream(ctx, d, found)
			if !found && !ended {
				return done{text: " was not paused"}, err
			}
			return done{Changed: true, text: " is not paused any more"}, err
		})
}

// resumeUpstream ends a pause that the upstream asked for, where the published policy has a count for
// it. It is logged, unless that was.
func (c *ControlCommand) resumeUpstream(ctx context.Context, d controlDesk, logged bool) (bool, error) {
	state, err := d.State(ctx)
	if err != nil || state.Policies == nil {
		return false, err
	}
	limiter, err := c.newLimiter(d.server, state.Policies)
	if err != nil {
		return false, err
	}
	r := throttle.Request{Policy: c.policy, Tenant: c.tenant}
	before, err := limiter.Peek(ctx, r)
	if err != nil || before.Pause == nil && before.Adapted == nil {
		return false, nil // the policy counts by more than the tenant, or nothing is paused
	}
	if !logged {
		if err := c.record(ctx, d, control.Resumed, "the upstream's pause"); err != nil {
			return false, err
		}
	}
	return true, limiter.Resume(ctx, r)
}

// record logs a change that no other call logs.
func (c *ControlCommand) record(ctx context.Context, d controlDesk, what, text string) error {
	return d.Record(ctx, control.Change{By: d.by, Policy: c.policy, Tenant: c.tenant, Text: text, What: what})
}

// resetCommand empties windows.
func (m *Main) resetCommand() *cli.Command {
	c := m.control()
	return c.intervention("reset", "empty the windows of a policy, or of one tenant", "POLICY [TENANT]",
		func(ctx context.Context, d controlDesk) (done, error) {
			limiter, err := c.limiter(ctx, d)
			if err != nil {
				return done{}, err
			}
			if err := c.record(ctx, d, control.WasReset, ""); err != nil {
				return done{}, err
			}
			n, err := limiter.Reset(ctx, c.policy, c.tenant)
			return done{Changed: n > 0, Count: n, text: fmt.Sprintf(": emptied %d counts", n)}, err
		}, c.publishedFlag())
}

// publishedFlag is --policies of a command that needs the policies themselves.
func (c *ControlCommand) publishedFlag() cli.Flag {
	return c.policiesFlag("the policies are those of `FILE`, - for stdin; by default those that are published")
}

// dropCommand archives or deletes the waiting tasks of a tenant.
func (m *Main) dropCommand() *cli.Command {
	c, remove := m.control(), false
	return c.intervention("drop", "archive or delete the waiting tasks of a tenant", "POLICY TENANT",
		func(ctx context.Context, d controlDesk) (done, error) {
			limiter, err := c.limiter(ctx, d)
			if err != nil {
				return done{}, err
			}
			verb := "archived"
			if remove {
				verb = "deleted"
			}
			if err := c.record(ctx, d, control.Dropped, "waiting tasks are "+verb); err != nil {
				return done{}, err
			}
			n, err := worker.Drop(ctx, d.server.Opt, limiter,
				worker.DropOptions{Delete: remove, Policy: c.policy, Tenant: c.tenant})
			return done{Changed: n > 0, Count: n, text: fmt.Sprintf(": %s %d waiting tasks", verb, n)}, err
		},
		&cli.BoolFlag{Name: "delete", Usage: "delete the tasks; by default they are archived", Destination: &remove},
		c.publishedFlag())
}

// frontWeight has a tenant go before all others: it is the largest weight.
const frontWeight = 1e6

// frontCommand lets the tasks of a tenant go before those of others.
func (m *Main) frontCommand() *cli.Command {
	c := m.control()
	return c.intervention("front", "let the waiting tasks of a tenant go before those of others", "POLICY TENANT",
		func(ctx context.Context, d controlDesk) (done, error) {
			if err := c.checkPolicy(ctx, d); err != nil {
				return done{}, err
			}
			state, err := d.State(ctx)
			if err != nil {
				return done{}, err
			}
			o := throttle.TenantOverride{Policy: c.policy, Tenant: c.tenant}
			for _, before := range state.Overrides {
				if before.Policy != c.policy || before.Tenant != c.tenant {
					continue
				}
				o = before
				if left := o.Until.Sub(state.At); o.Weight != frontWeight && left > c.For {
					return done{}, badInput("%s has an override by %q for another %v: "+
						"clear it, or let front hold for as long", c.about(), o.By, left.Round(time.Second))
				}
			}
			o.Weight = frontWeight
			return done{text: " goes before others"}, d.SetOverride(ctx, o, c.For, d.by)
		}, c.forFlag())
}

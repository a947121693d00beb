package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// pauseCommand stops grants of a policy, or to one tenant of it.
func (m *Main) pauseCommand() *cli.Command {
	c := m.control()
	return c.intervention("pause", "stop a policy, or one tenant of it, for a while", "POLICY [TENANT]",
		func(ctx context.Context, f *fleet) (done, error) {
			made := done{Replaces: f.state.Describe(control.Paused, c.policy, c.tenant), text: " is paused"}
			return made, f.store.Pause(ctx, c.policy, c.tenant, c.For, c.author)
		}, c.forFlag())
}

// resumeCommand ends a pause, by an operator or by the upstream.
func (m *Main) resumeCommand() *cli.Command {
	c := m.control()
	return c.intervention("resume", "end a pause early, an operator's or the upstream's", "POLICY [TENANT]",
		func(ctx context.Context, f *fleet) (done, error) {
			found, err := f.store.End(ctx, control.Resumed, c.policy, c.tenant, c.author)
			if err != nil {
				return done{}, err
			}
			ended, err := c.resumeUpstream(ctx, f, found)
			if !found && !ended {
				return done{text: " was not paused"}, err
			}
			return done{Changed: true, text: " is not paused any more"}, err
		})
}

// resumeUpstream ends a pause that the upstream asked for, where the published policy has a count for
// it. It is logged, unless that was.
func (c *ControlCommand) resumeUpstream(ctx context.Context, f *fleet, logged bool) (bool, error) {
	r := throttle.Request{Policy: c.policy, Tenant: c.tenant}
	before, err := f.limiter.Peek(ctx, r)
	if err != nil || before.Pause == nil && before.Adapted == nil {
		return false, nil // the policy counts by more than the tenant, or nothing is paused
	}
	if !logged {
		if err := c.record(ctx, f, control.Resumed, "the upstream's pause"); err != nil {
			return false, err
		}
	}
	return true, f.limiter.Resume(ctx, r)
}

// record logs a change that no other call logs.
func (c *ControlCommand) record(ctx context.Context, f *fleet, what, text string) error {
	return f.store.Record(ctx, control.Change{Author: c.author, Policy: c.policy, Tenant: c.tenant, Text: text, Kind: what})
}

// resetCommand empties windows.
func (m *Main) resetCommand() *cli.Command {
	c := m.control()
	cmd := c.intervention("reset", "empty the windows of a policy, or of one tenant", "POLICY [TENANT]",
		func(ctx context.Context, f *fleet) (done, error) {
			_, err := f.policy(c.policy)
			if err == nil {
				err = c.record(ctx, f, control.WasReset, "")
			}
			if err != nil {
				return done{}, err
			}
			n, err := f.limiter.Reset(ctx, c.policy, c.tenant)
			return done{Changed: n > 0, Count: n, text: ": emptied " + count(int64(n), "count")}, err
		})
	cmd.Flags = c.liveFlags(c.whyFlags()...)
	return cmd
}

// frontCommand lets the tasks of a tenant go before those of others.
func (m *Main) frontCommand() *cli.Command {
	c := m.control()
	return c.intervention("front", "let the waiting tasks of a tenant go before those of others", "POLICY TENANT",
		func(ctx context.Context, f *fleet) (done, error) {
			o, err := f.state.Front(c.policy, c.tenant, c.For)
			if err != nil {
				return done{}, err
			}
			return done{text: " goes before others"}, f.store.SetOverride(ctx, o, c.For, c.author)
		}, c.forFlag())
}

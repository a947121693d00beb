package main

import (
	"context"
	"errors"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// pauseCommand pauses a policy, or one tenant of it.
func (m *Main) pauseCommand() *cli.Command {
	c := m.control()
	return c.intervention("pause", "stop a policy, or one tenant of it, for a while", "POLICY [TENANT]",
		func(ctx context.Context, f *fleet) (outcome, error) {
			out := outcome{Replaces: f.state.Describe(control.Paused, c.policy, c.tenant), text: " is paused"}
			return out, f.store.Pause(ctx, c.policy, c.tenant, c.For, c.author)
		}, c.requireFor())
}

// resumeCommand ends a pause, whether an operator or the upstream began it.
func (m *Main) resumeCommand() *cli.Command {
	c := m.control()
	return c.intervention("resume", "end a pause early, an operator's or the upstream's", "POLICY [TENANT]",
		func(ctx context.Context, f *fleet) (outcome, error) {
			byOperator, err := f.store.End(ctx, control.Resumed, c.policy, c.tenant, c.author)
			if err != nil {
				return outcome{}, err
			}
			byUpstream, err := c.resumeUpstream(ctx, f, byOperator)
			whose := ""
			if errors.As(err, new(*throttle.RequestError)) || errors.Is(err, throttle.ErrUnknownPolicy) {
				err, whose = nil, " by an operator (a pause by the upstream, if any, ends by its tenant, or by Limiter.Resume)"
			}
			if !byOperator && !byUpstream {
				return outcome{text: " was not paused" + whose}, err
			}
			return outcome{Changed: true, text: " is not paused any more" + whose}, err
		})
}

// resumeUpstream ends the upstream's pause or slowed rate, and reports whether there was one. It logs the end, unless
// the command has `logged` the end of an operator's pause.
func (c *ControlCommand) resumeUpstream(ctx context.Context, f *fleet, logged bool) (bool, error) {
	r := throttle.Request{Policy: c.policy, Tenant: c.tenant}
	f.limiter.SetInterventions(throttle.Interventions{}) // a pause by operators would hide the upstream's
	current, err := f.limiter.Peek(ctx, r)
	if err != nil || current.Pause == nil && current.Adapted == nil {
		return false, err // a *throttle.RequestError: the scopes need a tenant, or other attributes
	}
	if !logged {
		if err := c.record(ctx, f, control.Resumed, "the upstream's pause"); err != nil {
			return false, err
		}
	}
	return true, f.limiter.Resume(ctx, r)
}

// record logs a change that the control.Store does not make itself.
func (c *ControlCommand) record(ctx context.Context, f *fleet, kind, text string) error {
	return f.store.Record(ctx, control.Change{Author: c.author, Kind: kind, Policy: c.policy, Tenant: c.tenant, Text: text})
}

// resetCommand empties the windows of a policy, or of one tenant.
func (m *Main) resetCommand() *cli.Command {
	c := m.control()
	cmd := c.intervention("reset", "empty the windows of a policy, or of one tenant", "POLICY [TENANT]",
		func(ctx context.Context, f *fleet) (outcome, error) {
			_, err := f.policy(c.policy)
			if err == nil {
				err = c.record(ctx, f, control.WasReset, "")
			}
			if err != nil {
				return outcome{}, err
			}
			n, err := f.limiter.Reset(ctx, c.policy, c.tenant)
			return outcome{Changed: n > 0, Count: n, text: ": emptied " + countText(int64(n), "count")}, err
		})
	cmd.Flags = c.liveFlags(c.whyFlags()...) // it needs policies, which --policies may give
	return cmd
}

// frontCommand serves the waiting tasks of a tenant first.
func (m *Main) frontCommand() *cli.Command {
	c := m.control()
	return c.intervention("front", "let the waiting tasks of a tenant go before those of others", "POLICY TENANT",
		func(ctx context.Context, f *fleet) (outcome, error) {
			o, err := f.state.Front(c.policy, c.tenant, c.For)
			if err != nil {
				return outcome{}, err
			}
			return outcome{text: " goes before others"}, f.store.SetOverride(ctx, o, c.For, c.author)
		}, c.requireFor())
}

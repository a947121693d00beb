package main

import (
	"context"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/throttle"
)

// ScenarioCommand runs the scenario on an embedded Redis, and shows what happened.
type ScenarioCommand struct {
	*Main

	HTTP string // the address of the page, "" for none
}

func (c *ScenarioCommand) Run(ctx context.Context) error {
	server, err := redisconn.Embedded()
	if err != nil {
		return err
	}
	defer server.Close()
	demo := c.Scenario
	if c.HTTP != "" {
		demo.Watch = func(limiter *throttle.Limiter) (stop func(), err error) {
			return (&workersCommand{Main: c.Main}).servePage(ctx, c.HTTP, "", server, limiter)
		}
	}
	report, err := demo.Run(ctx, server, c.Stderr)
	if err != nil {
		return err
	}
	err = c.show(report, func() { report.Print(c.Stdout) })
	switch {
	case ctx.Err() != nil:
		return errInterrupted
	case err == nil && !report.OK:
		return errJobsFailed
	}
	return err
}

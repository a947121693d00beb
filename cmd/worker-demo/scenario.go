package main

import (
	"context"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
)

// ScenarioCommand runs the scenario on an embedded Redis, and shows what happened.
type ScenarioCommand struct {
	*Main
}

func (c *ScenarioCommand) Run(ctx context.Context) error {
	server, err := redisconn.Embedded()
	if err != nil {
		return err
	}
	defer server.Close()
	report, err := c.Scenario.Run(ctx, server, c.Stderr)
	if err != nil {
		return err
	}
	if c.json {
		err = show.JSON(c.Stdout, report)
	} else {
		err = report.Print(c.Stdout)
	}
	switch {
	case ctx.Err() != nil:
		return errInterrupted
	case err == nil && !report.OK:
		return errJobsFailed
	}
	return err
}

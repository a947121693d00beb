package main

import (
	"context"
	"flag"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
)

// ScenarioCommand runs the scenario on an embedded Redis, and shows what happened.
type ScenarioCommand struct {
	*Main

	JSON bool
}

func (c *ScenarioCommand) ParseFlags(args []string) error {
	flags := flag.NewFlagSet("worker-demo", flag.ContinueOnError)
	flags.BoolVar(&c.JSON, "json", false, "")
	return parse(flags, args)
}

func (c *ScenarioCommand) Run(ctx context.Context) error {
	server, err := redisconn.Open(ctx, "")
	if err != nil {
		return err
	}
	defer server.Close()
	report, err := c.Scenario.Run(ctx, server, c.Stderr)
	if err != nil {
		return err
	}
	if c.JSON {
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

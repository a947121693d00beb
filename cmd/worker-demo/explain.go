package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle/usage"
	"github.com/sluice-go/sluice/worker"
)

// ExplainCommand says why one task waits.
type ExplainCommand struct {
	liveCommand

	Queue string
	Task  string // its ID
}

// An explained is the JSON of explain.
type explained struct {
	worker.Explanation
	Used []usage.Use `json:"used,omitempty"` // requests of the last hour, where package usage counts them
}

func (e explained) String() string {
	if len(e.Used) == 0 {
		return e.Explanation.String()
	}
	return e.Explanation.String() + "\n" + usedText(e.Used)
}

func (c *ExplainCommand) flags() []cli.Flag {
	return c.liveCommand.flags(
		&cli.StringFlag{Name: "task", Usage: "the task of `ID`, as asynq's tools show it", Destination: &c.Task},
		&cli.StringFlag{Name: "queue", Usage: "its asynq queue `NAME`", Value: "default", Destination: &c.Queue},
	)
}

func (c *ExplainCommand) Run(ctx context.Context) error {
	if c.Task == "" {
		return see(errors.New("--task is missing: must be the ID of a task"), "explain")
	}
	if err := c.validate(); err != nil {
		return see(err, "explain")
	}
	server, limiter, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer server.Close()
	client, err := worker.NewClient(server.Opt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		return err
	}
	defer client.Close()
	e, err := client.Explain(ctx, c.Queue, c.Task)
	if err != nil {
		return err
	}
	found := explained{Explanation: e}
	if e.Line != nil {
		if found.Used, err = usage.Top(ctx, server.Client, usage.TopOptions{Max: usersShown, Policy: e.Line.Policy, Prefix: c.Prefix}); err != nil {
			return err
		}
	}
	if c.json {
		err = show.JSON(c.Stdout, found)
	} else {
		_, err = fmt.Fprintln(c.Stdout, found)
	}
	if err == nil && e.State == "" {
		err = errJobsFailed // the answer says so
	}
	return err
}

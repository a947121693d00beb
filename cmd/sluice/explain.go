package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle/usage"
	"github.com/sluice-go/sluice/worker"
)

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

// explainCommand says why one task waits.
func (m *Main) explainCommand() *cli.Command {
	c := &workersCommand{Main: m}
	var queue, task string
	return &cli.Command{
		Name: "explain", Usage: "say why a task waits, and until when",
		Flags: c.liveFlags(
			&cli.StringFlag{Name: "task", Usage: "the task of `ID`, as asynq's tools show it", Destination: &task},
			&cli.StringFlag{Name: "queue", Usage: "its asynq queue `NAME`", Value: "default", Destination: &queue},
		),
		Action: func(ctx context.Context, _ *cli.Command) error {
			if task == "" {
				return badUsage("--task is missing: must be the ID of a task")
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
			e, err := client.Explain(ctx, queue, task)
			if err != nil {
				return err
			}
			found := explained{Explanation: e}
			if e.Line != nil {
				if found.Used, err = c.mostUsed(ctx, server, e.Line.Policy); err != nil {
					return err
				}
			}
			err = c.show(found, func() { fmt.Fprintln(c.Stdout, found) })
			if err == nil && e.State == "" {
				err = errJobsFailed // the answer says so
			}
			return err
		},
	}
}

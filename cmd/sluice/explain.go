package main

import (
	"cmp"
	"context"
	"fmt"
	"io"

	"github.com/hibiken/asynq"
	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/usage"
	"github.com/sluice-go/sluice/worker"
)

// An explained is the JSON of explain.
type explained struct {
	Source string `json:"source"` // of the policies
	worker.Explanation
	Used []usage.Use `json:"used,omitempty"` // requests of the last hour, where package usage counts them
}

// explainCommand says why one task waits.
func (m *Main) explainCommand() *cli.Command {
	c := &workersCommand{Main: m}
	var queue string
	return &cli.Command{
		Name: "explain", ArgsUsage: "ID", Usage: "say why a task waits, and until when",
		Flags: c.liveFlags(&cli.StringFlag{Name: "queue", Destination: &queue,
			Usage: "its asynq queue is `NAME`; by default all are looked through"}),
		Action: onFleet(c.inForce, func(ctx context.Context, f *fleet, cmd *cli.Command) error {
			client, err := worker.NewClient(f.server.Opt, worker.ClientConfig{Limiter: f.limiter})
			if err != nil {
				return err
			}
			defer client.Close()
			task := cmd.Args().First()
			if queue == "" {
				queue = queueWith(asynq.NewInspectorFromRedisClient(f.server.Client), task)
			}
			e, err := client.Explain(ctx, queue, task)
			if err != nil {
				return err
			}
			found := explained{Source: f.source, Explanation: e}
			if e.Line != nil {
				if found.Used, err = usage.Top(ctx, f.limiter, e.Line.Policy, namesShown); err != nil {
					return err
				}
			}
			return c.showAndFailIf(e.State == "", found, func() {
				fmt.Fprintf(c.Stdout, "task %q of queue %q: %s\n%s\n", e.ID, e.Queue, cmp.Or(e.State, "unknown"), e.Why)
				if e.Line != nil {
					printLine(c.Stdout, *e.Line)
				}
				if len(found.Used) > 0 {
					fmt.Fprintln(c.Stdout, usedText(found.Used))
				}
				fmt.Fprintln(c.Stdout, "policies: "+f.source)
			})
		}),
	}
}

// printLine shows how a ticket stands in its line.
func printLine(w io.Writer, s inspect.State) {
	table := show.NewTable(w, "TENANT", "POSITION", "WAITS", "STARTS IN")
	table.Row(s.Tenant, fmt.Sprintf("%d of %d", s.Position, s.Waiting), spanText(s.Since, s.At), startText(s))
	table.Flush()
	for _, note := range notes(s) {
		fmt.Fprintln(w, note)
	}
	windows := show.NewTable(w, "WINDOW", "SCOPE", "USED", "OF", "UNIT", "ROOM IN")
	for _, u := range s.Windows {
		windows.Row(u.Name, u.Scope, u.Used, u.Burst, u.Unit, words.Span(u.RetryIn))
	}
	windows.Flush()
}

// queueWith returns the first queue that has the task, or asynq's default.
func queueWith(inspector *asynq.Inspector, task string) string {
	queues, _ := inspector.Queues() // Explain meets the same error
	for _, queue := range queues {
		if _, err := inspector.GetTaskInfo(queue, task); err == nil {
			return queue
		}
	}
	return "default"
}

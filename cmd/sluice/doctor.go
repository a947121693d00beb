package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
)

// A diagnosis is the JSON of doctor.
type diagnosis struct {
	OK       bool     `json:"ok"`
	Findings []string `json:"findings"`        // what to correct
	Error    string   `json:"error,omitempty"` // why Redis could not be asked, or refuses its user
	Warnings []string `json:"warnings"`        // of tasks that perhaps nobody takes
}

// doctorCommand says whether a Redis is set up for workers.
func (m *Main) doctorCommand() *cli.Command {
	c := &workersCommand{Main: m}
	return &cli.Command{
		Name: "doctor", Usage: "check whether a Redis is set up for workers", Flags: c.liveFlags(),
		Action: func(ctx context.Context, _ *cli.Command) error {
			d := diagnosis{Findings: []string{}, Warnings: []string{}} // in JSON no null
			err := c.diagnose(ctx, &d)
			if ctx.Err() != nil {
				return context.Canceled
			}
			if isBadInput(err) {
				return err
			}
			if err != nil {
				d.Error = err.Error()
			}
			d.OK = err == nil && len(d.Findings) == 0
			return c.showAndFailIf(!d.OK, d, func() { d.print(c.Stdout) })
		},
	}
}

// diagnose looks at the Redis as the servers and clients of workers do, and at the policies. d has all that it found.
func (c *workersCommand) diagnose(ctx context.Context, d *diagnosis) error {
	f, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer f.server.Close()
	lines := inspect.Of(f.limiter)
	for _, p := range f.state.Removed {
		s, err := lines.State(ctx, inspect.Query{Limit: 1, Policy: p.Name})
		if err != nil {
			return err
		}
		if s.Removed && s.Waiting > 0 { // else it has other shards now
			d.Warnings = append(d.Warnings, fmt.Sprintf("policy %s was removed, and has %s in line: what waits goes on by its last windows",
				words.Name(p.Name), countText(s.Waiting, "task")))
		}
	}
	orphans, err := lines.Orphans(ctx)
	if err != nil && !errors.Is(err, throttle.ErrForbidden) {
		return err
	}
	for _, policy := range slices.Sorted(maps.Keys(orphans)) {
		d.Warnings = append(d.Warnings, fmt.Sprintf("policy %s is not published, and has %s in line: workers must have "+
			"it in their files; else each waits until asynq has it due, and goes by the policy that matches then",
			words.Name(policy), countText(orphans[policy], "task")))
	}
	client, err := worker.NewClient(f.server.Opt, worker.ClientConfig{Limiter: f.limiter})
	if err != nil {
		return err
	}
	defer client.Close()
	findings, err := client.CheckRedis(ctx)
	d.Findings = append(d.Findings, findings...)
	return errors.Join(err, f.state.PoliciesErr)
}

func (d diagnosis) print(w io.Writer) {
	for _, finding := range d.Findings {
		fmt.Fprintf(w, "finding: %s\n", finding)
	}
	isFinding := slices.ContainsFunc(d.Findings, func(finding string) bool { return strings.Contains(d.Error, finding) })
	if d.Error != "" && !isFinding {
		fmt.Fprintf(w, "finding: %s\n", d.Error)
	}
	for _, warning := range d.Warnings {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
	if d.OK {
		fmt.Fprintln(w, "ok: Redis answers, and its user may call what the limiter needs; "+
			"nothing wrong was found with the clock or, if the user may call INFO, with eviction")
	}
}

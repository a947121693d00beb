package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// DoctorCommand says whether a Redis is set up for workers.
type DoctorCommand struct {
	liveCommand
}

func (c *DoctorCommand) flags() []cli.Flag { return c.liveCommand.flags() }

// A diagnosis is the JSON of doctor.
type diagnosis struct {
	OK       bool     `json:"ok"`
	Findings []string `json:"findings"`        // what to correct
	Error    string   `json:"error,omitempty"` // why Redis could not be asked, or refuses its user
	Warnings []string `json:"warnings"`        // of the policies
}

func (c *DoctorCommand) Run(ctx context.Context) error {
	if err := c.validate(); err != nil {
		return see(err, "doctor")
	}
	policies, err := c.loadPolicies(c.Policies)
	if err != nil {
		return inputError{err}
	}
	d := diagnosis{Findings: []string{}, Warnings: []string{}}
	for _, p := range policies {
		d.Warnings = append(d.Warnings, p.Warnings()...)
	}
	findings, err := c.check(ctx, policies)
	if ctx.Err() != nil {
		return errInterrupted
	}
	d.Findings = append(d.Findings, findings...)
	if err != nil {
		d.Error = err.Error()
	}
	d.OK = err == nil && len(findings) == 0
	if c.json {
		if err := show.JSON(c.Stdout, d); err != nil {
			return err
		}
	} else {
		c.print(d)
	}
	if !d.OK {
		return errJobsFailed // the findings say so
	}
	return nil
}

// check looks at the Redis as the servers and clients of workers do.
func (c *DoctorCommand) check(ctx context.Context, policies []throttle.Policy) ([]string, error) {
	server, err := c.open(ctx, c.Env)
	if err != nil {
		return nil, err
	}
	defer server.Close()
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies, Prefix: c.Prefix})
	if err != nil {
		return nil, err
	}
	client, err := worker.NewClient(server.Opt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		return nil, err
	}
	defer client.Close()
	return client.Check(ctx)
}

func (c *DoctorCommand) print(d diagnosis) {
	for _, finding := range d.Findings {
		fmt.Fprintf(c.Stdout, "finding: %s\n", finding)
	}
	if d.Error != "" && len(d.Findings) == 0 {
		fmt.Fprintf(c.Stdout, "finding: %s\n", d.Error)
	}
	for _, warning := range d.Warnings {
		fmt.Fprintf(c.Stdout, "warning: %s\n", warning)
	}
	if d.OK {
		fmt.Fprintln(c.Stdout, "ok: Redis answers, is recent enough, evicts nothing, has the right time, and lets its user call what the limiter needs")
	}
}

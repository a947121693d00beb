package main

import (
	"context"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle/policyfile"
)

// checkCommand validates a policy file and prints what it means.
func (m *Main) checkCommand() *cli.Command {
	return &cli.Command{
		Name: "check", Usage: "validate a policy file and print what it means", ArgsUsage: "FILE",
		Action: func(_ context.Context, cmd *cli.Command) error {
			_, policies, _, err := m.loadBatches(cmd.Args().First())
			if err != nil {
				return err
			}
			found := policyfile.Describe(policies)
			return m.show(found, func() { io.WriteString(m.Stdout, strings.ReplaceAll(found.Text(), "${", "$${")) })
		},
	}
}

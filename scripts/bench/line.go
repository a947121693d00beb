package main

import (
	"context"
	"io"
)

// line measures the waiting line with whole fleets of workers.
func line(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	s := suite{name: "line", scenarios: lineScenarios()}
	flags := s.flags(stderr, "about an hour in place of about six minutes")
	flags.IntVar(&s.options.servers, "servers", 2, "`number` of asynq servers, each with a limiter of its own")
	flags.IntVar(&s.options.slots, "slots", 16, "`tasks` that a server runs at once")
	if err := flags.Parse(args); err != nil {
		return &usageError{err}
	}
	if s.options.servers < 1 || s.options.slots < 1 || flags.NArg() > 0 {
		return wrongUsage(stderr, "-servers and -slots must be at least 1, and nothing may follow the flags")
	}
	return s.run(ctx, stdout, stderr)
}

// Command bench measures Sluice against its peers on a redis-server of its own. It prints ratios,
// as a bare time says more about the machine than about the code.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

const help = `usage: scripts/bench/run BENCHMARK [flags]

  adapt     APIs that count in another way than they publish: refusals, and how much of what
            they allow is used
  engine    what throttling costs end to end: enqueueing, running with and without limits
            that bind, reaction times, idle servers, decisions, long lines; against plain
            asynq, redis_rate and BullMQ
  growth    how costs grow with windows, limits, tenants, waiting tasks and servers, as
            ratios to the smallest of each; draws SVGs too
  line      the waiting line with whole fleets of workers at default settings: wakes per
            task, utilization, shares, time to start; against ideal figures
  reserve   what one reserve costs: one window, two windows, two scopes; granted and
            denied; against redis_rate, throttled and plain scripts

The benchmarks start all servers themselves, on free loopback ports. Sides that are compared run in
turn. A machine with a load average above 0.5 is refused, as its other work would be measured too.
BullMQ is installed by npm into a directory that is removed again; without node its case is skipped.

Tables and JSON go to standard output, progress to standard error. The exit code is 0, 1 if a
benchmark failed or a figure missed its bar, 2 for wrong arguments.

Examples:

  scripts/bench/run adapt                               # two minutes
  scripts/bench/run engine                              # all cases in short form, some minutes
  scripts/bench/run engine -list                        # the cases, and what each compares
  scripts/bench/run engine -full -case '^run-10$'       # one case in full size
  scripts/bench/run engine -full -json > engine.json    # for a machine
  scripts/bench/run engine -case waiting -waiting 100000
  scripts/bench/run engine -case reserve -rounds 9      # the median of nine
  scripts/bench/run growth -full -svg docs/reference/growth       # draws the curves
  scripts/bench/run line -full -case '^second$'
  scripts/bench/run reserve -only 'sliding 20'          # some of the contestants
  scripts/bench/run engine -h                           # all flags
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit code: 0, 1 for a failure, 2 for wrong arguments.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	benchmarks := map[string]func(context.Context, []string, io.Writer, io.Writer) error{
		"adapt":   adapt,
		"engine":  engine,
		"growth":  growth,
		"line":    line,
		"reserve": reserve,
	}
	if len(args) == 0 {
		fmt.Fprint(stderr, help)
		return 2
	}
	if args[0] == "-h" || args[0] == "-help" || args[0] == "--help" {
		fmt.Fprint(stdout, help)
		return 0
	}
	benchmark, ok := benchmarks[args[0]]
	if !ok {
		fmt.Fprintf(stderr, "bench: %q is not a benchmark\n\n%s", args[0], help)
		return 2
	}
	err := benchmark(ctx, args[1:], stdout, stderr)
	var wrong *usageError
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case errors.As(err, &wrong):
		return 2
	case err != nil:
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	return 0
}

// A usageError is about wrong arguments. It was printed already.
type usageError struct{ error }

// wrongUsage prints what is wrong with the arguments.
func wrongUsage(stderr io.Writer, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	fmt.Fprintln(stderr, "bench:", err)
	return &usageError{err}
}

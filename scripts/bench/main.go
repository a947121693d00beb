// Command bench measures Sluice beside its peers on a redis-server of its own, and prints
// ratios: a bare time says more about the machine than about the code.
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

  reserve   what one reserve costs: one window, two windows, two scopes; granted and
            denied; beside redis_rate, throttled, and plain scripts
  line      the waiting line, by whole fleets of workers: wakes per task, utilization,
            shares, time to start; each figure beside its bar

Everything is started here, on a free loopback port. Examples:

  scripts/bench/run reserve                             # all of it, one to two minutes
  scripts/bench/run reserve -only 'sliding 20'          # some of it
  scripts/bench/run reserve -json > reserve.json        # for a machine
  scripts/bench/run line                                # all cases, about six minutes
  scripts/bench/run line -full -case '^second$'         # one of them in its full size
  scripts/bench/run reserve -h                          # all flags
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit code: 0, 1 for a failure, 2 for wrong arguments.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	benchmarks := map[string]func(context.Context, []string, io.Writer, io.Writer) error{
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

// A usageError was printed already, with the flags.
type usageError struct{ error }

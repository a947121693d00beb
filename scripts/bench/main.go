// Command bench measures Sluice against its peers on redis-servers of its own. It prints ratios
// where it can, as a bare time says more about the machine than about the code.
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
	"time"

	"github.com/hibiken/asynq"
)

const help = `usage: scripts/bench/run [flags]

Measures what throttling costs: enqueueing, running with and without limits that bind, reaction
times, idle servers, decisions, long lines, and how costs grow. The peers are plain asynq,
redis_rate and BullMQ, which needs node. Sides that are compared run in turn (idle-server: at once).

  scripts/bench/run                            # all cases in short form, some minutes
  scripts/bench/run -list                      # the cases, and what each compares
  scripts/bench/run -full -case '^run-10$'     # one case in full size
  scripts/bench/run -full -json > bench.json   # for a machine
  scripts/bench/run -case waiting -waiting 100000
  scripts/bench/run -case reserve -rounds 9    # the median of nine
  scripts/bench/run -full -case '^growth-' -svg docs/reference/growth   # draws the curves

All servers are started on free loopback ports. A machine with a load average above 0.5 is refused,
as its other work would be measured too.

The table, or JSON, goes to standard output, progress to standard error. The exit code is 0, 1 if a
case failed or a figure missed its bar, 2 for wrong arguments. Flags:
`

func cases() []scenario {
	all := []scenario{
		{"enqueue", "our client against asynq's: 16 goroutines enqueue one task a call, limits never bind",
			caseEnqueue},
		{"enqueue-bulk", "our client against asynq's: 500 tasks a call", caseEnqueueBulk},
		{"run-10", "Sluice against plain asynq: limits never bind, 10 tenants",
			caseRun(20_000, 10, 32, 0, 1.0)},
		{"run-1000", "Sluice against plain asynq: limits never bind, 1,000 tenants",
			caseRun(20_000, 1000, 32, 0, 0.80)},
		{"run-5ms", "Sluice against plain asynq: limits never bind, handlers of 5 ms on 32 slots",
			caseRun(20_000, 10, 32, 5*time.Millisecond, 0.90)},
		{"run-2ms", "Sluice against plain asynq: limits never bind, handlers of 2 ms on 10 slots",
			caseRun(20_000, 10, 10, 2*time.Millisecond, 0.90)},
		{"run-last", "run-10 without retries: that each task starts is noted before, in a call of its own",
			caseRun(20_000, 10, 32, 0, 0.70, asynq.MaxRetry(0))},
		{"rate-500", "Sluice at 500 per second, shared, and a window for each tenant; " +
			"Redis CPU against plain asynq without limits", caseRate(500, 0.99, true)},
		{"rate-2000", "the same at 2,000 per second", caseRate(2000, 0.96, true)},
		{"queues", "the same in three queues, 6:3:1; Redis CPU against one queue", caseQueues},
		{"rate-5000", "Sluice at 5,000 per second", caseRate(5000, 0.85, false)},
		{"second", "a backlog at 20 per second, default settings; utilization of the limit, time to start",
			caseDefaults(rate{20, time.Second}, 100, 620, 0.99, true)},
		{"tenth", "the same at 5 per 100 ms",
			caseDefaults(rate{5, 100 * time.Millisecond}, 205, 1005, 0.95, false)},
		{"idle-system", "one task now and then that fits at once, default settings; time from enqueue to start",
			caseIdleSystem},
		{"idle-server", "Sluice against plain asynq: Redis commands of an idle server, default settings",
			caseIdleServer},
		{"servers", "many idle servers at one slow line; their takes, time to start", caseServers},
		{"bursts", "the same at a fast line that goes in bursts", caseBursts},
		{"earliest-reset", "earliest_reset, default settings; time from the reset to the start", caseReset},
		{"slots", "handler slots bind and no limit does: " +
			"one tenant's backlog, then 100 tasks of each of nine; their shares", caseSlots},
		{"reserve", "Reserve of two exact windows against one call of redis_rate: 64 goroutines", caseReserve},
		{"reserve-one", "the same with one goroutine", caseReserveOne},
		{"full", "single calls to full sliding windows: limits of 1,000 and 100,000 against one of 20", caseFull},
		{"shapes", "single calls to two scopes, and to five windows, against two windows in one scope", caseShapes},
		{"waiting", "a join behind many tickets against a join of an empty line; full: 1,000,000 tickets",
			caseWaiting},
		{"bullmq", "BullMQ against plain asynq, with a limit that never binds, and at 2,000 per second", caseBullMQ},
		{"keys", "how many keys in Redis a grant adds", caseKeys},
	}
	for _, g := range growths() {
		all = append(all, scenario{"growth-" + g.curve.Name, g.curve.Title + ": " + g.curve.Y, g.run})
	}
	return all
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit code: 0, 1 for a failure, 2 for wrong arguments.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	s := suite{scenarios: cases()}
	flags := flag.NewFlagSet("scripts/bench/run", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() { fmt.Fprint(stderr, help); flags.PrintDefaults() }
	flags.StringVar(&s.only, "case", "", "run only the cases whose names match this `regexp`")
	flags.BoolVar(&s.options.full, "full", false, "full sizes: about half an hour instead of some minutes")
	flags.BoolVar(&s.asJSON, "json", false, "print JSON instead of a table")
	flags.BoolVar(&s.list, "list", false, "list the cases")
	flags.BoolVar(&s.force, "force", false, fmt.Sprintf("measure also above a load average of %v", quiet))
	flags.IntVar(&s.options.rounds, "rounds", 3, "`measurements` of each side, in turn; the median counts")
	flags.StringVar(&s.options.svg, "svg", "", "write each curve of growth as an SVG into this `directory`")
	flags.IntVar(&s.options.waiting, "waiting", 0, "`tickets` in the case waiting; 0 is its own number")
	err := flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err == nil && (s.options.rounds < 1 || s.options.waiting < 0 || flags.NArg() > 0) {
		err = errors.New("-rounds must be at least 1, -waiting at least 0, and nothing may follow the flags")
		fmt.Fprintln(stderr, "bench:", err)
	}
	if err != nil {
		return 2
	}
	var wrong *usageError
	if err := s.run(ctx, stdout, stderr); errors.As(err, &wrong) {
		fmt.Fprintln(stderr, "bench:", err)
		return 2
	} else if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	return 0
}

// A usageError is about wrong arguments.
type usageError struct{ error }

// Command soak runs throttled tasks for minutes while it cuts connections, loses replies, stops
// Redis and kills workers. Plain asynq runs the same tasks under the same faults beside it. Then it
// compares what became of every task.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9/logging"
)

const help = `usage: scripts/soak/run [flags]

Runs throttled tasks for minutes under faults, beside the same tasks on plain asynq (the control).
Each of the two has its own redis-server and three worker processes, all on loopback.

  scripts/soak/run                            # five minutes, and a few more until all tasks have ended
  scripts/soak/run -for 10s                   # a smoke test of half a minute; below a minute the soak
                                              # makes asynq's leases expire at once
  scripts/soak/run -cluster -for 10s          # on a Redis Cluster
  scripts/soak/run -seed 7                    # the same tasks and faults again
  scripts/soak/run -fault-rate 0.05           # more faults on the wire
  scripts/soak/run -fault-rate 0 -disrupt-every 0   # none at all
  scripts/soak/run -json > soak.json          # for a machine

Ctrl-C ends it with the report so far. The exit code is 0 if all bars hold, 1 if one is missed or
cannot be judged, 2 for wrong flags.

Faults on the wire: the nth call of each kind between a client and Redis meets the same fate in both
stacks. The connection is cut before the call, the reply is lost, or the call is late, each at
-fault-rate. Disruptions come at the same times in both: a worker is killed or ended, Redis is stopped
for up to 1.4 s, or its scripts are flushed.

What a fault costs depends on what it hits. So some figures are split: "without a fault to blame"
leaves out what asynq itself does after a fault. It finds a task after one to two minutes if its
worker was killed, or if the reply to its pick-up was lost. The task loses a retry, is archived if it
has none, and runs again. A task whose enqueue was repeated may exist twice. The soak sees on the wire
which tasks a fault hit.

Figures:
  lost               enqueued and gone, but never ended well
  unfinished         still waiting after the time given by -drain
  duplicated runs    more runs than a task's own failures explain
  archived early     before a task's own failures had used up its retries
  retries burnt      asynq counts more retries than the task failed. A task that waits is picked up
                     once more than without Sluice, and any pick-up can meet a fault: compare the
                     figures per 1,000 pick-ups
  locks left         of unique tasks that ended well
  excess             the most units granted in any period, over the limit; below 0 if the window was
                     never full. The handlers report the times of their grants, by the clock of Redis
  charged without a run   units that the limiter counted without a handler's run. A worker that was
                     killed between the grant and its handler explains one
  waited without a ticket   for more than 15 s, when faults were off. Asynq keeps the task as if it
                     were in line, but no take finds it. It joins again after minutes
  granted after the expected start   how late tasks that waited were granted, by the last expected
                     start; without those whose pick-up met a fault
  workers that did not end    within 20 s of SIGTERM
  fault to next run  from a kill, or the end of a stop, to the next run of any task

Flags:
`

type options struct {
	asJSON  bool
	cluster bool
	every   time.Duration // between disruptions
	drain   time.Duration
	keep    bool
	length  time.Duration
	rate    float64
	seed    uint64
	workers int
}

// shortRun is the length below which the soak makes the leases of dead workers expire, as asynq
// would find their tasks only after the end.
const shortRun = time.Minute

func main() {
	if len(os.Args) > 1 && os.Args[1] == workerCommand {
		if err := work(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		return
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	os.Exit(soak(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// soak returns the exit code.
func soak(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	dir, err := os.MkdirTemp("", "sluice-soak-")
	if err != nil {
		fmt.Fprintln(stderr, "soak:", err)
		return 1
	}
	logging.Disable() // connections break on purpose here
	allHold, err := o.run(ctx, dir, stdout, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "soak:", err)
	}
	if err == nil && allHold && !o.keep {
		os.RemoveAll(dir)
		return 0
	}
	fmt.Fprintln(stderr, "soak: the logs of workers and Redis are in", dir)
	if err == nil && allHold {
		return 0
	}
	return 1
}

func parse(args []string, stdout, stderr io.Writer) (o options, err error) {
	flags := flag.NewFlagSet("scripts/soak/run", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(flags.Output(), help)
		flags.PrintDefaults()
	}
	flags.BoolVar(&o.asJSON, "json", false, "print JSON instead of a table")
	flags.BoolVar(&o.cluster, "cluster", false, "let each redis-server be a Redis Cluster of one node")
	flags.BoolVar(&o.keep, "keep", false, "keep the logs of workers and Redis even if all bars hold")
	flags.DurationVar(&o.every, "disrupt-every", 3*time.Second, "time between disruptions, on average; 0 for none")
	flags.DurationVar(&o.drain, "drain", 6*time.Minute, "how long to wait at the end for all tasks to end")
	flags.DurationVar(&o.length, "for", 5*time.Minute, "how long to enqueue tasks and make faults, at least 1s")
	flags.Float64Var(&o.rate, "fault-rate", 0.01,
		"`part` of the calls to Redis that meet each kind of fault on the wire, 0 to 0.1")
	flags.Uint64Var(&o.seed, "seed", 0, "`number` from which tasks and faults are drawn; 0 picks one")
	flags.IntVar(&o.workers, "workers", 3, "`number` of worker processes of each stack")
	for _, a := range args {
		if a == "-h" || a == "-help" || a == "--help" {
			flags.SetOutput(stdout)
		}
	}
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	wrong := ""
	switch {
	case flags.NArg() > 0:
		wrong = fmt.Sprintf("%q: nothing may follow the flags", flags.Arg(0))
	case o.length < time.Second:
		wrong = fmt.Sprintf("-for %v: must be at least 1s", o.length)
	case !(o.rate >= 0 && o.rate <= 0.1):
		wrong = fmt.Sprintf("-fault-rate %v: must be 0 to 0.1", o.rate)
	case o.every < 0 || o.drain < 0:
		wrong = "-disrupt-every and -drain must not be below 0"
	case o.workers < 1 || o.workers > 100:
		wrong = fmt.Sprintf("-workers %d: must be 1 to 100", o.workers)
	}
	if wrong != "" {
		fmt.Fprintf(stderr, "soak: %s: see -h\n", wrong)
		return o, errors.New(wrong)
	}
	if o.seed == 0 {
		o.seed = uint64(1 + rand.IntN(1_000_000))
	}
	return o, nil
}

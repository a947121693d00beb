// Command soak runs throttled work for minutes while it cuts connections, loses replies, stops
// Redis and kills workers, beside the same work on plain asynq with the same faults, and compares
// what became of every task.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

const help = `usage: scripts/soak/run [flags]

Throttled work for minutes under faults, beside the same work on plain asynq (the control).
Each of the two has a redis-server and three worker processes of its own, all on loopback.

  scripts/soak/run                            # five minutes, and a few until all tasks have ended
  scripts/soak/run -for 10s                   # a smoke test of half a minute: below a minute, the
                                              # minutes that asynq's leases take are skipped
  scripts/soak/run -seed 7                    # the same tasks and faults again
  scripts/soak/run -fault-rate 0.05           # more faults on the wire
  scripts/soak/run -fault-rate 0 -blow-every 0   # none at all
  scripts/soak/run -json > soak.json          # for a machine

Ctrl-C ends it with the report so far. Exit code: 0 all bars hold, 1 one is missed or could not
be judged, 2 wrong flags.

Faults. The nth call of each kind between a client and Redis meets the same fate in both stacks:
the connection is cut before the call, or its reply is lost, or it is late, -fault-rate each. At the
same times in both, a worker is killed or ended, Redis stopped for up to 1.4 s, or its scripts flushed.

What a fault costs depends on what it happens to hit, so a figure is split. "Without a fault to
blame" leaves out what asynq itself does about a fault: a task whose worker was killed, or whose
pick-up was answered into a cut connection, is found after one to two minutes, loses a retry, is
archived if it has none, and runs again; one whose enqueue was repeated may exist twice. These
faults are seen on the wire, each for the very task that it hit.

Figures:
  lost               enqueued, gone, and never ended well
  unfinished         still waiting after the time given by -drain
  duplicated runs    beyond those that a task's own failures ask for
  archived early     before a task's own failures had used up its retries
  retries burnt      asynq's count of retries beyond the task's own failures
                     A task that waits is picked up once more than without Sluice, and any pick-up
                     can meet a fault: compare them per 1,000 pick-ups
  locks left         of unique tasks that ended well
  excess             units granted in any window of one period, over the limit, at the worst, by the
                     grants' Redis times in a log that the handlers' callee keeps; below 0: never full
  charged without a run   units the limiter counted and no handler ran for: a worker killed between
                     the grant and its handler is to blame for one
  waited outside of the line  without a place for long when faults were off, so that nobody takes it: it is
                     found after minutes
  granted after the expected start   by how much tasks that waited got through later than told last,
                     those aside that were picked up into a fault
  workers that did not end    within 20 s of SIGTERM
  fault to next run  from a kill, or the end of a stop, to the next run of any task

Flags:
`

type options struct {
	asJSON  bool
	blows   time.Duration
	drain   time.Duration
	keep    bool
	length  time.Duration
	rate    float64
	seed    uint64
	workers int
}

// shortRun is a length below which nobody waits for asynq's leases to run out: they are made older.
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
	redis.SetLogger(quiet{}) // connections break on purpose here
	clear, err := o.run(ctx, dir, stdout, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "soak:", err)
	}
	if err == nil && clear && !o.keep {
		os.RemoveAll(dir)
		return 0
	}
	fmt.Fprintln(stderr, "soak: the logs of workers and Redis are in", dir)
	if err == nil && clear {
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
	flags.BoolVar(&o.keep, "keep", false, "keep the logs of workers and Redis, also if all is well")
	flags.DurationVar(&o.blows, "blow-every", 3*time.Second, "kill, stop or flush something about every so often; 0 is never")
	flags.DurationVar(&o.drain, "drain", 6*time.Minute, "how long to wait at the end until all tasks have ended")
	flags.DurationVar(&o.length, "for", 5*time.Minute, "how long to make work and faults, at least 1s")
	flags.Float64Var(&o.rate, "fault-rate", 0.01, "`part` of the calls to Redis that meet each kind of fault, 0 to 0.1")
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
	case o.blows < 0 || o.drain < 0:
		wrong = "-blow-every and -drain must not be below 0"
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

// run reports whether all bars hold.
func (o options) run(ctx context.Context, dir string, stdout, stderr io.Writer) (bool, error) {
	jobs := makeJobs(o.seed, o.length)
	say := newProgress(stderr)
	say.line("seed %d: %d tasks in %v", o.seed, len(jobs), o.length)
	sluice, err := newStack(ctx, "sluice", dir, true, o, jobs)
	if err != nil {
		return false, err
	}
	defer sluice.close()
	control, err := newStack(ctx, "control", dir, false, o, jobs)
	if err != nil {
		return false, err
	}
	defer control.close()
	stacks := []*stack{sluice, control}
	if err := o.batter(ctx, stacks, say); err != nil {
		return false, err
	}
	interrupted := ctx.Err() != nil
	if !interrupted {
		if err := o.drainAll(ctx, stacks, say); err != nil {
			return false, err
		}
		interrupted = ctx.Err() != nil
	}
	after := context.WithoutCancel(ctx)
	each(stacks, func(s *stack) error { s.stopWorkers(); return nil })
	var found [2]evidence
	for i, s := range stacks {
		if found[i], err = s.evidence(after); err != nil {
			return false, err
		}
	}
	all := figures(found[0], found[1], interrupted)
	if err := printFigures(stdout, all, o.seed, o.asJSON); err != nil {
		return false, err
	}
	n := missed(all)
	if n == 0 {
		say.line("all bars hold (seed %d)", o.seed)
		return true, nil
	}
	if interrupted {
		say.line("interrupted: what was waiting then says nothing")
	}
	for i, s := range stacks {
		explain(stderr, s.name, found[i], s.witness.story, interrupted)
	}
	say.line("%d figures miss their bars (seed %d)", n, o.seed)
	return false, nil
}

// each does something with all stacks at once.
func each(stacks []*stack, do func(*stack) error) error {
	errs := make([]error, len(stacks))
	var all sync.WaitGroup
	for i, s := range stacks {
		all.Go(func() { errs[i] = do(s) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// batter makes work and faults.
func (o options) batter(ctx context.Context, stacks []*stack, say *progress) error {
	begin := time.Now()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	all.Go(func() {
		if err := each(stacks, func(s *stack) error { return s.produce(ctx, begin) }); err != nil {
			cancel(err)
		}
	})
	all.Go(func() {
		for _, b := range makeBlows(o.seed, o.length, o.blows, o.workers) {
			select {
			case <-time.After(time.Until(begin.Add(b.at))):
			case <-ctx.Done():
				return
			}
			if err := each(stacks, func(s *stack) error { return s.deal(ctx, b) }); err != nil && ctx.Err() == nil {
				cancel(err)
			}
		}
	})
	done := make(chan struct{})
	go func() {
		all.Wait()
		select {
		case <-time.After(time.Until(begin.Add(o.length))):
		case <-ctx.Done():
		}
		close(done)
	}()
	for {
		select {
		case <-done:
			for _, s := range stacks {
				s.proxy.calm.Store(true)
			}
			if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
				return cause
			}
			return nil
		case <-time.After(time.Second):
			say.now("%v of %v: runs %d, control %d", time.Since(begin).Round(time.Second), o.length,
				stacks[0].journal.begun(), stacks[1].journal.begun())
		}
	}
}

// drainAll waits until all tasks have ended and nobody stands in line.
func (o options) drainAll(ctx context.Context, stacks []*stack, say *progress) error {
	begin := time.Now()
	for ticks := 1; time.Since(begin) < o.drain && ctx.Err() == nil; ticks++ {
		all, tickets := []int{}, int64(0)
		for _, s := range stacks {
			tasks, n, err := s.waiting(context.WithoutCancel(ctx))
			if err != nil {
				return err
			}
			all, tickets = append(all, tasks), tickets+n
			if s.throttled {
				if err := s.lookForStrays(context.WithoutCancel(ctx)); err != nil {
					return err
				}
			}
			if o.length < shortRun && ticks%5 == 0 {
				if err := s.hurry(ctx); err != nil && ctx.Err() == nil {
					return err
				}
			}
		}
		if all[0]+all[1] == 0 && tickets == 0 {
			return nil
		}
		say.now("faults are off, %v of at most %v: %d tasks wait (%d in line), control %d", time.Since(begin).Round(time.Second), o.drain, all[0], tickets, all[1])
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
	return nil
}

// evidence gathers what is known, past the proxy.
func (s *stack) evidence(ctx context.Context) (evidence, error) {
	e := evidence{
		charged: map[string]int64{}, counts: map[string]int{}, ends: map[string]ending{}, excused: s.witness.excused,
		hits: s.hits, jobs: s.jobs, pickUps: s.witness.pickUps(), runs: s.journal.copied(), strays: s.strays, stuck: s.stuck,
		takes: s.witness.killedTakes(), throttled: s.throttled, windows: soakPolicy().Windows,
	}
	s.mu.Lock()
	e.enqueued = maps.Clone(s.enqueued)
	maps.Copy(e.counts, s.counts)
	s.mu.Unlock()
	s.witness.mu.Lock()
	e.again, e.lost = maps.Clone(s.witness.again), maps.Clone(s.witness.lost)
	for fate, n := range s.witness.faults {
		e.counts[string(fate)] = n
	}
	s.witness.mu.Unlock()
	s.journal.mu.Lock()
	e.denials = s.journal.denials
	s.journal.mu.Unlock()
	for id := range e.enqueued {
		info, err := s.inspector.GetTaskInfo(queue, id)
		switch {
		case errors.Is(err, asynq.ErrTaskNotFound):
		case err != nil:
			return e, err
		default:
			e.ends[id] = ending{info.State, info.Retried}
		}
	}
	locks := s.redis.Scan(ctx, 0, "asynq:{"+queue+"}:unique:*", 1000).Iterator()
	for locks.Next(ctx) {
		id, err := s.redis.Get(ctx, locks.Val()).Result()
		if err != nil {
			return e, err
		}
		e.locks = append(e.locks, id)
	}
	if err := locks.Err(); err != nil {
		return e, err
	}
	if !s.throttled {
		return e, nil
	}
	limiter, err := throttle.New(throttle.Config{Client: s.redis, Policies: []throttle.Policy{soakPolicy()}})
	if err != nil {
		return e, err
	}
	for _, l := range load {
		d, err := limiter.Peek(ctx, throttle.Request{Policy: policyName, Tenant: l.tenant})
		if err != nil {
			return e, err
		}
		for _, w := range d.Windows {
			if w.Name == ledgerWindow {
				e.charged[l.tenant] = w.Used
			}
		}
	}
	e.tickets, err = waitingTasks(ctx, s.redis)
	return e, err
}

// A progress is what the user sees meanwhile: one line that changes on a terminal, else a line
// every ten seconds.
type progress struct {
	w        io.Writer
	terminal bool
	last     time.Time
	dirty    bool
}

func newProgress(w io.Writer) *progress {
	p := &progress{w: w}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

func (p *progress) line(format string, args ...any) {
	if p.dirty {
		fmt.Fprintln(p.w)
	}
	p.dirty = false
	fmt.Fprintf(p.w, "soak: "+format+"\n", args...)
}

func (p *progress) now(format string, args ...any) {
	switch {
	case p.terminal:
		p.dirty = true
		fmt.Fprintf(p.w, "\r\033[Ksoak: "+format, args...)
	case time.Since(p.last) > 10*time.Second:
		p.last = time.Now()
		p.line(format, args...)
	}
}

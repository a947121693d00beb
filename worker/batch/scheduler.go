package batch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// askEvery is how often a scheduler asks for ticks and for firings without a holder.
	askEvery = time.Second

	// leaseFor is how long a firing waits for another scheduler if the holder dies.
	leaseFor = 15 * time.Second

	// joinTimeout is the least timeout for joining lines. It may be long, as no user waits for a batch.
	joinTimeout = 5 * time.Second

	// cleanUpTimeout bounds calls that are made although the context has ended.
	cleanUpTimeout = 2 * time.Second
)

// Config configures a Scheduler.
type Config struct {
	// Batches are fired by the scheduler. Their names must differ.
	Batches []Batch

	// ByHand ignores the schedules: only Fire fires batches. It is for tools.
	ByHand bool

	// Client is the config of the client that enqueues the tasks. Its Limiter is required. Its LimiterTimeout counts
	// as 5 seconds at least.
	Client worker.ClientConfig

	// Logger gets errors and warnings. The default is slog.Default().
	Logger *slog.Logger
}

// A Scheduler fires batches, and follows their firings. Any number of processes may run a Scheduler
// of the same batches. It is safe for concurrent use.
type Scheduler struct {
	batches map[string]*compiled
	client  *worker.Client
	config  Config
	lease   time.Duration
	redis   *asynqredis.Client
}

// NewScheduler returns a scheduler for the queues in opt's Redis. It does not talk to Redis. Errors
// are an *Error for a batch that cannot be used, and worker.NewClient's.
func NewScheduler(opt asynq.RedisConnOpt, c Config) (*Scheduler, error) {
	s := &Scheduler{batches: map[string]*compiled{}, config: c, lease: leaseFor}
	if c.Logger == nil {
		s.config.Logger = slog.Default()
	}
	for _, b := range c.Batches {
		compiled, err := b.compile()
		if err != nil {
			return nil, err
		}
		if s.batches[b.Name] != nil {
			return nil, &Error{b.Name, "name", b.Name, "must not be that of another batch"}
		}
		if c.ByHand {
			compiled.schedule = nil
		}
		s.batches[b.Name] = compiled
	}
	conn, err := asynqredis.Connect(opt)
	if err != nil {
		return nil, fmt.Errorf("batch: %w", err)
	}
	c.Client.LimiterTimeout = max(c.Client.LimiterTimeout, joinTimeout)
	client, err := worker.NewClient(opt, c.Client)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	s.client, s.redis = client, asynqredis.New(conn)
	return s, nil
}

// Close closes the connections. Run must have returned.
func (s *Scheduler) Close() error { return errors.Join(s.client.Close(), s.redis.Redis().Close()) }

// Run fires the batches on time and works for their firings, until the context ends, and through outages of Redis. It
// returns nil.
//
// A batch's ticks begin when a scheduler that knows its schedule runs for the first time.
func (s *Scheduler) Run(ctx context.Context) error {
	var all sync.WaitGroup
	for _, b := range s.batches {
		all.Go(func() { s.serve(ctx, b) })
	}
	all.Wait()
	return nil
}

// serve fires one batch on time, and works for its firings that have no holder.
func (s *Scheduler) serve(ctx context.Context, b *compiled) {
	var all sync.WaitGroup
	defer all.Wait()
	var working sync.Map // firings for which this process works
	for failed := false; ; {
		unfinished, delay, err := s.tick(ctx, b)
		if err != nil && ctx.Err() == nil && !failed {
			s.config.Logger.Error("batch: ticks cannot be read or decided", "batch", b.Name, "error", err)
		}
		failed = err != nil
		for _, f := range unfinished {
			if _, works := working.LoadOrStore(f, true); !works {
				all.Go(func() {
					s.work(ctx, b, f)
					working.Delete(f)
				})
			}
		}
		if !sleep(ctx, delay) {
			return
		}
	}
}

// tick decides the ticks that are due. It returns the firings that have not ended, and when to ask next.
func (s *Scheduler) tick(ctx context.Context, b *compiled) (unfinished []asynqredis.Firing, delay time.Duration, err error) {
	schedule := b.Schedule + " " + b.zone.String()
	known, err := s.redis.Schedule(ctx, b.Queue, b.Name, schedule)
	if err != nil {
		return nil, askEvery, err
	}
	delay = askEvery
	if b.schedule != nil {
		delay = max(time.Millisecond, min(delay, b.next(known.Now).Sub(known.Now)))
	}
	fire, upTo := b.due(known.Last, known.Now)
	if upTo.IsZero() {
		return known.Open, delay, nil
	}
	f := asynqredis.Firing{Queue: b.Queue, Batch: b.Name, Tick: fire.UTC()}
	result, err := s.redis.Fire(ctx, f, asynqredis.Ticks{Schedule: schedule, After: known.Last, UpTo: upTo}, b.Overlap == OverlapSkip)
	switch result {
	case asynqredis.Fires:
		known.Open = append(known.Open, f)
	case asynqredis.Skipped:
		s.config.Logger.Warn("batch: a tick is skipped, as the firing before it has not ended",
			"batch", b.Name, "firing", f.Name())
	}
	return known.Open, delay, err
}

// ErrOverlap is the error if a batch does not fire because another firing of it has not ended.
var ErrOverlap = errors.New("batch: another firing has not ended")

// Fire fires a batch now, by hand. A running scheduler does the work. Two calls within one second are one firing. The
// error may be ErrOverlap.
func (s *Scheduler) Fire(ctx context.Context, batch string) (Firing, error) {
	b, err := s.batch(batch)
	if err != nil {
		return Firing{}, err
	}
	f, result := asynqredis.Firing{Queue: b.Queue, Batch: b.Name}, 0
	known, err := s.redis.Schedule(ctx, b.Queue, b.Name, "")
	if err == nil {
		f.Tick = known.Now.Truncate(time.Second).UTC()
		result, err = s.redis.Fire(ctx, f, asynqredis.Ticks{}, b.Overlap == OverlapSkip)
	}
	switch {
	case err != nil:
		return Firing{}, fmt.Errorf("batch: %w", err)
	case result == asynqredis.Skipped:
		return Firing{}, fmt.Errorf("%w: batch %q, overlap skip", ErrOverlap, batch)
	}
	return Firing{batch, f.Tick}, nil
}

// Pause stops the start of tasks of a firing: none starts after it has returned, which takes 3 seconds while
// tasks run. Running tasks go on. Waiting tasks leave their lines within seconds, if a scheduler runs: then
// the state is StatePaused.
func (s *Scheduler) Pause(ctx context.Context, f Firing) error { return s.want(ctx, f, wantPause) }

// Resume lets a paused firing go on. Its tasks join their lines again.
func (s *Scheduler) Resume(ctx context.Context, f Firing) error { return s.want(ctx, f, wantRun) }

// Cancel deletes the waiting tasks of a firing, and enqueues no more. As with Pause, none starts after it
// has returned. Running tasks go on, and are deleted if they fail and would be retried.
func (s *Scheduler) Cancel(ctx context.Context, f Firing) error { return s.want(ctx, f, wantCancel) }

// Retry makes all failed tasks of a firing wait again, with all their retries. It is an error before all are
// enqueued. Tasks that have left asynq's archive stay failed. A firing that had ended, or was stopped, goes on, and
// enqueues the task of Batch.Ended again when it ends. A scheduler that runs does the work.
func (s *Scheduler) Retry(ctx context.Context, f Firing) error { return s.want(ctx, f, wantRetry) }

func (s *Scheduler) want(ctx context.Context, f Firing, want string) error {
	firing, err := s.firing(f)
	if err != nil {
		return err
	}
	wanted, err := s.redis.Want(ctx, firing, want)
	if err != nil {
		return fmt.Errorf("batch: %w", err)
	}
	if !wanted {
		why := "it has ended or was cancelled"
		if want == wantRetry {
			why = "nothing has failed, it is being enqueued, or it was cancelled"
		}
		return fmt.Errorf("%w that can %s: batch %q, tick %s: %s",
			ErrNoFiring, verbs[want], f.Batch, f.Tick.UTC().Format(time.RFC3339), why)
	}
	if want == wantRun || want == wantRetry {
		return nil
	}
	for end := time.Now().Add(startsWithin); time.Now().Before(end); { // servers start what they have picked up
		running, err := s.redis.Running(ctx, firing)
		if err == nil && len(running) == 0 || !sleep(ctx, 50*time.Millisecond) {
			break
		}
	}
	return ctx.Err()
}

var verbs = map[string]string{wantRun: "go on", wantPause: "pause", wantCancel: "be cancelled", wantRetry: "be retried"}

func (s *Scheduler) batch(name string) (*compiled, error) {
	if b := s.batches[name]; b != nil {
		return b, nil
	}
	return nil, fmt.Errorf("batch: the scheduler has no batch %q", name)
}

func (s *Scheduler) firing(f Firing) (asynqredis.Firing, error) {
	b, err := s.batch(f.Batch)
	if err != nil {
		return asynqredis.Firing{}, err
	}
	return asynqredis.Firing{Queue: b.Queue, Batch: b.Name, Tick: f.Tick.UTC()}, nil
}

// sleep waits, and reports false if the context has ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

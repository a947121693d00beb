// Package dispatch decides what an asynq server runs next. It answers asynq's dequeue: it takes
// tickets that fit from the lines of a limiter, picks their tasks, gives pending tasks their turns,
// and waits while there is nothing. It also answers asynq's forward: tasks that are due join their
// lines.
//
// It knows throttle and asynqredis, and not asynq itself. To follow a task, read [Dispatcher.Next],
// then round.go, take.go, pick.go and buffer.go; wait.go is for when there is none.
package dispatch

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

const (
	// batchMax is the most tasks that one take or dequeue asks for. More cost Redis less for each, and
	// each waits longer for the others.
	batchMax = 20

	// soon is how long a task that is taken may wait for a slot, about. soonMax is the most tasks that
	// do.
	soon    = 10 * time.Millisecond
	soonMax = 64

	// bufferFor is how long a task is kept ready for a slot.
	bufferFor = 500 * time.Millisecond

	// fallbackMin is how long after its expected start forward looks at a waiting task.
	fallbackMin = 2 * time.Minute

	// stoppedPause is the pause of a call after Stop: asynq calls again at once.
	stoppedPause = 20 * time.Millisecond

	// troubleTimeout bounds calls that clean up.
	troubleTimeout = 5 * time.Second
)

// A Limiter has lines: see Lines. A line has the name of its policy, unless that has shards.
type Limiter interface {
	Line(name string) Line
	LineOf(policy, tenant string) string
	Lines() []string
}

// A Line has the methods of *throttle.Line that a dispatcher calls.
type Line interface {
	Acknowledge(ctx context.Context) error
	Join(ctx context.Context, requests []throttle.Request) ([]throttle.Place, error)
	PutBack(ctx context.Context, tickets []throttle.TakenTicket) error
	Refund(ctx context.Context, tickets []throttle.TakenTicket) error
	Reserve(ctx context.Context, requests []throttle.Request) ([]throttle.TakenTicket, error)
	Take(ctx context.Context, o throttle.TakeOptions) (throttle.Taken, error)
}

// Lines returns the lines of a limiter.
func Lines(l *throttle.Limiter) Limiter { return limiter{l} }

type limiter struct{ *throttle.Limiter }

func (l limiter) Line(name string) Line { return l.Limiter.Line(name) }

// Config configures New. All fields are required.
type Config struct {
	Answered    func(line string, at time.Time)        // is called when a take is answered; at: Redis' clock
	Asynq       *asynqredis.Client                     // of the server's connection
	Concurrency int                                    // of the server: its slots
	Failed      func(line string, err error)           // is called when a take or a join fails
	Limiter     Limiter                                //
	Lost        func(queue, line string)               // is called once a queue: a task that waits stands in no line
	Match       func(asynqredis.Message) (Match, bool) // how a task joins a line; false: none
	Poll        time.Duration                          // how often to look for pending tasks
	Queues      map[string]int                         // the server's queues with their priorities
	Strict      bool                                   // whether priorities are strict
}

// A Match says how a task joins a line.
type Match struct {
	FailOpen bool          // it runs if the limiter is not available
	MaxWait  time.Duration // of a task that joins later than it was enqueued
	Request  throttle.Request
}

// A Grant is the capacity that a task got when its ticket was taken, or when it was dequeued. That
// of a dequeued task may be a denial: its ticket has joined the line.
type Grant struct {
	throttle.TakenTicket
	Due  time.Time // when it fitted first, as far as this server knows; zero: it does not
	Line string
	Sent time.Time // when it was charged, at the earliest, by this machine's clock
}

// A Task is the task that asynq runs next.
type Task struct {
	asynqredis.Ref
	Message asynqredis.Message
	Grant   *Grant // nil if it has to reserve
}

// A Dispatcher serves one asynq server. It is safe for concurrent use.
type Dispatcher struct {
	Config
	groups []*group // of queues, in the order of their importance

	ctx     context.Context // ends when it is closed
	cancel  context.CancelFunc
	serving context.Context // ends when no more tasks are handed out
	stop    context.CancelFunc
	stopped sync.Once
	emptied chan struct{} // closed when, after stop, all that was ready is put back
	wake    chan struct{} // something has changed while Next waits
	busy    sync.WaitGroup
	rounds  chan struct{} // full during a round; no mutex: fake time stands still while one is waited for

	mu        sync.Mutex
	acks      map[string]*time.Timer // by line, of takes that are not acknowledged
	buffer    []*fetch               // with tasks to hand out, the next first
	closed    bool
	emptyAt   time.Time                    // when the next of the empty lines is asked
	expiry    *time.Timer                  // of the buffer
	fetching  bool                         // a round is under way ahead of time
	full      bool                         // the last take or dequeue got all that it asked for
	listening map[string]bool              // the listeners that run, by their first queue
	lost      []*fetch                     // whose reply has not come
	lostIn    map[string]bool              // the queues of which Lost was called
	noJoins   time.Time                    // when a join of forward failed last
	pace      pace                         // at which slots become free
	passing   bool                         // passOn runs
	passOn    *time.Timer                  // of appointments that cannot be kept
	paused    map[string]time.Time         // when to look again whether the queue is paused
	running   int                          // tasks handed out that have not ended
	silence   outage.Backoff               // of the limiter as a whole
	skips     int                          // calls of this pass that are answered already
	stuck     map[asynqredis.Ref]time.Time // since when tasks were active that were to be picked
	waiting   bool                         // Next waits, and nudges are for it
	wakes     map[wakeUp]bool
}

// New returns a dispatcher. It makes no call before its first use.
func New(c Config) *Dispatcher {
	ctx, cancel := context.WithCancel(context.Background())
	d := &Dispatcher{
		Config:    c,
		acks:      map[string]*time.Timer{},
		cancel:    cancel,
		ctx:       ctx,
		emptied:   make(chan struct{}),
		groups:    groups(c.Queues, c.Strict),
		listening: map[string]bool{},
		lostIn:    map[string]bool{},
		paused:    map[string]time.Time{},
		rounds:    make(chan struct{}, 1),
		stuck:     map[asynqredis.Ref]time.Time{},
		wake:      make(chan struct{}, 1),
		wakes:     map[wakeUp]bool{},
	}
	d.serving, d.stop = context.WithCancel(ctx)
	d.expiry = time.AfterFunc(time.Hour, d.expire)
	d.expiry.Stop()
	d.passOn = time.AfterFunc(time.Hour, d.passOnAppointments)
	d.passOn.Stop()
	d.emptyAt = time.Now().Add(emptyEvery)
	return d
}

// Next returns the task that runs next, of any queue of the server. Like asynq's dequeue it is
// called when a slot is free, once for each queue until there is a task. If there is none it waits
// up to a second and returns false. Errors are those of asynq's Redis. An unavailable limiter is no
// error.
func (d *Dispatcher) Next(ctx context.Context) (Task, bool, error) {
	task, ok, answered := d.handOut()
	if ok {
		d.fetchAhead()
	}
	if ok || answered {
		return task, ok, nil
	}
	for end := time.Now().Add(waitMax); ; d.wait(end) {
		if d.isStopped() {
			d.sleep(stoppedPause)
			return Task{}, false, nil
		}
		if err := d.roundUnlessReady(ctx); err != nil {
			d.sleep(errorPause)
			return Task{}, false, err
		}
		if task, ok, _ := d.handOut(); ok {
			return task, true, nil
		}
		if !time.Now().Before(end) {
			d.mu.Lock()
			d.skips = len(d.Queues) - 1
			d.mu.Unlock()
			return Task{}, false, nil
		}
	}
}

// errorPause is the pause after an error of asynq's Redis: asynq calls again at once.
const errorPause = 100 * time.Millisecond

// Ended frees the slot of a task that was handed out.
func (d *Dispatcher) Ended() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pace.note(time.Now(), d.running)
	d.pace.end()
	d.running--
}

// Stop hands out no more tasks. Tasks that are ready go back to where they were, in the background.
func (d *Dispatcher) Stop() {
	d.stopped.Do(func() {
		d.stop()
		d.mu.Lock()
		d.passOn.Stop()
		d.mu.Unlock()
		d.Later(func(ctx context.Context) error {
			err := d.empty(ctx)
			if err == nil {
				close(d.emptied)
			}
			return err
		})
	})
}

// Drain stops, and waits until all tasks that were ready are put back, or the context ends.
func (d *Dispatcher) Drain(ctx context.Context) {
	d.Stop()
	select {
	case <-d.emptied:
	case <-ctx.Done():
	}
	_ = d.empty(ctx) // what cannot be put back asynq recovers, as from a worker that died
}

// Close stops, and waits for calls under way. A call that fails is not repeated any more.
func (d *Dispatcher) Close() {
	d.Stop()
	d.cancel()
	d.mu.Lock()
	d.closed = true
	d.expiry.Stop()
	for _, timer := range d.acks {
		timer.Stop()
	}
	d.mu.Unlock()
	d.busy.Wait()
}

func (d *Dispatcher) isStopped() bool { return d.serving.Err() != nil }

func (d *Dispatcher) sleep(pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.ctx.Done():
	}
}

// Later makes a call in the background, and repeats it for ten seconds while it fails.
func (d *Dispatcher) Later(do func(context.Context) error) {
	d.inBackground(func() {
		pause := 50 * time.Millisecond
		for end := time.Now().Add(2 * troubleTimeout); ; pause = min(2*pause, time.Second) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), troubleTimeout)
			err := do(ctx)
			cancel()
			if err == nil || d.ctx.Err() != nil || time.Now().After(end) {
				return
			}
			d.sleep(pause)
		}
	})
}

// inBackground runs a function for which Close waits. After Close it runs the function at once.
func (d *Dispatcher) inBackground(run func()) {
	d.mu.Lock()
	closed := d.closed
	if !closed {
		d.busy.Go(run)
	}
	d.mu.Unlock()
	if closed {
		run()
	}
}

// signal ends a wait of Next. The lock is held.
func (d *Dispatcher) signal() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// Fallback returns when a waiting task is looked at even if nobody has taken it: two minutes after its
// expected start, or if its policy fails open, every two minutes. The task runs then if the limiter
// does not answer.
func Fallback(startsIn time.Duration, failOpen bool) time.Duration {
	if failOpen {
		return fallbackMin
	}
	return startsIn + fallbackMin
}

// Reason is what asynq's tools show of a task that waits in line at a place: until when, as a time that
// holds whenever somebody looks.
func Reason(r throttle.Request, p throttle.Place, now time.Time) string {
	at := func(d time.Duration) string { return now.Add(d + time.Second - 1).UTC().Format(time.RFC3339) }
	text := fmt.Sprintf("throttled: %s, tenant %q: waits in line, expected to start at %s",
		r.Policy, r.Tenant, at(p.Expected))
	switch {
	case p.Binds == throttle.BySlots:
		text += " by the rate at which servers take tasks"
	case p.Latest > p.Expected+time.Second:
		text += ", at the latest at " + at(p.Latest)
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

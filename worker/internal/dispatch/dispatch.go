// Package dispatch decides what an asynq server runs next. It answers asynq's dequeue: it takes tickets that fit from
// the lines of a limiter, picks their tasks, gives pending tasks their turns, and waits while there is nothing. It
// also answers asynq's forward: tasks that are due join their lines.
//
// It knows throttle and asynqredis, and not asynq itself. To follow a task, read serve.go, lines.go, and
// take.go or pending.go. restore.go has the ways back, and news.go what others tell serve.
package dispatch

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// cleanUpTimeout bounds calls that clean up.
const cleanUpTimeout = 5 * time.Second

// Config configures New. All fields are required.
type Config struct {
	Concurrency int               // of the server: its slots
	Limiter     *throttle.Limiter // whose lines are served
	LimiterLog  *outage.Log       // whether it answers

	// Match returns the request by which a task joins a line, without its ticket; false: it joins none.
	// waited says whether the task has stood in a line before.
	Match func(m asynqredis.Message, waited bool) (throttle.Request, bool)

	Poll   time.Duration      // how often to look for pending tasks
	Queues map[string]int     // the server's queues with their priorities
	Strict bool               // whether priorities are strict
	Tasks  *asynqredis.Client // of the server's connection
}

// A Verdict is what became of a task's request before the task has a slot. Its Decision tells:
//
//	Granted  its units are charged, by the take of its ticket or by Reserve: it runs, if it still counts
//	Queued   Reserve has denied it, and its ticket is in line: it goes back to wait
//	neither  its ticket was taken, but nothing was charged: it reserves, or fails if it NeverFits
type Verdict struct {
	throttle.TakenTicket           // or what Reserve has decided, in the same form
	DecidedAt            time.Time // by this machine's clock; a grant was charged then or later
	Due                  time.Time // when the first ticket of a take began to fit, as far as this server knows; zero for others
	FromLine             bool      // the task has waited in a line; else it was pending
	Line                 string
}

func (v *Verdict) isDenied() bool    { return v != nil && v.Decision.Queued }
func (v *Verdict) isUncharged() bool { return !v.Decision.Granted && !v.Decision.Queued }

type Task struct {
	asynqredis.Ref
	Message     asynqredis.Message
	Verdict     *Verdict // nil: undecided
	CallKey     string   // of the call that made it active
	activeSince time.Time
}

// A Dispatcher serves one asynq server: one goroutine, serve, makes tasks ready, and Next hands them out. It is safe for
// concurrent use.
type Dispatcher struct {
	Config
	ctx     context.Context // ends when it is closed
	cancel  context.CancelFunc
	serving context.Context // ends when no more tasks are handed out
	stop    context.CancelFunc
	emptied chan struct{}  // closed when all that was ready is put back after stop
	busy    sync.WaitGroup // goroutines for which Close waits

	asynqLog  outage.Log    // whether asynq's Redis answers
	idle      chan struct{} // serve sends while it has nothing to do and Next waits; hear receives before each call
	wakeNext  chan struct{} // ends a wait of Next
	wakeServe chan struct{} // ends a wait of serve

	// Only serve changes these: its views of all lines, by sets of queues, and what it learned from calls.
	sets           []*queueSet
	paused         map[string]bool // queues
	lastCallFailed bool
	backoff        outage.Backoff // of the limiter as a whole

	lostIn  sync.Map // queues of which a lost ticket was logged
	wakeUps sync.Map // queues and seconds at which Forward is called, before asynq does so

	mu       sync.Mutex
	buffer   buffer
	joinNext time.Time // when the next task that could not join tries again
	news     []func()  // changes of serve's views, which it makes in its next round
	waiting  bool      // Next waits for a task, and none is ready
}

// New returns a dispatcher, which has to be closed. It makes no call before its first use: then it listens
// for nudges, in a Cluster for each queue by itself.
func New(c Config) *Dispatcher {
	d := &Dispatcher{
		Config:    c,
		emptied:   make(chan struct{}),
		asynqLog:  outage.Log{Logger: c.LimiterLog.Logger, Service: "asynq's Redis"},
		idle:      make(chan struct{}),
		wakeNext:  make(chan struct{}, 1),
		wakeServe: make(chan struct{}, 1),
		sets:      queueSetsOf(c.Queues, c.Strict),
		paused:    map[string]bool{},
		buffer:    buffer{free: c.Concurrency},
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.serving, d.stop = context.WithCancel(d.ctx)
	d.inBackground(d.serve)
	queues, together := slices.Sorted(maps.Keys(d.Queues)), 1
	if d.Tasks.OneSlot() {
		together = len(queues)
	}
	for some := range slices.Chunk(queues, together) {
		d.inBackground(func() { d.hear(some) })
	}
	return d
}

// Stop hands out no more tasks. In the background, tasks that are ready go back to where they were,
// and other servers are asked to keep this one's appointments.
func (d *Dispatcher) Stop() { d.stop() }

// Close stops, and waits until all tasks that were ready are put back, or the context ends. Asynq recovers the others,
// as from a worker that died. At last Close waits for calls under way. A call that fails is not repeated any more.
func (d *Dispatcher) Close(ctx context.Context) {
	d.Stop()
	select {
	case <-d.emptied:
	case <-ctx.Done():
	}
	d.mu.Lock()
	d.cancel()
	d.mu.Unlock()
	d.busy.Wait()
}

func (d *Dispatcher) isStopped() bool { return d.serving.Err() != nil }

func (d *Dispatcher) sleep(delay time.Duration) {
	select {
	case <-time.After(delay):
	case <-d.ctx.Done():
	}
}

// inBackground runs a function. Close waits for it, unless it begins after Close has cancelled d.ctx.
func (d *Dispatcher) inBackground(run func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Err() != nil {
		go run()
		return
	}
	d.busy.Go(run)
}

// RetryInBackground makes a call in the background, and repeats it for ten seconds while it fails.
func (d *Dispatcher) RetryInBackground(do func(context.Context) error) {
	d.inBackground(func() {
		for end, backoff := time.Now().Add(2*cleanUpTimeout), (outage.Backoff{}); ; {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), cleanUpTimeout)
			err := do(ctx)
			cancel()
			if err == nil || d.ctx.Err() != nil || time.Now().After(end) {
				return
			}
			backoff.Fail(time.Now())
			d.sleep(time.Until(backoff.Until))
		}
	})
}

// insist repeats a call on asynq's Redis until it succeeds, also if Redis answered with an error, as the call may have
// changed tasks. Observers see these calls as "dequeue". Once ctx has ended, a failure is the last, unseen: the answer is zero.
func insist[T any](ctx context.Context, d *Dispatcher, call func(ctx context.Context) (T, error)) T {
	for ; ; d.sleep(retryAfterError) {
		begun := time.Now()
		answer, err := call(d.ctx) // not ctx: its end must not lose the answer of a call under way
		if err != nil && ctx.Err() != nil {
			return answer
		}
		d.Limiter.Config().Observer(throttle.Call{Err: err, Script: "dequeue", Took: time.Since(begun)})
		if err == nil {
			d.asynqLog.Answered(0)
			return answer
		}
		d.asynqLog.Failed(err)
	}
}

// Fallback returns the delay until forward looks at a waiting task that nobody has taken: two minutes after its
// expected start. If its policy fails open, that is every two minutes, so that the task runs if the limiter is silent.
func Fallback(p throttle.Policy, startsIn time.Duration) time.Duration {
	if p.FailOpen {
		return fallbackMin
	}
	return startsIn + fallbackMin
}

// Reason is the text that asynq's tools show for a task that waits in line: it names the expected start as a
// date and time, which stays true however late somebody reads it.
func Reason(r throttle.Request, p throttle.LineDecision, now time.Time) string {
	clock := func(d time.Duration) string { return now.Add(d + time.Second - 1).UTC().Format(time.RFC3339) }
	text := fmt.Sprintf("throttled: %s, tenant %q: waits in line, expected to start at %s",
		r.Policy, r.Tenant, clock(p.RetryIn))
	switch {
	case p.Binds == throttle.BySlots:
		text += " by the rate at which servers take tasks"
	case p.Latest > p.RetryIn+time.Second:
		text += ", at the latest at " + clock(p.Latest)
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// Package dispatch decides what an asynq server runs next. It answers asynq's dequeue: it takes
// tickets that fit from the lines of a limiter, picks their tasks, gives pending tasks their turns,
// and waits while there is nothing. It also answers asynq's forward: tasks that are due join their
// lines.
//
// It knows throttle and asynqredis, and not asynq itself. To follow a task, read [Dispatcher.Next],
// then round.go, lines.go, take.go, pick.go and buffer.go; wait.go is for when there is none, and
// schedule.go says when a line is asked.
package dispatch

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

const (
	// fallbackMin is how long after its expected start forward looks at a waiting task.
	fallbackMin = 2 * time.Minute

	// stoppedPause is the pause of a call after Stop: asynq calls again at once.
	stoppedPause = 20 * time.Millisecond

	// errorPause is the pause after an error of asynq's Redis: asynq calls again at once.
	errorPause = 100 * time.Millisecond
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

// Config configures New. All fields but HasPending are required.
type Config struct {
	Answered    func(line string, at time.Time) // is called when a take is answered; at: Redis' clock
	Asynq       *asynqredis.Client              // of the server's connection
	Concurrency int                             // of the server: its slots
	Failed      func(line string, err error)    // is called when a take or a join fails
	HasPending  func(queue string) bool         // in a test kit, which it spares a look each second
	Limiter     Limiter                         //
	Lost        func(queue, line string)        // is called once a queue: a task that waits stands in no line

	// Match returns how a task joins a line, that has waited in one or not; false: it joins none.
	Match func(m asynqredis.Message, waited bool) (Match, bool)

	Poll   time.Duration  // how often to look for pending tasks
	Queues map[string]int // the server's queues with their priorities
	Strict bool           // whether priorities are strict
}

// A Match says how a task joins a line.
type Match struct {
	FailOpen bool             // it runs if the limiter is not available
	Request  throttle.Request // without its ticket
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
	*background
	rounds   chan struct{} // has room unless a round is under way
	buffer   buffer        // what is ready to run, and for how many slots
	forwards forwards      // what forward has found
	lines    lines         // when to ask which line
	nudges   nudges        // what ends a wait
	tending  *time.Timer   // of tend, for when Next is not called
}

// New returns a dispatcher. It makes no call before its first use.
func New(c Config) *Dispatcher {
	d := &Dispatcher{
		Config:     c,
		background: newBackground(),
		rounds:     make(chan struct{}, 1),
		buffer:     buffer{slots: c.Concurrency},
		forwards:   forwards{lostIn: map[string]bool{}, wakeUps: map[wakeUp]bool{}},
		lines: lines{
			groups: groups(c.Queues, c.Strict), paused: map[string]bool{}, stuck: map[asynqredis.Ref]time.Time{},
		},
		nudges: nudges{wake: make(chan struct{}, 1), listening: map[string]bool{}},
	}
	d.tending = time.AfterFunc(waitMax, func() {
		if d.ctx.Err() == nil {
			again, _ := d.tend()
			d.tending.Reset(max(keptFor, time.Until(sooner(again, time.Now().Add(waitMax)))))
		}
	})
	d.tending.Stop()
	return d
}

// Next returns the task that runs next, of any queue of the server. Like asynq's dequeue it is
// called when a slot is free, once for each queue until there is a task. If there is none it waits
// up to a second and returns false. Errors are those of asynq's Redis. An unavailable limiter is no
// error.
func (d *Dispatcher) Next(ctx context.Context) (Task, bool, error) {
	for end := time.Now().Add(waitMax); ; {
		if task, ok := d.buffer.handOut(); ok {
			d.tending.Reset(keptFor)
			d.fetchAhead()
			return task, true, nil
		}
		if d.isStopped() {
			d.sleep(stoppedPause)
			return Task{}, false, nil
		}
		switch found, err := d.roundUnlessReady(ctx); {
		case err != nil:
			d.sleep(errorPause)
			return Task{}, false, err
		case !found && !time.Now().Before(end):
			return Task{}, false, nil
		case !found:
			d.wait(end)
		}
	}
}

// Stop hands out no more tasks. In the background, tasks that are ready go back to where they were,
// and other servers are asked to keep this one's appointments.
func (d *Dispatcher) Stop() {
	d.stopped.Do(func() {
		d.stop()
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
	d.tending.Stop()
	d.close()
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

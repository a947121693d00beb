package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// takeTimeout is how long a take, or the reserve of pending tasks, may hold others up.
const takeTimeout = 250 * time.Millisecond

// take takes from a line, and picks. It reports whether a task is ready.
func (d *Dispatcher) take(l *line, n int) (found bool) {
	queues := d.openQueues(l.set)
	if len(queues) == 0 {
		l.ask = time.Now().Add(lookEvery)
		return false
	}
	due, sent := l.due, time.Now()
	l.asked, l.pickedAt = sent, time.Time{} // it also acknowledges the take before
	call, cancel := context.WithTimeout(d.ctx, takeTimeout)
	taken, err := d.Line(l.name).Take(call, throttle.TakeOptions{Queues: queues, Strict: d.Strict, Max: n})
	cancel()
	if err != nil {
		d.noteFailure(l, err)
		return false
	}
	d.lines.lastTakeFailed, d.lines.backoff = false, outage.Backoff{}
	l.noteAnswer(taken, sent, time.Now())
	d.OnAnswer(l.name, l.redisTime.Sub(taken.At))
	l.redisTime = latest(l.redisTime, taken.At)
	l.nudged = l.nudged && len(taken.Tickets) >= n // more may fit: without a slot left, it is passed on
	if len(taken.Tickets) == 0 {
		return false
	}
	var names []string // of the queues, in the order of their first tickets
	verdicts := map[string][]*Verdict{}
	for i, t := range taken.Tickets {
		// A take that was not answered at once hands out later what it had charged then.
		verdict := &Verdict{TakenTicket: t, Line: l.name, Taken: true}
		verdict.Sent = sent.Add(-max(0, taken.At.Sub(t.Decision.At)))
		if i == 0 {
			verdict.Due = latest(due, sent.Add(-t.Waited))
		}
		if verdicts[t.Queue] == nil {
			names = append(names, t.Queue)
		}
		verdicts[t.Queue] = append(verdicts[t.Queue], verdict)
	}
	for _, name := range names {
		found = d.pick(l, name, verdicts[name]) || found
	}
	l.pickedAt = time.Now()
	return found
}

// openQueues returns the queues to take from for a set, as the limiter knows them, with their priorities:
// its own, and the more important ones, without those that are paused.
func (d *Dispatcher) openQueues(set *queueSet) map[string]int {
	identity, err := d.Tasks.Identity(d.ctx)
	if err != nil {
		return nil // and so does the call for pending tasks, of which Next tells
	}
	queues := map[string]int{}
	for _, queue := range set.named {
		if !d.lines.paused[queue] {
			queues[identity+"/"+queue] = d.Queues[queue]
		}
	}
	return queues
}

// pick makes the tasks of a queue ready whose tickets were taken from a line, and handles the tickets
// whose tasks cannot be picked. It reports whether any task is ready.
func (d *Dispatcher) pick(l *line, name string, verdicts []*Verdict) bool {
	_, queue, _ := strings.Cut(name, "/") // behind the identity of asynq's Redis
	call, waiting := d.Tasks.NewCall(), make([]asynqredis.WaitingTask, len(verdicts))
	for i, verdict := range verdicts {
		waiting[i] = asynqredis.WaitingTask{ID: verdict.ID, JoinKey: verdict.Key}
	}
	var picks []asynqredis.Pick
	if !d.insist(func(ctx context.Context) (err error) {
		picks, err = d.Tasks.Pick(ctx, queue, call, waiting)
		return err
	}) {
		return false
	}
	var tasks []Task
	var back, gone []throttle.TakenTicket
	for i, pick := range picks {
		verdict := verdicts[i]
		switch {
		case pick.Message != nil:
			tasks = append(tasks, d.newTask(queue, call, pick.Message, verdict))
		case pick.Paused:
			d.lines.paused[queue] = true
			back = append(back, verdict.TakenTicket)
		default: // a pending task reserves when it is dequeued, an active one joins again if it is denied
			gone = append(gone, verdict.TakenTicket)
		}
	}
	d.putBack(l.name, queue, back...)
	d.refund(l.name, queue, gone...)
	d.reserve(l.set, tasks) // units that these were taken without
	l.set.sinceTurn += len(tasks)
	return d.makeReady(slices.DeleteFunc(tasks, d.putBackIfDenied))
}

// putBackIfDenied puts a taken task back that was denied when it reserved again, as it has joined by then. It
// reports whether it did: otherwise the task wakes to be denied.
func (d *Dispatcher) putBackIfDenied(t Task) bool {
	if !t.Verdict.Decision.Queued || d.restoreTask(t) != nil {
		return false
	}
	d.Expect(t.Verdict.Line, t.Queue, t.Verdict.Decision.RetryIn)
	d.WakeAt(t.Queue, time.Now()) // its ticket may have been taken before it was back
	return true
}

func (d *Dispatcher) newTask(queue, call string, m asynqredis.Message, verdict *Verdict) Task {
	ref := asynqredis.Ref{Queue: queue, ID: m.ID()}
	return Task{Ref: ref, Message: m, Verdict: verdict, Call: call, active: time.Now()}
}

// noteFailure notes that a call of a line failed. From a second failure on, no line is asked for a while.
func (d *Dispatcher) noteFailure(l *line, err error) {
	if errors.Is(err, throttle.ErrUnknownPolicy) {
		delete(l.set.lines, l.name)
		return
	}
	now := time.Now()
	l.backoff.Fail(now)
	l.ask, l.due = now, time.Time{}
	if d.lines.lastTakeFailed {
		d.lines.backoff.Fail(now)
	}
	d.lines.lastTakeFailed = true
	d.OnFailure(l.name, asUnavailable(err))
}

// asUnavailable returns the error of a limiter that did not answer in time.
func asUnavailable(err error) error {
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, throttle.ErrUnavailable) {
		return fmt.Errorf("%w: %w", throttle.ErrUnavailable, err)
	}
	return err
}

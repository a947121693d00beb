package dispatch

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// takeTimeout is how long a take, or the reserve of pending tasks, may delay others.
const takeTimeout = 250 * time.Millisecond

// take takes from a line, and picks. It reports whether a task is ready.
func (d *Dispatcher) take(l *line, n int) (found bool) {
	queues := d.openQueues(l.set)
	if len(queues) == 0 {
		l.askAt = time.Now().Add(lookEvery)
		return false
	}
	if l.acknowledge != nil {
		l.acknowledge.Stop() // this take acknowledges the last one
	}
	appointment, sent := l.appointment, time.Now() // noteAnswer replaces the appointment
	ctx, cancel := context.WithTimeoutCause(d.ctx, takeTimeout, outage.ErrSilent)
	taken, err := d.Limiter.Line(l.name).Take(ctx, throttle.TakeOptions{Queues: queues, Strict: d.Strict, Max: n})
	cancel()
	if err != nil {
		d.noteFailure(l, err)
		return false
	}
	d.lastCallFailed, d.backoff = false, outage.Backoff{}
	l.noteAnswer(taken, sent, time.Now())
	d.giveBack((*throttle.Line).PutBack, l.name, taken.Others...)
	d.LimiterLog.Answered(l.redisTime.Sub(taken.At), "line", l.name)
	l.redisTime = latest(l.redisTime, taken.At)
	l.nudged = l.nudged && len(taken.Tickets) >= n // more may fit: the nudge is passed on if no slot is left
	verdicts := verdictsOf(l, taken, sent, appointment)
	for _, queue := range l.set.takesOf {
		if some := verdicts[queue]; len(some) > 0 {
			found = d.makeTakenReady(l, d.pick(l, queue, some)) || found
		}
	}
	if d.ctx.Err() == nil { // else some tickets may not have been picked: another server puts them back
		l.acknowledge = time.AfterFunc(acknowledgeAfter, func() { d.RetryInBackground(d.Limiter.Line(l.name).Acknowledge) })
	}
	return found
}

// verdictsOf returns the verdicts of a take, by queue. The first ticket counts as fitting since the appointment.
func verdictsOf(l *line, taken throttle.Taken, sent, appointment time.Time) map[string][]*Verdict {
	byQueue := map[string][]*Verdict{}
	for i, t := range taken.Tickets {
		decidedAt := sent.Add(-max(0, taken.At.Sub(t.Decision.At))) // when the take was sent for the first time
		verdict := &Verdict{TakenTicket: t, DecidedAt: decidedAt, FromLine: true, Line: l.name}
		if i == 0 {
			verdict.Due = latest(appointment, sent.Add(-t.Waited))
		}
		_, queue, _ := strings.Cut(t.Queue, "/") // after the ID of asynq's Redis
		byQueue[queue] = append(byQueue[queue], verdict)
	}
	return byQueue
}

// openQueues returns the queues to take from for a set, by their names in the limiter, with their priorities:
// the set's own queues and the more important ones, but no paused queue.
func (d *Dispatcher) openQueues(set *queueSet) map[string]int {
	database, err := d.Tasks.Database(d.ctx)
	if err != nil {
		return nil // asynq's Redis does not answer: as a rule the call for pending tasks fails, too, and logs that
	}
	queues := map[string]int{}
	for _, queue := range set.takesOf {
		if !d.paused[queue] {
			queues[database+"/"+queue] = d.Queues[queue]
		}
	}
	return queues
}

// pick makes active, and returns, the tasks of a queue whose tickets were taken from a line. Tickets whose tasks cannot
// be picked are given back.
func (d *Dispatcher) pick(l *line, queue string, verdicts []*Verdict) (tasks []Task) {
	call, waiting := d.Tasks.NewCall(), make([]asynqredis.WaitingTask, len(verdicts))
	for i, verdict := range verdicts {
		waiting[i] = asynqredis.WaitingTask{ID: verdict.ID, JoinKey: verdict.Key}
	}
	picks := insist(d.ctx, d, func(ctx context.Context) ([]asynqredis.Pick, error) {
		return d.Tasks.Pick(ctx, queue, call, waiting)
	})
	var joins []asynqredis.Move
	var back, gone []throttle.TakenTicket
	for i, pick := range picks {
		v := verdicts[i]
		switch {
		case pick.Message != nil:
			tasks = append(tasks, d.newTask(queue, call, pick.Message, v))
		case pick.Paused:
			d.paused[queue] = true
			back = append(back, v.TakenTicket)
			if v.isUncharged() { // its ticket has no position to go back to: it joins again, in front
				joins = append(joins, asynqredis.Move{ID: v.ID, JoinKey: v.Key, At: time.Now(), Line: l.name, Mark: asynqredis.FrontMark})
			}
		default: // the task is gone, or pending (it reserves when dequeued), or active (it joins again if denied)
			gone = append(gone, v.TakenTicket)
		}
	}
	d.giveBack((*throttle.Line).PutBack, l.name, back...)
	d.giveBack((*throttle.Line).Refund, l.name, gone...)
	if len(joins) > 0 {
		insist(d.ctx, d, func(ctx context.Context) ([]int64, error) { return d.Tasks.Apply(ctx, queue, joins) })
		d.WakeAt(queue, time.Now())
	}
	return tasks
}

// makeTakenReady makes picked tasks ready, and reports whether there are any. Tasks that have to reserve, and are denied,
// go back to wait. If that fails they are ready, too: the middleware puts them back.
func (d *Dispatcher) makeTakenReady(l *line, tasks []Task) bool {
	d.reserve(l.set, tasks)
	l.set.sinceTurn += len(tasks)
	isBack := func(task Task) bool { return task.Verdict.isDenied() && d.restoreTask(task) == nil }
	return d.makeReady(slices.DeleteFunc(tasks, isBack))
}

// giveBack gives the units of tickets back in the background. Then this server, or an idle one, asks the line again.
// give is Line.PutBack for tickets that go back to their positions, or Line.Refund for tickets that leave.
func (d *Dispatcher) giveBack(
	give func(*throttle.Line, context.Context, []throttle.TakenTicket) error, line string, tickets ...throttle.TakenTicket,
) {
	if len(tickets) == 0 {
		return
	}
	d.RetryInBackground(func(ctx context.Context) error {
		if err := give(d.Limiter.Line(line), ctx, tickets); err != nil {
			return err
		}
		for _, t := range tickets {
			_, queue, _ := strings.Cut(t.Queue, "/")
			d.Nudge(queue, line)
		}
		return nil
	})
}

func (d *Dispatcher) newTask(queue, call string, m asynqredis.Message, verdict *Verdict) Task {
	return Task{Ref: asynqredis.Ref{Queue: queue, ID: m.ID()}, Message: m, Verdict: verdict, CallKey: call, activeSince: time.Now()}
}

// noteFailure notes that a call of a line failed. From the second failure in a row on, no line is asked for a while.
func (d *Dispatcher) noteFailure(l *line, err error) {
	now := time.Now()
	l.backoff.Fail(now)
	l.askAt, l.appointment = now, time.Time{}
	if d.lastCallFailed {
		d.backoff.Fail(now)
	}
	d.lastCallFailed = true
	policy, _ := d.Limiter.Lookup(l.name)
	d.LimiterLog.Failed(err, "line", l.name, "fails_open", policy.FailOpen)
}

// reserve asks the limiter about the undecided tasks of a dequeue or pick: by one Line.Reserve for each line, in the
// tasks' order. So no slot waits for a decision, and a denied task has joined its line. The middleware decides
// about tasks that get no decision here.
func (d *Dispatcher) reserve(set *queueSet, tasks []Task) {
	database, err := d.Tasks.Database(d.ctx)
	if err != nil {
		return
	}
	requests, undecided := map[string][]throttle.Request{}, map[string][]*Task{} // by line
	for i, task := range tasks {
		verdict := task.Verdict // nil if the task was pending
		isDecided := verdict != nil && (verdict.Decision.Granted || verdict.NeverFits)
		if isDecided && verdict.Line == d.Limiter.LineOf(verdict.Decision.Policy, verdict.Decision.Tenant) {
			continue // else its tenant is in another shard by now
		}
		if r, line, ok := d.request(database, task.Queue, task.Message, verdict != nil); ok {
			if verdict != nil {
				r.Front, r.Since = true, verdict.Since
			}
			requests[line], undecided[line] = append(requests[line], r), append(undecided[line], &tasks[i])
		}
	}
	for name, all := range requests {
		if l := set.lines[name]; l != nil && !time.Now().Before(d.backoffEnd(l)) {
			d.reserveIn(l, all, undecided[name])
		}
	}
}

// reserveIn asks one line. A task that is granted or denied gets a verdict, and an earlier one's ticket is refunded.
func (d *Dispatcher) reserveIn(l *line, requests []throttle.Request, tasks []*Task) {
	ctx, cancel := context.WithTimeoutCause(d.ctx, takeTimeout, outage.ErrSilent)
	sent := time.Now()
	decisions, err := d.Limiter.Line(l.name).Reserve(ctx, requests)
	cancel()
	if errors.Is(err, throttle.ErrUnavailable) {
		d.noteFailure(l, err)
	}
	for i, decision := range decisions {
		if decision.Err != nil || !decision.Granted && !decision.Queued {
			continue
		}
		ticket := throttle.TakenTicket{Ticket: requests[i].Ticket, Key: requests[i].Key, Decision: decision.Decision}
		earlier := tasks[i].Verdict
		if earlier != nil {
			ticket.Since, ticket.Waited = earlier.Since, earlier.Waited
			d.giveBack((*throttle.Line).Refund, earlier.Line, earlier.TakenTicket)
		}
		tasks[i].Verdict = &Verdict{TakenTicket: ticket, DecidedAt: sent, FromLine: earlier != nil, Line: l.name}
	}
}

// request returns the request of a task of a queue, and the line in which it waits, if it joins one.
func (d *Dispatcher) request(database, queue string, m asynqredis.Message, waited bool) (r throttle.Request, line string, ok bool) {
	if r, ok = d.Match(m, waited); ok {
		r.Ticket = throttle.Ticket{Queue: database + "/" + queue, ID: m.ID()}
		line = d.Limiter.LineOf(r.Policy, r.Tenant)
	}
	return r, line, ok
}

package dispatch

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

const (
	forwardMax  = 100             // the most tasks that are forwarded at once: asynq's own number
	fallbackMin = 2 * time.Minute // see Fallback
	joinTimeout = 2 * time.Second // of the join of forwarded tasks
	// joinWithin is how long a task has to join before forward looks at it again, as its server may have ended.
	joinWithin = 5 * time.Second
	// Tasks that could not join are looked at again after unavailableFor, or later: unavailableEvery apart.
	unavailableFor   = time.Second
	unavailableEvery = 200 * time.Microsecond
)

// Forward moves the due tasks of a queue, either scheduled tasks or tasks to retry. Tasks whose policy has a line join
// the line, and the others become pending. It returns how many were due. If that is not 0 there may be more.
func (d *Dispatcher) Forward(ctx context.Context, queue string, retried bool) (int, error) {
	if d.isStopped() {
		return 0, nil
	}
	due, err := d.Tasks.Due(ctx, queue, retried, forwardMax)
	if err != nil || len(due) == 0 {
		return 0, err
	}
	database, err := d.Tasks.Database(ctx)
	if err != nil {
		return 0, err
	}
	soon, call := time.Now().Add(joinWithin), d.Tasks.NewCall()
	moves, joins := make([]asynqredis.Move, len(due)), make([]joinTask, len(due))
	for i, task := range due {
		moves[i].ID = task.ID // without a time it becomes pending
		r, line, ok := d.request(database, queue, task.Message, task.Mark != "")
		if joinsLine := ok && task.Message.GroupKey() == ""; !joinsLine {
			continue
		}
		joins[i] = joinTask{message: task.Message, request: r}
		moves[i].At, moves[i].Line, moves[i].Mark = soon, line, asynqredis.Mark(r.Key, call)
		joinKey, joinCall, wasToJoin := strings.Cut(task.Mark, ".") // JOINKEY.CALL: see asynqredis.FrontMark
		switch {
		case retried, task.Mark == asynqredis.FrontMark:
			joins[i].request.Front = true
		case wasToJoin: // the task keeps its key, as its payload may have been edited since
			moves[i].Mark, joins[i].request.Key, joins[i].hasJoined = task.Mark, joinKey, joinCall != ""
		}
	}
	defer d.tell(func() { d.setOf(queue).lookAt = time.Time{} }) // at once: some may be pending now
	moved, err := d.Tasks.Apply(ctx, queue, moves)
	byLine := map[string][]joinTask{}
	for i, move := range moves {
		// If the reply was lost the task may have moved all the same: a ticket that joins in vain is dropped.
		if move.Line != "" && (err != nil || moved[i] == asynqredis.Moved) {
			byLine[move.Line] = append(byLine[move.Line], joins[i])
		}
	}
	// One time limit for all lines: a server that stops may have to wait that long.
	joinCtx, cancel := context.WithTimeoutCause(ctx, joinTimeout, outage.ErrSilent)
	defer cancel()
	for line, all := range byLine {
		err = cmp.Or(d.join(ctx, joinCtx, queue, line, all), err)
	}
	return len(due), err
}

type joinTask struct {
	message   asynqredis.Message
	request   throttle.Request
	hasJoined bool // by its mark: a call was to make it join, so its ticket should be in line
}

// join makes scheduled tasks join a line, and moves them as the decisions demand. joinCtx bounds the join itself.
func (d *Dispatcher) join(ctx, joinCtx context.Context, queue, line string, all []joinTask) error {
	requests := make([]throttle.Request, len(all))
	for i, j := range all {
		requests[i] = j.request
	}
	decisions, err := d.Limiter.Line(line).Join(joinCtx, requests)
	policy, _ := d.Limiter.Lookup(line)
	failed := err != nil && !errors.Is(err, throttle.ErrUnknownPolicy)  // then the tasks become pending, and match anew
	mayConcernOne := failed && !errors.Is(err, throttle.ErrUnavailable) // one task may be to blame: each joins by itself
	if mayConcernOne && len(all) > 1 {
		err = nil
		for one := range slices.Chunk(all, 1) {
			err = errors.Join(err, d.join(ctx, joinCtx, queue, line, one))
		}
		return err
	}
	moves := make([]asynqredis.Move, len(all))
	now, again := time.Now(), time.Time{}
	if failed {
		d.LimiterLog.Failed(err, "line", line, "fails_open", policy.FailOpen)
		d.mu.Lock()
		again = latest(d.joinNext, now.Add(unavailableFor))
		d.joinNext = again.Add(time.Duration(len(all)) * unavailableEvery)
		d.mu.Unlock()
		d.WakeAt(queue, again)
		d.Expect(line, queue, 0) // the tickets may be in line all the same
	}
	for i, j := range all {
		move := &moves[i]
		move.ID, move.JoinKey = j.request.Ticket.ID, j.request.Key
		switch {
		case failed && !policy.FailOpen:
			move.At, move.Line, move.Mark = again, line, asynqredis.Mark(j.request.Key, "")
			if j.request.Front {
				move.Mark = asynqredis.FrontMark
			}
		case err != nil, decisions[i].Exempt, decisions[i].Err != nil: // pending, as also if it fails open: the middleware decides
		default:
			if j.hasJoined && !decisions[i].AlreadyQueued {
				d.logLostTicket(queue, line)
			}
			if decisions[i].Nudge {
				d.Nudge(queue, line)
			}
			d.Expect(line, queue, decisions[i].RetryIn)
			move.At = now.Add(Fallback(policy, decisions[i].RetryIn))
			hasFailed := j.message.LastError() != "" && !j.message.Denied() // then asynq's tools go on to show that error
			if decisions[i].RetryIn > 0 && !hasFailed {
				move.Message, move.Reason = j.message, Reason(j.request, decisions[i], now)
			}
		}
	}
	_, err = d.Tasks.Apply(ctx, queue, moves)
	return err
}

// logLostTicket logs, once for each queue, that a task which had stood in a line stands in none.
func (d *Dispatcher) logLostTicket(queue, line string) {
	if _, logged := d.lostIn.LoadOrStore(queue, true); !logged {
		d.LimiterLog.Logger.Warn("worker: a waiting task stood in no line that this server knows, and starts two minutes late or more: "+
			"its client's limiter has another Prefix, another Redis or another policy name, or did not answer, or Redis has lost the line",
			"queue", queue, "line", line)
	}
}

// WakeAt forwards a queue at a time, or now if it has passed: then a task that waits in no line is due.
func (d *Dispatcher) WakeAt(queue string, at time.Time) {
	if at.After(time.Now()) {
		at = asynqredis.WholeSecond(at)
	}
	second := [2]any{queue, at.Unix()}
	if _, known := d.wakeUps.LoadOrStore(second, true); known {
		return
	}
	time.AfterFunc(time.Until(at), func() {
		d.wakeUps.Delete(second)
		d.inBackground(func() {
			const retried = false
			for due := true; due; {
				n, err := d.Forward(context.WithoutCancel(d.ctx), queue, retried)
				due = n > 0 && err == nil // if it fails asynq's forwarder does it
			}
		})
	})
}

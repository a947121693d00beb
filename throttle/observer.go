package throttle

import (
	"fmt"
	"runtime/debug"
	"time"
)

// An Observer is told what a limiter does, for metrics and traces: as it happens, in the goroutine that does
// it, so several calls may run at once. It must return quickly, and must not call the limiter. A panic is
// recovered, and logged with its stack: at most once a minute for each type of event. These are the events:
//
//   - Call: a script in Redis was called, or package worker called asynq's Redis to pick, start or move tasks.
//   - Correction: a reservation was settled to another cost, or cancelled; or a taken ticket was given back.
//   - Decision: a request was granted or denied, but not a grant from the line, or one that replaces
//     another (Line.ReserveAgain).
//   - *DeniedError: in package worker a task goes back to wait because the limiter could not decide. Its
//     Cause is the limiter's error.
//   - LineDecision: Line.Join has answered for a ticket.
//   - Publication: package control has read a version of the published policies.
//   - Refusal: Reservation.Pause has reported that an upstream refused a call.
//   - Start: work begins, as a Limiter.Wait that may wait was granted, or package worker calls a task's handler.
//   - TakenTicket: a ticket left a policy's line with its capacity. It may be put back.
type Observer func(event any)

// A Call is one call of a script in Redis, or of package worker on asynq's Redis to pick, start or move tasks.
type Call struct {
	Err    error         // nil, the context's, or of ErrUnavailable, ErrState, ErrClock or ErrReply; or go-redis's
	N      int           // requests that it decided, or tickets that it took
	Policy string        // empty for a dequeue
	Script string        // "decide", "take" or "dequeue"
	Took   time.Duration // until the reply had arrived, or the call failed
}

// A Correction is a reservation that was settled or cancelled.
type Correction struct {
	Cancelled   bool             // by this call; Cost is empty then
	Cost        map[string]int64 // what it costs now, of the units that were corrected
	Requests    int64            // how many more it costs than before; below 0 if refunded
	Reservation Reservation      // as the caller had it
}

// A Publication is a version of the published policies.
type Publication struct {
	Err     error // why it is not in force, or nil
	Version int64
}

// A Start is work that begins, because it was granted.
type Start struct {
	// Late is the time from when the work first fitted until it begins, including the wait for a free slot. It is below
	// 0 if unknown. Of the tickets of one take it is known only for the first.
	Late time.Duration

	Policy string
	Tenant string

	Waited time.Duration // since the work joined the line, or since Limiter.Wait was called
}

// logPanic logs a panic of a function of the Config, with its stack: at most once a minute for each name.
func (l *Limiter) logPanic(function string, value any) {
	if last, ok := l.panicked.Load(function); ok && time.Since(last.(time.Time)) < time.Minute {
		return
	}
	l.panicked.Store(function, time.Now())
	l.config.Logger.Error("throttle: a function of the limiter's Config panicked",
		"function", function, "panic", fmt.Sprint(value), "stack", string(debug.Stack()))
}

// tell tells the observer of an event. Without one it costs nothing: the event becomes an interface in the last line.
func tell[Event any](l *Limiter, event Event) {
	if l.observer == nil {
		return
	}
	defer func() {
		if value := recover(); value != nil {
			l.logPanic(fmt.Sprintf("Observer(%T)", event), value)
		}
	}()
	l.observer(event)
}

package throttle

import (
	"fmt"
	"runtime/debug"
	"time"
)

// An Observer has functions for metrics and traces. A limiter calls them as things happen, in the caller's
// goroutine, so several may run at once. They must return quickly, and must not call the limiter. Nil ones
// cost nothing. A panic is recovered, and logged with its stack: at most once a minute for each function.
type Observer struct {
	// Called is called after each call of a script in Redis. Package worker calls it for each dequeue of
	// asynq's Redis, too.
	Called func(Call)

	// Corrected is called for each reservation whose cost was settled to another, or that was
	// cancelled.
	Corrected func(Correction)

	// Decided is called for each request that was granted or denied, but not for grants from the line, or
	// that replace another (Line.ReserveAgain).
	Decided func(Decision)

	// Followed is called, by package control, for each version of the published policies that was
	// read.
	Followed func(Publication)

	// Joined is called for each ticket that Line.Join has placed or refused.
	Joined func(Place)

	// Refused is called for each refusal by an upstream that Reservation.Pause has reported.
	Refused func(Refusal)

	// Started is called for each grant whose work begins: by Limiter.Wait, and by package worker when
	// it calls a task's handler.
	Started func(Start)

	// Taken is called for tickets that left a policy's line with their capacity. Some may be put back.
	Taken func([]TakenTicket)

	// Unavailable is called, by package worker, for each task that goes back to wait because the limiter
	// could not decide. Its Cause is the limiter's error.
	Unavailable func(*DeniedError)
}

// A Call is one call of a script in Redis, which decides requests, or takes tickets.
type Call struct {
	Err    error         // nil, the context's, or of ErrUnavailable, ErrState, ErrClock or ErrReply
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

// A Start is work that begins, as it was granted.
type Start struct {
	// Late is how long after the work fitted first it begins, with the wait for a free slot. It is
	// below 0 if unknown. Of the tickets of one take it is known for the first.
	Late time.Duration

	Policy string
	Tenant string

	// Waited is how long the work waited since it joined the line, or since Limiter.Wait was called.
	Waited time.Duration
}

// panicsEvery is the shortest time between two logged panics of one function.
const panicsEvery = time.Minute

// logPanic logs a panic of a function of the Config, with its stack.
func (l *Limiter) logPanic(function string, value any) {
	if last, ok := l.panicked.Load(function); ok && time.Since(last.(time.Time)) < panicsEvery {
		return
	}
	l.panicked.Store(function, time.Now())
	l.config.Logger.Error("throttle: a function of the limiter's Config panicked",
		"function", function, "panic", fmt.Sprint(value), "stack", string(debug.Stack()))
}

// guarded returns an observer without nil functions, whose panics are recovered and logged.
func (o Observer) guarded(l *Limiter) Observer {
	return Observer{
		Called:      guard(l, "Called", o.Called),
		Corrected:   guard(l, "Corrected", o.Corrected),
		Decided:     guard(l, "Decided", o.Decided),
		Followed:    guard(l, "Followed", o.Followed),
		Joined:      guard(l, "Joined", o.Joined),
		Refused:     guard(l, "Refused", o.Refused),
		Started:     guard(l, "Started", o.Started),
		Taken:       guard(l, "Taken", o.Taken),
		Unavailable: guard(l, "Unavailable", o.Unavailable),
	}
}

// guard returns a function that calls observe, unless that is nil, and recovers its panics.
func guard[T any](l *Limiter, name string, observe func(T)) func(T) {
	return func(event T) {
		defer func() {
			if value := recover(); value != nil {
				l.logPanic("Observer."+name, value)
			}
		}()
		if observe != nil {
			observe(event)
		}
	}
}

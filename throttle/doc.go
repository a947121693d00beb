// Package throttle reserves capacity in several named windows at once, by one Lua call in Redis: in
// all of them, or in none.
//
// A [Policy] guards one resource by any number of windows. A [Limiter] is asked for capacity:
//
//   - [Limiter.Reserve] takes the cost in all windows or in none, and returns at once;
//   - [Limiter.Wait] waits in line until the cost fits, or until the context ends;
//   - [Limiter.Peek] returns what Reserve would answer, and changes nothing.
//
// What was granted is a [Reservation]. [Reservation.Cancel] gives it back, [Reservation.Settle]
// corrects an estimate, and [Reservation.Hold] keeps what [Concurrency] windows lend for as long as
// the work goes on. [Reservation.Pause] and [Reservation.ReportRemaining] pass on what the called
// API says of its own limits.
//
// Work that waits stands in the policy's [Line]: first come, first served for one tenant, fair
// between tenants. A [Ticket] says who waits. [Line.Join] puts requests in line by their tickets, and
// returns when they are expected to start. [Line.Take] takes those that fit now, with their capacity. A
// denied Reserve whose request has a ticket joins too.
//
// Times of decisions are by the clock of the Redis server, to the microsecond. The package knows
// nothing of job queues: package worker puts it in front of asynq's handlers.
package throttle

// Package throttle reserves capacity in several named windows at once, atomically, by one Lua
// call in Redis.
//
// A [Policy] guards one resource by any number of windows. A [Limiter] is asked for room:
//
//   - [Limiter.Reserve] takes the cost in all windows or in none, and returns at once;
//   - [Limiter.Wait] sleeps until the cost fits, or until the context ends;
//   - [Limiter.Plan] takes a place in line, for a listener to [Limiter.OnLine];
//   - [Limiter.Peek] tells what Reserve would say, and changes nothing.
//
// It is told what became of a reservation: [Limiter.Cancel] gives back what it took, [Limiter.Settle]
// corrects it, [Limiter.Renew] and [Limiter.Release] are for what [Concurrency] windows hold. And it
// is told what the far side said: [Limiter.Pause], [Limiter.Resume], [Limiter.Left].
//
// All times are those of the Redis server, in microseconds. The package knows nothing of job
// queues: package worker puts it in front of asynq's handlers.
package throttle

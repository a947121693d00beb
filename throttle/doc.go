// Package throttle reserves capacity in several named windows at once, atomically, by one Lua
// call in Redis.
//
// A [Policy] guards one resource by any number of windows. A [Limiter] is asked by four verbs,
// which differ in their behaviour when there is no room:
//
//   - [Limiter.Reserve] takes the cost in all windows or in none, and returns at once;
//   - [Limiter.Wait] sleeps until the cost fits, or until the context ends;
//   - [Limiter.Peek] tells what Reserve would say, and changes nothing;
//   - [Limiter.Cancel] gives back what a reservation took.
//
// All times are those of the Redis server, in microseconds. The package knows nothing of job
// queues: package worker puts it in front of asynq's handlers.
package throttle

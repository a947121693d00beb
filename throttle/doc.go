// Package throttle reserves capacity in several named windows at once, atomically, by one Lua
// call in Redis.
//
// A [Policy] guards one resource by any number of windows. A [Limiter] is asked for room:
//
//   - [Limiter.Reserve] takes the cost in all windows or in none, and returns at once;
//   - [Limiter.Wait] waits in line until the cost fits, or until the context ends;
//   - [Limiter.Peek] tells what Reserve would say, and changes nothing.
//
// A reservation can be corrected: [Limiter.Cancel] gives back what it took, [Limiter.Settle] replaces the
// estimate by the real cost, [Limiter.Renew] and [Limiter.Release] are for what [Concurrency] windows hold.
// The upstream's word counts too: [Limiter.Pause], [Limiter.Resume], [Limiter.Left].
//
// Work that waits stands in the policy's line, first come, first served within a tenant and fair between tenants:
//
//   - [Limiter.Join] puts tickets in line, and tells when they are expected to start; a denied Reserve with a ticket joins too;
//   - [Limiter.Take] takes the tickets that fit now, with their capacity, and [Limiter.Acknowledge] says that they have arrived;
//   - [Limiter.PutBack] returns what could not start, [Limiter.GiveBack] what is gone; [Limiter.Leave] withdraws what waits.
//
// All times are those of the Redis server, in microseconds. The package knows nothing of job
// queues: package worker puts it in front of asynq's handlers. What goes to Redis and how is in internal/script.
package throttle

// Package throttle reserves capacity in several named windows at once, by one Lua call in Redis: in all or in none.
//
// A Policy guards one resource by any number of windows. A Limiter is asked for capacity:
// Limiter.Reserve returns at once, Limiter.Wait waits in line until the cost fits, and Limiter.Peek
// changes nothing. What was granted is a Reservation, which can be cancelled, settled and held.
//
// Work that waits stands in the policy's Line: first come, first served for one tenant, fair between tenants.
// Line.Join puts requests in line by their tickets. Line.Take takes tickets that fit now, with their capacity.
//
// Times are by the clock of the Redis server. The package knows nothing of job queues: package
// worker puts it in front of asynq's handlers.
package throttle

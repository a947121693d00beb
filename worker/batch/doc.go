// Package batch runs batches: at a tick of a schedule it enqueues tasks of many tenants, each exactly once, and
// follows them to their end.
//
// Any number of processes may run a Scheduler of the same batches. A tick fires once. The firing is a record in
// asynq's Redis, in the slot of its queue, so that the script that ends a task also counts it. One process at a time
// has the firing's lease. It enqueues the tasks and moves a cursor. If it dies, another one goes on from the cursor
// 15 seconds later.
//
// The tasks must belong to servers and policies of package worker.
package batch

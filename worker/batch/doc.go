// Package batch runs batches: at a tick of a schedule it enqueues tasks of many tenants, each exactly once, and
// follows them.
//
// Any number of processes may run a Scheduler of the same batches. A tick fires once. The firing is
// a record in asynq's Redis, in the slot of its queue, as the scripts that end its tasks count them
// in the same transaction. One process at a time has the firing's lease. It enqueues the tasks and
// moves a cursor. If it dies, another one goes on from the cursor 15 seconds later.
//
// The tasks must belong to servers and policies of package worker.
package batch

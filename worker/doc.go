// Package worker puts the limits of package throttle in front of asynq's task handlers.
//
// A task that fits runs. Another task waits in its policy's line, and runs when it fits. A wait costs the task nothing:
// it is not archived, keeps its retries and its ID, and counts as neither processed nor failed.
//
// [NewServer] and [NewClient] replace asynq's constructors and set up everything.
//
// A handler gets its [Job] by [FromContext]: to settle the real cost of a call, to give back what
// it did not use, to reserve more, and to pause its policy.
//
// To follow a task through the code, read enqueue.go and commit.go, hook.go,
// internal/dispatch and attempt.go, middleware.go, handler.go, and denial.go.
package worker

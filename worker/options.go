package worker

import (
	"cmp"
	"time"

	"github.com/hibiken/asynq"
)

// An option is an asynq.Option of this package. It works in the calls of a Client. An asynq.Client ignores it.
// It has no effect among the options of a task, as asynq does not export a task's options.
type option func(*enqueueTask)

func (option) String() string         { return "an option of worker.Client" }
func (option) Type() asynq.OptionType { return -1 }
func (option) Value() any             { return nil }

// MaxWait is an option of the calls by which a Client enqueues. If the task may have to wait longer than d before it
// starts, it is refused with a *throttle.DeniedError, and not enqueued. 0 is no limit. If d is below 0 a task is refused
// unless it fits at once. While the limiter's Redis does not answer, nothing is refused. A task that a policy matches
// cannot have MaxWait with earliest_reset, ProcessAt, ProcessIn or Group.
func MaxWait(d time.Duration) asynq.Option {
	if d < 0 {
		d = 1 // ns: 0 is no limit, and below 0 Join would refuse even a task that fits now
	}
	return option(func(e *enqueueTask) { e.request.MaxWait = d })
}

// Backlog is an option like MaxWait, for the same tasks. It refuses a task if n tasks of the same tenant, class,
// attributes and queue are already in line. 0 is no limit.
func Backlog(n int) asynq.Option { return option(func(e *enqueueTask) { e.request.Backlog = n }) }

// ReportStart is an option of the calls by which a Client enqueues. It stores in *start when the task is expected to
// start, or with EnqueueBulk the last task of the list. It has no effect if start is nil.
func ReportStart(start *ExpectedStart) asynq.Option {
	return option(func(e *enqueueTask) { e.reportTo = cmp.Or(start, e.reportTo) })
}

// An ExpectedStart is the time at which an enqueued task is expected to start, by this machine's clock.
// The times of a task in line are true if nobody changes limits. It is zero if the limiter did not answer.
type ExpectedStart struct {
	// Joined reports whether the task is in line. Otherwise there is no Latest, and At is the task's ProcessAt, or now
	// if that is past. At that time the task joins its Group or a line, or runs as soon as a worker has a slot.
	Joined bool

	// At is the expected start: now if the task fits now. Where throttle.BySlots binds, it is an
	// estimate by the rate at which workers took tasks of the queue in the last minute.
	At time.Time

	// Latest is an upper bound of the start, unless tasks join ahead of this one, a limit is cut, or the upstream
	// pauses. It equals At if At is exact, and is zero where no bound is known.
	Latest time.Time

	// Binds names what delays the task for longest, as in throttle.LineDecision. It is empty if the task fits now.
	Binds string
}

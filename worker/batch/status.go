package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// ErrNoFiring says that there is no such firing, or not any more: it is kept for a month.
var ErrNoFiring = errors.New("batch: there is no such firing")

// A Firing is one run of a batch.
type Firing struct {
	Batch string    // its name
	Tick  time.Time // to the second
}

// A State is what becomes of a firing.
type State string

const (
	Waiting    State = "waiting"    // for a scheduler, or for the hours of the batch to begin
	Enqueuing  State = "enqueuing"  // its tasks are enqueued; some may run
	Running    State = "running"    // all are enqueued
	Pausing    State = "pausing"    // its tasks are taken out of their lines
	Paused     State = "paused"     // none of its tasks starts
	Cancelling State = "cancelling" // those that wait are deleted; those that run go on

	Done      State = "done"      // every task has ended
	Cancelled State = "cancelled" // every task has ended or was deleted
)

// A Status is how far a firing is. The sum of its tasks is Total.
type Status struct {
	Batch string    `json:"batch"`
	Queue string    `json:"queue"`
	State State     `json:"state"`
	Tick  time.Time `json:"tick"`

	// Total counts the tasks so far, and all from State Running on.
	Total     int `json:"total"`
	Waiting   int `json:"waiting"` // also those that are to be retried
	Running   int `json:"running"`
	Done      int `json:"done"`
	Failed    int `json:"failed"`    // archived, or deleted by others
	Refused   int `json:"refused"`   // not enqueued: Error says why
	Cancelled int `json:"cancelled"` // deleted by Cancel

	Begun time.Time `json:"begun,omitzero"`
	Ended time.Time `json:"ended,omitzero"`

	// Expected is when the last task was expected to start, by its place in line when it was enqueued.
	// It is zero before any was.
	Expected time.Time `json:"expected,omitzero"`

	Error string `json:"error,omitempty"` // the last one
}

// HasEnded reports whether no task of the firing waits or runs.
func (s Status) HasEnded() bool {
	return s.State == Done || s.State == Cancelled
}

// A record is a firing as Redis has it.
type record struct {
	phase, want, outcome      string
	held                      bool
	position, tenant, offset  int
	done, failed, refused     int
	cancelled                 int
	begun, finished, expected time.Time
	policies, err             string
}

// Phases of a firing.
const (
	phaseNew     = "new"     // nothing was enqueued
	phaseEnqueue = "enqueue" // position, tenant and offset are its cursor
	phaseDrain   = "drain"   // all tasks are enqueued
	phaseEnded   = "ended"
)

// What is wanted of a firing.
const (
	wantRun    = "run"
	wantPause  = "pause"
	wantCancel = "cancel"
)

func recordOf(fields map[string]string) record {
	number := func(name string) int {
		n, _ := strconv.Atoi(fields[name])
		return n
	}
	second := func(name string) time.Time {
		if n := number(name); n > 0 {
			return time.Unix(int64(n), 0)
		}
		return time.Time{}
	}
	return record{
		phase: fields["phase"], want: fields["want"], outcome: fields["outcome"], held: fields["held"] == "1",
		position: number("position"), tenant: number("tenant"), offset: number("offset"),
		done: number("done"), failed: number("failed"), refused: number("refused"), cancelled: number("cancelled"),
		begun: second("begun"), finished: second("finished"), expected: second("expected"),
		policies: fields["policies"], err: fields["error"],
	}
}

// ended returns how many tasks have ended in any way.
func (r record) ended() int { return r.done + r.failed + r.refused + r.cancelled }

func (r record) state() State {
	switch {
	case r.phase == phaseEnded:
		return State(r.outcome)
	case r.want == wantCancel:
		return Cancelling
	case r.held:
		return Paused
	case r.want == wantPause:
		return Pausing
	case r.phase == phaseEnqueue:
		return Enqueuing
	case r.phase == phaseDrain:
		return Running
	}
	return Waiting
}

func (r record) status(f asynqredis.Firing, running int) Status {
	s := Status{
		Batch: f.Batch, Queue: f.Queue, State: r.state(), Tick: f.Tick,
		Total: max(r.position, r.ended()), Running: running, Done: r.done, Failed: r.failed, Refused: r.refused, Cancelled: r.cancelled,
		Begun: r.begun, Ended: r.finished, Expected: r.expected, Error: r.err,
	}
	s.Waiting = max(0, s.Total-r.ended()-running)
	return s
}

// Status returns how far a firing is. It costs a few small reads, however many tasks there are.
func (s *Scheduler) Status(ctx context.Context, f Firing) (Status, error) {
	firing, err := s.firing(f)
	if err != nil {
		return Status{}, err
	}
	fields, err := s.redis.Fields(ctx, firing)
	if err != nil {
		return Status{}, fmt.Errorf("batch: %w", err)
	}
	if fields == nil {
		return Status{}, fmt.Errorf("%w: batch %q, tick %s", ErrNoFiring, f.Batch, f.Tick.UTC().Format(time.RFC3339))
	}
	r := recordOf(fields)
	running := 0
	if r.phase != phaseEnded {
		if running, err = s.redis.Running(ctx, firing); err != nil {
			return Status{}, fmt.Errorf("batch: %w", err)
		}
	}
	return r.status(firing, running), nil
}

// Firings returns the newest firings of a batch, at most n, the newest first.
func (s *Scheduler) Firings(ctx context.Context, batch string, n int) ([]Firing, error) {
	b, err := s.batch(batch)
	if err != nil {
		return nil, err
	}
	found, err := s.redis.Firings(ctx, b.Queue, b.Name, n)
	if err != nil {
		return nil, fmt.Errorf("batch: %w", err)
	}
	firings := make([]Firing, len(found))
	for i, f := range found {
		firings[i] = Firing{batch, f.Tick}
	}
	return firings, nil
}

// endedRetention is how long the task that tells the end of a firing keeps its ID, so that it is
// enqueued once.
const endedRetention = 24 * time.Hour

// tell enqueues the task that tells the end of the firing.
func (w *work) tell(ctx context.Context, s Status) error {
	payload, err := json.Marshal(s)
	if err != nil {
		return err
	}
	task := worker.NewTask(worker.Identity{Tenant: w.f.Batch}, w.b.Ended, payload)
	_, err = w.client.EnqueueContext(ctx, task, asynq.TaskID(w.f.IDs()+"ended"), asynq.Queue(w.f.Queue), asynq.Retention(endedRetention))
	if errors.Is(err, asynq.ErrTaskIDConflict) {
		return nil
	}
	return err
}

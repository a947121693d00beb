package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// ErrNoFiring is the error if there is no such firing that can do what was asked. Firings are kept for a month.
var ErrNoFiring = errors.New("batch: there is no such firing")

// A Firing is one run of a batch.
type Firing struct {
	Batch string    // its name
	Tick  time.Time // to the second
}

// A State is the phase of a firing, or its outcome.
type State string

const (
	StateWaiting    State = "waiting"    // for a scheduler, earlier firings (OverlapQueue), or the batch's hours
	StateEnqueuing  State = "enqueuing"  // its tasks are being enqueued; some may run
	StateRunning    State = "running"    // all have been enqueued
	StatePausing    State = "pausing"    // its waiting tasks are being taken out of their lines
	StatePaused     State = "paused"     // none of its tasks starts: after Pause, or outside of its hours
	StateStopped    State = "stopped"    // as StatePaused, by Batch.OnFailed
	StateCancelling State = "cancelling" // waiting tasks are deleted, and running ones go on

	StateRefused   State = "refused"   // nothing was enqueued, as it would be late: see Batch.Late
	StateDone      State = "done"      // every task has ended
	StateCancelled State = "cancelled" // every task has ended or was deleted
)

// A Status reports the progress of a firing. The counts from Waiting to Cancelled add up to Total.
type Status struct {
	Batch string    `json:"batch"`
	Queue string    `json:"queue"`
	State State     `json:"state"`
	Tick  time.Time `json:"tick"`

	// Total counts the tasks enqueued or rejected so far: all tasks from StateRunning on.
	Total     int `json:"total"`
	Waiting   int `json:"waiting"` // also tasks that are to be retried
	Running   int `json:"running"`
	Done      int `json:"done" redis:"done"`
	Failed    int `json:"failed" redis:"failed"`       // archived, or deleted by others
	Rejected  int `json:"rejected" redis:"rejected"`   // not enqueued: Reason says why
	Cancelled int `json:"cancelled" redis:"cancelled"` // deleted by Cancel

	Retried int `json:"retried" redis:"retried"` // how often Retry made a failed task wait again

	BegunAt time.Time `json:"begun_at,omitzero"`
	EndedAt time.Time `json:"ended_at,omitzero"`

	// Planned is the end of the last task as it was expected when the firing began. Finish is its end as expected now,
	// which a scheduler that runs keeps up to date. It is zero if unknown, for instance after Pause or Cancel.
	// Binds names what the last task waits for the longest: a window, or throttle.BySlots; empty if it waits for
	// nothing. Plan.Unknown lists what Planned and Finish do not count.
	Planned time.Time `json:"planned,omitzero" redis:"planned"`
	Finish  time.Time `json:"finish,omitzero" redis:"expected"`
	Binds   string    `json:"binds,omitempty" redis:"binds"`

	FinishBy time.Time `json:"finish_by,omitzero"`      // Batch.FinishBy
	Overdue  int       `json:"overdue" redis:"overdue"` // tasks that are expected to end after FinishBy

	// DelayedBy is the error that delays the firing now, if any. Reason is why the last task was rejected, or the
	// firing refused.
	DelayedBy    string    `json:"delayed_by,omitempty" redis:"delayed_by"`
	DelayedSince time.Time `json:"delayed_since,omitzero"`
	Reason       string    `json:"reason,omitempty" redis:"reason"`
}

// HasEnded reports whether the firing has ended.
func (s Status) HasEnded() bool {
	return s.State == StateDone || s.State == StateCancelled || s.State == StateRefused
}

// Behind returns how far the firing is behind its plan: negative if it is ahead, and 0 if that is unknown.
func (s Status) Behind() time.Duration {
	last := s.Finish
	if s.HasEnded() {
		last = s.EndedAt
	}
	if s.Planned.IsZero() || last.IsZero() {
		return 0
	}
	return last.Sub(s.Planned)
}

// A record is a firing as Redis has it. Only the fields of Status that have a redis tag are set.
type record struct {
	Status
	Phase    string `redis:"phase"`
	Want     string `redis:"want"`
	Outcome  State  `redis:"outcome"`
	SetAside bool   `redis:"set_aside"` // waiting tasks are set aside, or have no tickets (`resumed` in batch_want.lua)
	Closes   int64  `redis:"closes"`    // s: no task is picked from then until the next hours
	Index    int    `redis:"index"`
	Tenant   int    `redis:"tenant"`
	Offset   int    `redis:"offset"`
	Begun    int64  `redis:"begun"`    // s
	Finished int64  `redis:"finished"` // s; 0 if it has not ended
	Since    int64  `redis:"delayed_since"`
	Round    int    `redis:"round"`   // how often it was retried
	Size     int    `redis:"size"`    // how many tasks it has by its plan
	Stopped  int    `redis:"stopped"` // by Batch.OnFailed, since it was last retried: see neverStopped
	Took     int64  `redis:"took"`    // us: all done tasks together
}

// Values of record.Stopped. batch_want.lua writes 2 when a stopped firing is resumed: it may stop again after a retry.
const neverStopped, isStopped = 0, 1

const (
	phaseNew     = "new"     // nothing was enqueued
	phaseEnqueue = "enqueue" // index, tenant and offset are its cursor
	phaseDrain   = "drain"   // all tasks are enqueued
	phaseRetry   = "retry"   // all tasks are enqueued, and failed tasks are made to wait again
	phaseEnded   = "ended"
)

// What is wanted of a firing.
const (
	wantRun    = "run"
	wantPause  = "pause"
	wantCancel = "cancel"
	wantRetry  = "retry"
)

func recordOf(fields map[string]string) (r record, err error) {
	kept := redis.NewMapStringStringResult(fields, nil)
	err = errors.Join(kept.Scan(&r), kept.Scan(&r.Status))
	return r, err
}

// ended returns how many tasks have ended in any way.
func (r record) ended() int { return r.Done + r.Failed + r.Rejected + r.Cancelled }

// isHeld reports whether the firing is paused or cancelled: perhaps no scheduler forecasts it any more.
func (r record) isHeld() bool { return r.Want == wantPause || r.Want == wantCancel }

func (r record) state() State {
	switch {
	case r.Phase == phaseEnded:
		return r.Outcome
	case r.Want == wantCancel:
		return StateCancelling
	case r.Stopped == isStopped && r.Want == wantPause:
		return StateStopped
	case r.SetAside && r.Phase != phaseNew, r.Want == wantPause && r.Phase == phaseNew: // nothing is enqueued
		return StatePaused
	case r.Want == wantPause:
		return StatePausing
	case r.Phase == phaseEnqueue:
		return StateEnqueuing
	case r.Phase == phaseDrain, r.Phase == phaseRetry:
		return StateRunning
	}
	return StateWaiting
}

func (b *compiled) status(f asynqredis.Firing, r record, running int) Status {
	s := r.Status
	s.Batch, s.Queue, s.Tick, s.FinishBy = f.Batch, f.Queue, f.Tick, b.deadline(f.Tick)
	s.State, s.BegunAt = r.state(), time.Unix(r.Begun, 0).UTC()
	if r.Finished > 0 {
		s.EndedAt = time.Unix(r.Finished, 0).UTC()
	}
	if s.DelayedBy != "" {
		s.DelayedSince = time.Unix(r.Since, 0).UTC()
	}
	if r.isHeld() {
		s.Finish, s.Binds, s.Overdue = time.Time{}, "", 0
	}
	s.Total = max(r.Index, r.ended())
	if r.Phase == phaseEnqueue { // tasks may run that the cursor has not passed yet
		s.Total = max(s.Total, r.ended()+running)
	}
	s.Running = min(running, s.Total-r.ended()) // leaves out failed tasks that an operator runs again
	s.Waiting = s.Total - r.ended() - s.Running
	return s
}

// Status returns how far a firing is. It costs a few small reads, however many tasks there are.
func (s *Scheduler) Status(ctx context.Context, f Firing) (Status, error) {
	b, firing, r, err := s.record(ctx, f)
	if err != nil {
		return Status{}, err
	}
	var running []int
	if r.Phase != phaseEnded {
		if running, err = s.redis.Running(ctx, firing); err != nil {
			return Status{}, fmt.Errorf("batch: %w", err)
		}
	}
	return b.status(firing, r, len(running)), nil
}

// A TenantStatus reports the progress of one tenant's tasks in a firing. Its fields are as those of Status.
type TenantStatus struct {
	Tenant string `json:"tenant"`

	Total     int `json:"total"`
	Waiting   int `json:"waiting"`
	Running   int `json:"running"`
	Done      int `json:"done"`
	Failed    int `json:"failed"`
	Rejected  int `json:"rejected"`
	Cancelled int `json:"cancelled"`

	Planned time.Time `json:"planned,omitzero"`
	Finish  time.Time `json:"finish,omitzero"`
}

// Tenants returns how far the tenants of a firing are, in their order: none before the firing is planned.
// It reads some 150 bytes a tenant, one or two a task, and which tasks of the queue run.
func (s *Scheduler) Tenants(ctx context.Context, f Firing) ([]TenantStatus, error) {
	_, firing, r, err := s.record(ctx, f)
	if err != nil {
		return nil, err
	}
	p, err := s.readPlan(ctx, firing)
	if err != nil {
		return nil, fmt.Errorf("batch: %w", err)
	}
	all, err := s.counts(ctx, firing, r, p)
	if err != nil {
		return nil, fmt.Errorf("batch: %w", err)
	}
	data, err := s.redis.Kept(ctx, firing, keptExpected)
	var expected []time.Time
	if err == nil && data != "" {
		err = json.Unmarshal([]byte(data), &expected)
	}
	if err != nil {
		return nil, fmt.Errorf("batch: %w", err)
	}
	for i := range all {
		switch t := &all[i]; {
		case t.Waiting == 0 || r.isHeld(): // as in status
		case data == "" && !r.Finish.IsZero(): // nobody has looked yet
			t.Finish = t.Planned
		case i < len(expected):
			t.Finish = expected[i]
		}
	}
	return all, nil
}

func (s *Scheduler) record(ctx context.Context, f Firing) (*compiled, asynqredis.Firing, record, error) {
	firing, err := s.firing(f)
	if err != nil {
		return nil, firing, record{}, err
	}
	fields, err := s.redis.Fields(ctx, firing)
	switch {
	case err != nil:
		return nil, firing, record{}, fmt.Errorf("batch: %w", err)
	case len(fields) == 0:
		tick := f.Tick.UTC().Format(time.RFC3339)
		return nil, firing, record{}, fmt.Errorf("%w: batch %q, tick %s", ErrNoFiring, f.Batch, tick)
	}
	r, err := recordOf(fields)
	return s.batches[f.Batch], firing, r, err
}

// Firings returns the newest firings of a batch, at most n, the newest first: none if n is below 1.
func (s *Scheduler) Firings(ctx context.Context, batch string, n int) ([]Firing, error) {
	b, err := s.batch(batch)
	if err != nil {
		return nil, err
	}
	if n < 1 {
		return nil, nil
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

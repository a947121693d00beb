package drain

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
)

// ErrForeignTask says that the queue holds tasks of somebody else.
var ErrForeignTask = errors.New("a task is not ours")

// reconcile looks through the queue: it takes the results of jobs that ended without a line,
// removes tasks that wait but must not run, and returns which jobs have no task and which tasks
// are active.
func (d *Drain) reconcile() (missing []*jobs.Job, active []string, err error) {
	tasks, err := d.listTasks()
	if err != nil {
		return nil, nil, err
	}
	removed, again := 0, 0
	for id, info := range tasks {
		job := d.jobs[id]
		waits := info.State == asynq.TaskStatePending ||
			info.State == asynq.TaskStateScheduled || info.State == asynq.TaskStateRetry
		var known record
		if len(info.Result) > 0 {
			if err := json.Unmarshal(info.Result, &known); err != nil {
				return nil, nil, fmt.Errorf("%w: queue %q, task %q: %w: use another --queue",
					ErrForeignTask, d.Queue, id, err)
			}
		}
		if info.State == asynq.TaskStateActive {
			active = append(active, id)
		}
		if job != nil && d.RetryFailed && hasFailed(info, known) {
			if err := d.remove(tasks, id); err != nil {
				return nil, nil, err
			}
			again++
			continue
		}
		if job != nil {
			if err := d.recall(info, known); err != nil {
				return nil, nil, err
			}
		}
		_, done := d.Results.Get(id)
		if waits && (job == nil || done || !sameJob(info.Payload, job)) {
			if err := d.remove(tasks, id); err != nil {
				return nil, nil, err
			}
			if !done {
				removed++
			}
		}
	}
	if again > 0 {
		d.Progress.Say("%d failed jobs run again", again)
	}
	if removed > 0 {
		d.Progress.Say("removed %d jobs of an earlier run from queue %q: "+
			"the jobs do not hold them any more, or hold them changed", removed, d.Queue)
	}
	for i := range d.Jobs {
		job := &d.Jobs[i]
		if _, done := d.Results.Get(job.ID); !done && tasks[job.ID] == nil {
			missing = append(missing, job)
		}
	}
	return missing, active, nil
}

func (d *Drain) remove(tasks map[string]*asynq.TaskInfo, id string) error {
	if err := d.inspector.DeleteTask(d.Queue, id); err != nil && !errors.Is(err, asynq.ErrTaskNotFound) {
		return fmt.Errorf("queue %q: removing task %q: %w", d.Queue, id, err)
	}
	delete(tasks, id)
	return nil
}

// recall takes over what a task says of its job.
func (d *Drain) recall(info *asynq.TaskInfo, known record) error {
	if known.Done || info.State == asynq.TaskStateCompleted {
		known.ID = info.ID
		return d.write(known.Result)
	}
	d.mu.Lock()
	r := d.open[info.ID]
	if r != nil && known.Attempts > r.Attempts {
		known.Wakes = max(known.Wakes, r.Wakes)
		*r = known.Result
	}
	d.mu.Unlock()
	if r == nil || info.State != asynq.TaskStateArchived {
		return nil
	}
	// A worker died with it on its last try. If no call was begun, nothing was tried.
	if known.Attempts == 0 {
		if err := d.inspector.RunTask(d.Queue, info.ID); err != nil {
			return fmt.Errorf("queue %q: running task %q again: %w", d.Queue, info.ID, err)
		}
		return nil
	}
	known.Error = fmt.Sprintf("%s, and no retry is left: the call may have been made", info.LastErr)
	return d.write(known.Result)
}

// hasFailed reports whether the task's job has ended, and not well.
func hasFailed(info *asynq.TaskInfo, known record) bool {
	if info.State == asynq.TaskStateActive {
		return false
	}
	return known.Done && known.Error != "" || info.State == asynq.TaskStateArchived && known.Attempts > 0
}

func sameJob(data []byte, job *jobs.Job) bool {
	var p payload
	if json.Unmarshal(data, &p) != nil {
		return false
	}
	a, errA := json.Marshal(p.Job)
	b, errB := json.Marshal(job)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

// listTasks returns all tasks of the queue, by ID. It may miss one that moves meanwhile: asynq
// refuses to take it a second time.
func (d *Drain) listTasks() (map[string]*asynq.TaskInfo, error) {
	const page = 1000
	tasks := map[string]*asynq.TaskInfo{}
	for _, list := range []func(string, ...asynq.ListOption) ([]*asynq.TaskInfo, error){
		d.inspector.ListPendingTasks, d.inspector.ListActiveTasks, d.inspector.ListScheduledTasks,
		d.inspector.ListRetryTasks, d.inspector.ListArchivedTasks, d.inspector.ListCompletedTasks,
	} {
		for n := 1; ; n++ {
			infos, err := list(d.Queue, asynq.PageSize(page), asynq.Page(n))
			if errors.Is(err, asynq.ErrQueueNotFound) {
				return tasks, nil
			}
			if err != nil {
				return nil, fmt.Errorf("queue %q: %w", d.Queue, err)
			}
			for _, info := range infos {
				tasks[info.ID] = info
			}
			if len(infos) < page {
				break
			}
		}
	}
	return tasks, nil
}

// expireLeases ends the leases of tasks whose worker is known to be gone, so that asynq's
// recoverer takes them back when the server starts, and not a minute or two later. There is no
// call for this in asynq: the key is that of its internal/base.LeaseKey.
func (d *Drain) expireLeases(ctx context.Context, active []string) error {
	if len(active) == 0 {
		return nil
	}
	expired := make([]redis.Z, len(active))
	for i, id := range active {
		expired[i].Member = id
	}
	return d.Client.ZAddXX(ctx, "asynq:{"+d.Queue+"}:lease", expired...).Err()
}

package drain

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/worker"
)

// enqueueMost is the number of jobs that are enqueued at once.
const enqueueMost = 500

// ErrForeignTask says that the queue holds tasks of somebody else.
var ErrForeignTask = errors.New("a task is not ours")

// enqueue enqueues jobs, which take their places in line at once. Some may be in the queue already,
// from an earlier run.
func (d *Drain) enqueue(ctx context.Context, client *worker.Client, list []*jobs.Job) error {
	var again []*jobs.Job
	for part := range slices.Chunk(list, enqueueMost) {
		tasks := make([]*asynq.Task, len(part))
		for i, job := range part {
			body, err := json.Marshal(payload{*job, time.Now()})
			if err != nil {
				return err
			}
			tasks[i] = worker.NewTask(worker.Identity{Cost: job.Cost, Tenant: job.Tenant}, job.Type, body,
				asynq.MaxRetry(job.MaxRetry), asynq.Queue(d.Queue), asynq.TaskID(job.ID))
		}
		for i, result := range client.EnqueueBulk(ctx, tasks) {
			if ctx.Err() != nil {
				return nil // its caller ended it
			}
			err, removed := result.Err, false
			if errors.Is(err, asynq.ErrTaskIDConflict) {
				removed, err = d.meet(part[i])
			}
			if err != nil {
				return fmt.Errorf("%s: enqueueing job %q: %w", part[i].At, part[i].ID, err)
			}
			if removed {
				again = append(again, part[i])
			}
		}
	}
	if len(again) > 0 {
		return d.enqueue(ctx, client, again)
	}
	return nil
}

// meet looks at a task that is in the queue already. It removes one that must not stay, and reports
// whether it did. The job of one that asynq has given up has failed.
func (d *Drain) meet(job *jobs.Job) (removed bool, err error) {
	info, err := d.inspector.GetTaskInfo(d.Queue, job.ID)
	if errors.Is(err, asynq.ErrTaskNotFound) {
		return false, nil // it has ended since
	}
	if err != nil {
		return false, err
	}
	var p payload
	if err := json.Unmarshal(info.Payload, &p); err != nil || p.ID != job.ID {
		return false, fmt.Errorf("%w: queue %q: use another --queue", ErrForeignTask, d.Queue)
	}
	before, _ := json.Marshal(p.Job)
	now, _ := json.Marshal(job)
	d.mu.Lock()
	again := d.again[job.ID]
	delete(d.again, job.ID)
	result := d.open[job.ID]
	d.mu.Unlock()
	switch {
	case info.State == asynq.TaskStateActive:
		return false, nil
	case again || !bytes.Equal(before, now): // it runs anew, or the file says something else by now
		return true, d.inspector.DeleteTask(d.Queue, job.ID)
	case info.State == asynq.TaskStateArchived && result != nil: // a worker died with it on its last try
		failed := *result
		failed.Error = fmt.Sprintf("%s, and no retry is left: the call may have been made", info.LastErr)
		return false, d.write(failed)
	}
	return false, nil
}

// stranded returns the jobs whose worker is known to be gone, and ends the leases of their tasks, so
// that asynq's recoverer takes them back when the server starts, and not a minute or two later. There
// is no call for this in asynq: the key is that of its internal/base.LeaseKey.
func (d *Drain) stranded(ctx context.Context) ([]*jobs.Job, error) {
	infos, err := d.inspector.ListActiveTasks(d.Queue, asynq.PageSize(10_000))
	if errors.Is(err, asynq.ErrQueueNotFound) || err == nil && len(infos) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("queue %q: %w", d.Queue, err)
	}
	var list []*jobs.Job
	expired := make([]redis.Z, len(infos))
	for i, info := range infos {
		expired[i].Member = info.ID
		if job := d.jobs[info.ID]; job != nil && d.open[job.ID] != nil {
			list = append(list, job)
		}
	}
	return list, d.Client.ZAddXX(ctx, "asynq:{"+d.Queue+"}:lease", expired...).Err()
}

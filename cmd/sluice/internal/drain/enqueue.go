package drain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/worker"
)

// enqueueMost is how many jobs are enqueued at once.
const enqueueMost = 500

// enqueue enqueues jobs, which take their places in line at once.
func (d *Drain) enqueue(ctx context.Context, client *worker.Client, list []*jobs.Job) error {
	for batch := range slices.Chunk(list, enqueueMost) {
		tasks := make([]*asynq.Task, len(batch))
		for i, job := range batch {
			var err error
			if tasks[i], err = d.task(job); err != nil {
				return err
			}
		}
		for i, result := range client.EnqueueBatch(ctx, tasks) {
			if ctx.Err() != nil {
				return nil // its caller ended it
			}
			if err := enqueued(batch[i], result.Err); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *Drain) task(job *jobs.Job) (*asynq.Task, error) {
	body, err := json.Marshal(payload{*job, time.Now()})
	if err != nil {
		return nil, err
	}
	return worker.NewTask(worker.Identity{Cost: job.Cost, Tenant: job.Tenant}, job.Type, body,
		asynq.MaxRetry(job.MaxRetry), asynq.Queue(d.Queue), asynq.Retention(retention), asynq.TaskID(job.ID)), nil
}

// enqueued takes a job for enqueued that is there already.
func enqueued(job *jobs.Job, err error) error {
	if err == nil || errors.Is(err, asynq.ErrTaskIDConflict) {
		return nil
	}
	return fmt.Errorf("%s: enqueueing job %q: %w", job.At, job.ID, err)
}

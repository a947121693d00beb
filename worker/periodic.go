package worker

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/hibiken/asynq"
)

// PeriodicTask returns the config of a task for an asynq.PeriodicTaskManager. The manager takes two
// configs for one if they differ in nothing but the headers of their tasks, such as in the tenant of
// NewTask. This config has an option that tells the headers apart, which the clients ignore.
//
// The manager enqueues as a plain client: a task joins the line when a worker has denied it. So
// MaxWait, Backlog, Class and ReportStart are errors here.
func PeriodicTask(cronspec string, task *asynq.Task, opts ...asynq.Option) (*asynq.PeriodicTaskConfig, error) {
	if task == nil {
		return nil, errors.New("worker: PeriodicTask: task is nil: must be what NewTask returns")
	}
	for _, o := range ours(opts) {
		return nil, fmt.Errorf("worker: PeriodicTask: task type %q: option %v needs a worker.Client, "+
			"and asynq's manager is none: leave it out, and set the class in NewTask's Identity", task.Type(), o)
	}
	headers := task.Headers()
	digest := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		fmt.Fprintf(digest, "%q=%q\n", name, headers[name])
	}
	mark := &option{"Headers", hex.EncodeToString(digest.Sum(nil)[:8])}
	return &asynq.PeriodicTaskConfig{Cronspec: cronspec, Task: task, Opts: append(slices.Clone(opts), mark)}, nil
}

package batch

import (
	"context"
	"time"

	"github.com/hibiken/asynq"
)

// A Duration is the average run time of a task.
type Duration struct {
	Seconds float64 `json:"seconds"` // 0 if it is unknown
	From    Source  `json:"from,omitempty"`
}

// Source names where a Duration comes from.
type Source string

const (
	SourceMeasured Source = "measured"    // by the newest firings of the batch
	SourceGiven    Source = "given"       // Batch.Duration
	SourceTimeout  Source = "its timeout" // asynq.Timeout among Batch.Options: a task takes no longer
)

func (d Duration) span() time.Duration { return time.Duration(d.Seconds * float64(time.Second)) }

// measuredTasks is the number of done tasks from which on a firing goes by its own durations.
const measuredTasks = 10

// duration returns how long a task of the batch takes: by its newest five firings, or else as its Batch says.
func (s *Scheduler) duration(ctx context.Context, b *compiled) (Duration, error) {
	firings, err := s.redis.Firings(ctx, b.Queue, b.Name, 5)
	if err != nil {
		return Duration{}, err
	}
	var measured record
	for _, f := range firings {
		fields, err := s.redis.Fields(ctx, f)
		if err != nil {
			return Duration{}, err
		}
		if r, err := recordOf(fields); err == nil {
			measured.Took += r.Took
			measured.Done += r.Done
		}
	}
	if d := measured.duration(); d.Seconds > 0 {
		return d, nil
	}
	if b.Duration > 0 {
		return Duration{b.Duration.Seconds(), SourceGiven}, nil
	}
	for _, o := range b.Options {
		if timeout, ok := o.Value().(time.Duration); ok && o.Type() == asynq.TimeoutOpt && timeout > 0 {
			return Duration{timeout.Seconds(), SourceTimeout}, nil
		}
	}
	return Duration{}, nil
}

// duration returns how long the firing's done tasks took on average, 0 if none is done.
func (r record) duration() Duration {
	return Duration{float64(r.Took) / 1e6 / float64(max(1, r.Done)), SourceMeasured}
}

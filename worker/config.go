package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// Config configures how tasks are throttled. Its functions may be called at every attempt of a
// task, by many goroutines at once.
type Config struct {
	// Identify returns the task's identity. Its class is always that of the task's header. The default is
	// IdentityOf: what NewTask was given.
	Identify func(*asynq.Task) (Identity, error)

	// Limiter decides. Its policies name the task types that they match. It is required.
	Limiter *throttle.Limiter

	// Logger gets outages of the limiter, task types that no policy matches, and mistakes in the setup.
	// The default is slog.Default(). Pauses and changed rates are for throttle.Config.Logger.
	Logger *slog.Logger

	// OnDecision, if not nil, is called with every decision about a task before it takes effect. For
	// metrics of all that a limiter does, see throttle.Observer.
	OnDecision func(ctx context.Context, t *asynq.Task, d throttle.Decision)

	// Unmatched selects what happens to a task whose type no policy matches. The default is
	// UnmatchedRun. The first task of each such type is logged, and all are counted.
	Unmatched Unmatched
}

// Unmatched selects what happens to a task whose type no policy matches.
type Unmatched string

const (
	UnmatchedRun    Unmatched = "run"    // it runs unthrottled
	UnmatchedReject Unmatched = "reject" // it fails by an *UnmatchedError
)

// withDefaults returns the config with its defaults, or an error that names the field that cannot
// be used.
func (c Config) withDefaults() (Config, error) {
	if c.Limiter == nil {
		return c, errors.New("worker: Config.Limiter is nil: must be what throttle.New returns")
	}
	if c.Unmatched == "" {
		c.Unmatched = UnmatchedRun
	}
	if c.Unmatched != UnmatchedRun && c.Unmatched != UnmatchedReject {
		return c, fmt.Errorf("worker: Config.Unmatched %q: must be %q or %q",
			string(c.Unmatched), string(UnmatchedRun), string(UnmatchedReject))
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}

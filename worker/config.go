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
	// Attributes returns the attributes by which windows of other scopes than the tenant count the
	// task. The default is what NewTask was given.
	Attributes func(*asynq.Task) map[string]string

	// Cost returns what the task costs, per unit. The default is what NewTask was given, else 1
	// throttle.Requests.
	Cost func(*asynq.Task) map[string]int64

	// Limiter decides. Its policies name the task types that they match. It is required.
	Limiter *throttle.Limiter

	// Logger gets outages of the limiter, task types that no policy matches, and mistakes in the setup.
	// The default is slog.Default(). Pauses and changed rates are for throttle.Config.Logger.
	Logger *slog.Logger

	// OnDecision, if not nil, is called with every decision about a task before it takes effect. For
	// metrics of all that a limiter does, see throttle.Observer.
	OnDecision func(ctx context.Context, t *asynq.Task, d throttle.Decision)

	// Tenant returns the task's tenant. The default is what NewTask was given. A function can look
	// there first by IdentityOf.
	Tenant func(*asynq.Task) string

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

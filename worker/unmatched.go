package worker

import (
	"log/slog"
	"sync"
	"sync/atomic"
)

// maxUnmatchedTypes bounds how many task types are logged, and remembered for it.
const maxUnmatchedTypes = 100

// unmatched counts the attempts of tasks whose type no policy matches, and logs each type once.
type unmatched struct {
	logger   *slog.Logger
	rejected bool // such tasks fail
	count    atomic.Int64

	mu    sync.Mutex
	types map[string]bool
}

func (u *unmatched) attempt(taskType string) {
	u.count.Add(1)
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.types[taskType] || len(u.types) > maxUnmatchedTypes {
		return
	}
	u.types[taskType] = true
	switch {
	case len(u.types) > maxUnmatchedTypes:
		u.logger.Warn("worker: no policy matches many task types: no more of them are logged",
			"logged", maxUnmatchedTypes)
	case u.rejected:
		u.logger.Warn("worker: no policy matches a task type: its tasks fail", "type", taskType)
	default:
		u.logger.Warn("worker: no policy matches a task type: its tasks run unthrottled", "type", taskType)
	}
}

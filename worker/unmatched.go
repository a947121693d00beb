package worker

import (
	"sync"
	"sync/atomic"
)

// maxUnmatchedTypes bounds how many task types are logged, and remembered for it.
const maxUnmatchedTypes = 100

// unmatched counts the attempts of tasks whose type no policy matches, and remembers the types.
type unmatched struct {
	count atomic.Int64

	mu    sync.Mutex
	types map[string]bool
}

// UnmatchedCount returns how many attempts of tasks there were whose type no policy matches. If it
// is not 0, a task type may be misspelt, or a policy's Match.
func (s *Server) UnmatchedCount() int64 { return s.unmatched.count.Load() }

// noteUnmatched counts an attempt, and logs each type once.
func (s *Server) noteUnmatched(taskType string) {
	u := &s.unmatched
	u.count.Add(1)
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.types[taskType] || len(u.types) == maxUnmatchedTypes {
		return
	}
	u.types[taskType] = true
	fate := "its tasks run unthrottled"
	if s.config.Unmatched == UnmatchedReject {
		fate = "its tasks fail"
	}
	s.config.Logger.Warn("worker: no policy matches a task type: "+fate, "type", taskType)
	if len(u.types) == maxUnmatchedTypes {
		s.config.Logger.Warn("worker: no policy matches many task types: no more of them are logged")
	}
}

package worker

import (
	"sync"
	"sync/atomic"

	"github.com/sluice-go/sluice/throttle"
)

// maxTypesLogged bounds how many task types are logged, and remembered for it.
const maxTypesLogged = 100

// uncounted remembers the types of tasks that no policy counts.
type uncounted struct {
	unmatched atomic.Int64 // attempts

	mu    sync.Mutex
	types map[string]bool
}

// UnmatchedCount returns how many attempts of tasks there were whose type no policy matches. If it
// is not 0, a task type may be misspelt, or a policy's Match.
func (s *Server) UnmatchedCount() int64 { return s.uncounted.unmatched.Load() }

// noteUnmatched counts an attempt, and logs each type once.
func (s *Server) noteUnmatched(taskType string) {
	s.uncounted.unmatched.Add(1)
	fate := "its tasks run unthrottled"
	if s.config.Unmatched == UnmatchedReject {
		fate = "its tasks fail"
	}
	s.warnOnce("worker: no policy matches a task type: "+fate, "type", taskType)
}

// noteUnobserved logs, once for each type, why a policy that only observes cannot count a task.
func (s *Server) noteUnobserved(policy throttle.Policy, taskType string, err error) {
	s.warnOnce("worker: a policy observes, and cannot count a task: it runs, and would fail if the policy were enforced",
		"type", taskType, "policy", policy.Name, "err", err)
}

// warnOnce logs a task type, the second of the arguments, unless it was logged.
func (s *Server) warnOnce(message string, args ...any) {
	u, taskType := &s.uncounted, args[1].(string)
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.types[taskType] || len(u.types) == maxTypesLogged {
		return
	}
	u.types[taskType] = true
	s.config.Logger.Warn(message, args...)
	if len(u.types) == maxTypesLogged {
		s.config.Logger.Warn("worker: no policy counts the tasks of many types: no more of them are logged")
	}
}

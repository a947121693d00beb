package sitetest

import (
	"context"
	"maps"
	"sync"
	"testing"

	"github.com/hibiken/asynq"
)

// Counted is a handler that counts the runs of every task.
type Counted struct {
	mu   sync.Mutex
	runs map[string]int
}

// Handle is a handler.
func (c *Counted) Handle(ctx context.Context, _ *asynq.Task) error {
	id, _ := asynq.GetTaskID(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.runs == nil {
		c.runs = map[string]int{}
	}
	c.runs[id]++
	return nil
}

// Done returns how many tasks have run.
func (c *Counted) Done() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.runs)
}

// OnceEach fails unless n tasks ran, each once.
func (c *Counted) OnceEach(t testing.TB, n int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	most := 0
	for times := range maps.Values(c.runs) {
		most = max(most, times)
	}
	if len(c.runs) != n || most != 1 {
		t.Errorf("%d tasks ran, want %d, each once: %v", len(c.runs), n, c.runs)
	}
}

// Again counts the runs beyond the first of each task.
func (c *Counted) Again() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, runs := range c.runs {
		n += runs - 1
	}
	return n
}

package sitetest

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// A Journal keeps what is logged.
type Journal struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write is that of an io.Writer.
func (j *Journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// String returns what was logged.
func (j *Journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// Count returns how often a text was logged.
func (j *Journal) Count(text string) int { return strings.Count(j.String(), text) }

// AsynqLog writes asynq's own log to a journal.
type AsynqLog struct{ *Journal }

func (l AsynqLog) Debug(args ...any) { fmt.Fprintln(l, args...) }
func (l AsynqLog) Info(args ...any)  { fmt.Fprintln(l, args...) }
func (l AsynqLog) Warn(args ...any)  { fmt.Fprintln(l, args...) }
func (l AsynqLog) Error(args ...any) { fmt.Fprintln(l, args...) }
func (l AsynqLog) Fatal(args ...any) { fmt.Fprintln(l, args...) }

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

// AtOnce is a policy over every task type that bounds how many of a tenant run at once.
func AtOnce(limit int64) throttle.Policy {
	return throttle.Policy{
		Name: "api", Match: []string{"*"},
		Windows: []throttle.Window{{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: limit}},
	}
}

// AtOnceOf is such a policy of another name, by which no task type is matched.
func AtOnceOf(name string, limit int64) throttle.Policy {
	p := AtOnce(limit)
	p.Name, p.Match = name, nil
	return p
}

// StoppedAfter is when work is stopped whose lease is never renewed: a tenth before its end.
func StoppedAfter(lease time.Duration) time.Duration { return lease - lease/10 }

// A Gauge knows how many run at once.
type Gauge struct{ now, Most atomic.Int64 }

// Handler counts how many of its calls run at once.
func (g *Gauge) Handler(work func(context.Context, *asynq.Task) error) asynq.HandlerFunc {
	return func(ctx context.Context, t *asynq.Task) error {
		n := g.now.Add(1)
		defer g.now.Add(-1)
		for {
			most := g.Most.Load()
			if n <= most || g.Most.CompareAndSwap(most, n) {
				break
			}
		}
		return work(ctx, t)
	}
}

package sitetest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// Logs keep what is logged.
type Logs struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write is that of an io.Writer.
func (l *Logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns what was logged.
func (l *Logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Count returns how often a text was logged.
func (l *Logs) Count(text string) int { return strings.Count(l.String(), text) }

// AsynqLog writes asynq's own log to Logs.
type AsynqLog struct{ *Logs }

func (l AsynqLog) Debug(args ...any) { fmt.Fprintln(l, args...) }
func (l AsynqLog) Info(args ...any)  { fmt.Fprintln(l, args...) }
func (l AsynqLog) Warn(args ...any)  { fmt.Fprintln(l, args...) }
func (l AsynqLog) Error(args ...any) { fmt.Fprintln(l, args...) }
func (l AsynqLog) Fatal(args ...any) { fmt.Fprintln(l, args...) }

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

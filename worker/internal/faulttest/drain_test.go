package faulttest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A drain is two servers that work through the lines of several policies, while a primary of their
// Redis is replaced.
type drain struct {
	testing.TB
	asynq  asynq.RedisConnOpt
	limits func() redis.UniversalClient // a new client of the limiters' Redis
	queues []string
	each   int // tasks of each policy

	policies []throttle.Policy // task types are NAME:x
	tenants  int

	ran       sitetest.Counted
	ledgers   map[string]*sitetest.Ledger
	inspector *asynq.Inspector
}

const (
	drainSlots  = 8 // of each of two servers
	drainLimit  = 20
	drainPeriod = 500 * time.Millisecond
)

// long reports whether drains are of 2,000 tasks, and those are run that take long. It is asked for
// by the environment variable SLUICE_LONG.
func long() bool { return os.Getenv("SLUICE_LONG") != "" }

// drained returns policies to drain, with a window that their three tenants share.
func drained(names ...string) (policies []throttle.Policy) {
	for _, name := range names {
		policies = append(policies, throttle.Policy{
			Name: name, Match: []string{name + ":*"},
			Windows: []throttle.Window{
				{Name: "each", Limit: 1000, Period: drainPeriod},
				{Name: "all", Limit: drainLimit, Period: drainPeriod, Scope: throttle.ScopeShared},
			},
		})
	}
	return policies
}

// start enqueues all tasks, and starts the servers.
func (d *drain) start() {
	d.Helper()
	if long() {
		d.each = 2000 / len(d.policies)
	}
	d.ledgers = map[string]*sitetest.Ledger{}
	for _, p := range d.policies {
		d.ledgers[p.Name] = sitetest.NewLedger()
	}
	d.inspector = asynq.NewInspector(d.asynq)
	d.Cleanup(func() { d.inspector.Close() })
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	for i := range 2 {
		connection := d.limits()
		d.Cleanup(func() { connection.Close() })
		limiter, err := throttle.New(throttle.Config{Client: connection, Policies: d.policies})
		sitetest.Must(d, err)
		if i == 0 {
			d.enqueue(limiter)
		}
		queues := map[string]int{}
		for _, queue := range d.queues {
			queues[queue] = 1
		}
		server, err := worker.NewServer(d.asynq,
			asynq.Config{Concurrency: drainSlots, LogLevel: asynq.FatalLevel, Queues: queues, ShutdownTimeout: time.Second},
			worker.Config{Limiter: limiter, Logger: quiet, OnDecision: d.note})
		sitetest.Must(d, err)
		d.Cleanup(server.Shutdown)
		sitetest.Must(d, server.Start(asynq.HandlerFunc(d.ran.Handle)))
	}
}

func (d *drain) enqueue(limiter *throttle.Limiter) {
	d.Helper()
	client, err := worker.NewClient(d.asynq, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute})
	sitetest.Must(d, err)
	defer client.Close()
	var wait sync.WaitGroup
	for i := range d.each {
		for j, p := range d.policies {
			wait.Go(func() {
				task := worker.NewTask(worker.Identity{Tenant: fmt.Sprint("tenant", i%d.tenants)}, p.Name+":x", nil)
				_, err := client.EnqueueContext(d.Context(), task, asynq.MaxRetry(3),
					asynq.TaskID(fmt.Sprint(p.Name, "-", i)), asynq.Queue(d.queues[(i+j)%len(d.queues)]))
				if err != nil {
					d.Error(err)
				}
			})
		}
	}
	wait.Wait()
}

func (d *drain) note(ctx context.Context, task *asynq.Task, decision throttle.Decision) {
	var c worker.Config
	d.ledgers[decision.Policy].Watch(nil, &c)
	c.OnDecision(ctx, task, decision)
}

// until waits until the condition holds: long, as machines are slow.
func (d *drain) until(what string, condition func() bool) {
	d.Helper()
	for end := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			d.Fatalf("waited in vain until %s: %d of %d tasks have run", what, d.ran.Done(), d.tasks())
		}
	}
}

// part waits until this part of the tasks has run.
func (d *drain) part(part float64) {
	d.Helper()
	d.until("a part has run", func() bool { return float64(d.ran.Done()) >= part*float64(d.tasks()) })
}

func (d *drain) tasks() int { return d.each * len(d.policies) }

// finish waits until all tasks have run. Nothing is lost, archived or failed. A task runs twice only
// if the new primary did not learn that it had begun: at most that many.
func (d *drain) finish(promoted time.Time, twice int) {
	d.Helper()
	n := d.tasks()
	d.until("all have run", func() bool { return d.ran.Done() == n })
	again := d.ran.Again()
	d.Logf("%d tasks have run, %d of them twice", n, again)
	if again > twice {
		d.Errorf("%d tasks ran twice, want at most %d", again, twice)
	}
	for _, p := range d.policies {
		l, first := d.ledgers[p.Name], time.Duration(-1)
		for _, g := range l.Sorted() {
			if since := g.At.Sub(promoted); since > 0 && first < 0 {
				first = since
			}
		}
		w := p.Windows[len(p.Windows)-1]
		over := l.Excess(int(w.Limit), w.Period)
		d.Logf("policy %s: first grant %v after the promotion, %d above the limit", p.Name, first.Round(time.Millisecond), over)
		if w.Scope == throttle.ScopeShared && over > drainLimit {
			d.Errorf("policy %s: %d above its limit: a failover can forget one window", p.Name, over)
		}
	}
	for _, queue := range d.queues {
		info, err := d.inspector.GetQueueInfo(queue)
		sitetest.Must(d, err)
		d.Logf("queue %s: %d left active, %d failed, %d archived", queue, info.Active, info.FailedTotal, info.Archived)
		if info.Archived+info.FailedTotal > 0 {
			d.Errorf("queue %s: %d archived, %d failed", queue, info.Archived, info.FailedTotal)
		}
	}
}

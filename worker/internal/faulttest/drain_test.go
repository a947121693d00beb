package faulttest

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// An outageRun is two servers that work through the lines of several policies, while a primary of their Redis is replaced.
type outageRun struct {
	testing.TB
	asynq  asynq.RedisConnOpt
	limits func() redis.UniversalClient // a new client of the limiters' Redis
	queues []string
	each   int // tasks of each policy

	policies []throttle.Policy // task types are NAME:x
	tenants  int

	ledger    sitetest.Ledger
	inspector *asynq.Inspector
}

const (
	drainSlots  = 8 // of each of two servers
	drainLimit  = 20
	drainPeriod = 500 * time.Millisecond
)

// long reports whether SLUICE_LONG is set: then drains are of 2,000 tasks, and tests that take long run.
func long() bool { return os.Getenv("SLUICE_LONG") != "" }

// drained returns policies to drain, with a window that all tenants share.
func drained(names ...string) (policies []throttle.Policy) {
	for _, name := range names {
		policies = append(policies, throttle.Policy{
			Name: name, Match: []string{name + ":*"},
			Windows: []throttle.Window{
				{Name: "each", Limit: 1000, Period: drainPeriod},
				{Name: "all", Limit: drainLimit, Period: drainPeriod, Shared: true},
			},
		})
	}
	return policies
}

// start enqueues all tasks, and starts the servers.
func (d *outageRun) start() {
	d.Helper()
	if long() {
		d.each = 2000 / len(d.policies)
	}
	d.inspector = asynq.NewInspector(d.asynq)
	d.Cleanup(func() { d.inspector.Close() })
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	for i := range 2 {
		connection := d.limits()
		d.Cleanup(func() { connection.Close() })
		limiter := expect.Got(throttle.New(throttle.Config{Client: connection, Policies: d.policies}))(d)
		if i == 0 {
			d.enqueue(limiter)
		}
		queues := map[string]int{}
		for _, queue := range d.queues {
			queues[queue] = 1
		}
		server, err := worker.NewServer(d.asynq,
			asynq.Config{Concurrency: drainSlots, LogLevel: asynq.FatalLevel, Queues: queues, ShutdownTimeout: time.Second},
			worker.Config{Limiter: limiter, Logger: quiet, OnDecision: d.ledger.Note})
		expect.Must(d, err)
		d.Cleanup(server.Shutdown)
		expect.Must(d, server.Start(asynq.HandlerFunc(d.ledger.Ok)))
	}
}

func (d *outageRun) enqueue(limiter *throttle.Limiter) {
	d.Helper()
	client := expect.Got(worker.NewClient(d.asynq, worker.ClientConfig{Limiter: limiter, LimiterTimeout: time.Minute}))(d)
	defer client.Close()
	for j, p := range d.policies { // 20 at a time, as machines are slow
		var wait sync.WaitGroup
		for i := range d.each {
			if i%20 == 0 {
				wait.Wait()
			}
			wait.Go(func() {
				task := worker.NewTask(worker.Identity{Tenant: fmt.Sprint("tenant", i%d.tenants)}, p.Name+":x", nil)
				_, err := client.EnqueueContext(d.Context(), task, asynq.MaxRetry(3),
					asynq.TaskID(fmt.Sprint(p.Name, "-", i)), asynq.Queue(d.queues[(i+j)%len(d.queues)]))
				expect.That(d, err == nil, err)
			})
		}
		wait.Wait()
	}
}

// grants returns those of a policy, in the order of their time.
func (d *outageRun) grants(policy string) []sitetest.TaskGrant {
	return slices.DeleteFunc(d.ledger.Grants(), func(g sitetest.TaskGrant) bool { return g.Policy != policy })
}

// until waits until the condition holds: long, as machines are slow.
func (d *outageRun) until(what string, condition func() bool) {
	d.Helper()
	for end := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			d.Fatalf("waited in vain until %s: %d of %d tasks have run", what, d.ledger.Done(), d.tasks())
		}
	}
}

// part waits until this part of the tasks has run.
func (d *outageRun) part(part float64) {
	d.Helper()
	d.until("a part has run", func() bool { return float64(d.ledger.Done()) >= part*float64(d.tasks()) })
}

func (d *outageRun) tasks() int { return d.each * len(d.policies) }

// finish waits until all tasks have run. Nothing is lost, archived or failed. A task runs twice only
// if the new primary did not learn that it had begun: at most that many.
func (d *outageRun) finish(promoted time.Time, twice int) {
	d.Helper()
	n := d.tasks()
	d.until("all have run", func() bool { return d.ledger.Done() == n })
	again := len(d.ledger.Runs()) - n
	d.Logf("%d tasks have run, %d of them twice", n, again)
	expect.That(d, again <= twice, again, "tasks ran twice, want at most", twice)
	for _, p := range d.policies {
		grants, first := d.grants(p.Name), time.Duration(-1)
		for _, g := range grants {
			if since := g.At.Sub(promoted); since > 0 && first < 0 {
				first = since
			}
		}
		w := p.Windows[len(p.Windows)-1]
		over := sitetest.Excess(grants, int(w.Limit), w.Period)
		d.Logf("policy %s: first grant %v after the promotion, %d above the limit", p.Name, first.Round(time.Millisecond), over)
		expect.That(d, first <= 30*time.Second,
			"policy", p.Name, "nobody looked for the new primary before the client does so once a minute")
		expect.That(d, !w.Shared || over <= drainLimit,
			"policy", p.Name, over, "above its limit: a failover can forget one window")
	}
	for _, queue := range d.queues {
		info := expect.Got(d.inspector.GetQueueInfo(queue))(d)
		d.Logf("queue %s: %d left active, %d failed, %d archived", queue, info.Active, info.FailedTotal, info.Archived)
		expect.That(d, info.Archived+info.FailedTotal <= 0,
			"queue", queue, info.Archived, "archived,", info.FailedTotal, "failed")
	}
}

// The sentinels replace the primary while tasks wait in line: it was killed, it does not answer for a while and comes
// back, or an operator asked for it. In the last case the old primary serves for a moment beside the new one, and
// what it writes is lost. Asynq's tasks run twice then, as do ours. An old primary that writes only with a replica
// serves nobody after it has lost it, but the new one then waits for the old one to become its replica.
func TestADrainGoesOnAfterASentinelFailover(t *testing.T) {
	t.Parallel()
	asked := func(t *testing.T, s *servers.Sentinels) { expect.Must(t, s.Failover(t.Context())) }
	const some, any = 2 * drainSlots, 1000
	for _, row := range []struct {
		name  string
		fail  func(t *testing.T, s *servers.Sentinels)
		args  []string
		twice int
	}{
		{"killed", func(_ *testing.T, s *servers.Sentinels) { s.Redis[0].Stop() }, nil, some},
		{"stopped", func(t *testing.T, s *servers.Sentinels) {
			s.Redis[0].Cmd.Process.Signal(syscall.SIGSTOP)
		}, nil, some},
		{"asked", asked, nil, any},
		{"asked, min-replicas-to-write", asked, []string{"--min-replicas-to-write", "1"}, some},
	} {
		if row.args != nil && !long() {
			continue
		}
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			s := servers.Sentinel(t, 1, row.args...)
			d := &outageRun{
				TB:    t,
				asynq: asynq.RedisFailoverClientOpt{MasterName: servers.MasterName, SentinelAddrs: s.Addrs()},
				each:  100,
				limits: func() redis.UniversalClient {
					return redis.NewFailoverClient(&redis.FailoverOptions{MasterName: servers.MasterName, SentinelAddrs: s.Addrs()})
				},
				queues:   []string{"one", "two"},
				policies: drained("a", "b"), tenants: 3,
			}
			d.start()
			d.part(0.3)
			row.fail(t, s)
			d.until("the sentinels have replaced the primary", func() bool {
				now, err := s.Primary(t.Context())
				return err == nil && now == s.Redis[1]
			})
			promoted := time.Now()
			d.part(0.6)
			if row.name == "stopped" {
				s.Redis[0].Cmd.Process.Signal(syscall.SIGCONT)
			}
			d.finish(promoted, row.twice)
		})
	}
}

// A slot of a policy and one of a queue move to another node while tasks wait in line. Then a primary is killed that
// has a policy and a queue, and its replica takes over. The shards of one policy are on all primaries.
func TestADrainGoesOnAfterAClusterFailover(t *testing.T) {
	t.Parallel()
	c := servers.Cluster(t, 3, 1)
	ctx := t.Context()
	at := func(key string) (slot, node int) {
		t.Helper()
		slot = expect.Got(c.Slot(ctx, key))(t)
		primary := expect.Got(c.Primary(ctx, slot))(t)
		return slot, slices.Index(c.Nodes, primary)
	}
	// named returns a name for each of the first primaries, whose slot it has.
	named := func(key, shape string, n int) []string {
		names := make([]string, n)
		for i, left := 0, n; left > 0; i++ {
			name := fmt.Sprintf(shape, i)
			if _, node := at(fmt.Sprintf(key, name)); node < n && names[node] == "" {
				names[node], left = name, left-1
			}
		}
		return names
	}
	connect := func() redis.UniversalClient { return redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs()}) }
	spread := inShards(4, 4, 200*time.Millisecond)
	for i := 0; ; i++ {
		spread.Name = fmt.Sprint("spread", i)
		on := map[int]bool{}
		for shard := range spread.Shards {
			_, node := at(fmt.Sprintf("sluice:{%s/%dof%d}:q", spread.Name, shard+1, spread.Shards))
			on[node] = true
		}
		if len(on) == 3 {
			break
		}
	}
	spread.Match = []string{spread.Name + ":*"}

	d := &outageRun{
		TB:     t,
		asynq:  asynq.RedisClusterClientOpt{Addrs: c.Addrs()},
		each:   100,
		limits: connect,

		policies: append(drained(named("sluice:{%s}:q", "policy%d", 3)...), spread), tenants: 24,
		queues: named("asynq:{%s}:pending", "queue%d", 2),
	}
	d.start()
	d.part(0.1)
	for _, key := range []string{"sluice:{" + d.policies[0].Name + "}:q", "asynq:{" + d.queues[0] + "}:pending"} {
		slot, _ := at(key)
		m := expect.Got(c.Migrate(ctx, slot, c.Nodes[2]))(t)
		for n := 1; n > 0; {
			n = expect.Got(m.Move(ctx, 10))(t)
		}
		expect.Must(t, m.Finish(ctx))
	}
	d.part(0.4)
	slot, _ := at("sluice:{" + d.policies[1].Name + "}:q")
	c.Nodes[1].Stop()
	killed := time.Now()
	d.until("the replica has taken over", func() bool {
		now, err := c.Primary(ctx, slot)
		return err == nil && now == c.Nodes[4]
	})
	promoted := time.Now()
	t.Logf("promoted %v after the kill", promoted.Sub(killed).Round(time.Millisecond))
	d.finish(promoted, 2*drainSlots)
}

package faulttest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A policy with shards is drained by all primaries.
//
// A slot of a policy and one of a queue move to another node while tasks wait in line. Then a
// primary is killed that has a policy and a queue, and its replica takes over.
func TestADrainGoesOnAfterAClusterFailover(t *testing.T) {
	t.Parallel()
	c := servers.Cluster(t, 3, 1)
	ctx := t.Context()
	at := func(key string) (slot, node int) {
		t.Helper()
		slot, err := c.Slot(ctx, key)
		if err != nil {
			t.Fatal(err)
		}
		primary, err := c.Primary(ctx, slot)
		if err != nil {
			t.Fatal(err)
		}
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
	scripts := func(node int) float64 {
		t.Helper()
		stats, err := throttletest.Client(t, c.Nodes[node].Addr).Info(ctx, "commandstats").Result()
		if err != nil {
			t.Fatal(err)
		}
		var calls float64
		if _, after, ok := strings.Cut(stats, "cmdstat_evalsha:calls="); ok {
			if _, err := fmt.Sscanf(after, "%g", &calls); err != nil {
				t.Fatal(err)
			}
		}
		return calls
	}

	// The tasks are in another Redis: all scripts of the Cluster are the limiter's. The shards
	// are on all three primaries.
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
	s := &drain{
		TB: t, asynq: asynq.RedisClientOpt{Addr: throttletest.Redis(t)}, limits: connect, queues: []string{"shards"},
		each: 288, policies: []throttle.Policy{spread}, tenants: 24,
	}
	s.start()
	s.finish(time.Now(), 0)
	byTenant := map[string]*sitetest.Ledger{}
	for _, g := range s.ledgers[spread.Name].Sorted() {
		if byTenant[g.Tenant] == nil {
			byTenant[g.Tenant] = sitetest.NewLedger()
		}
		byTenant[g.Tenant].Grants = append(byTenant[g.Tenant].Grants, g)
	}
	for tenant, l := range byTenant {
		if over := l.Excess(int(spread.Windows[0].Limit), spread.Windows[0].Period); over > 0 {
			t.Errorf("%s: %d above its limit", tenant, over)
		}
	}
	for node := range 3 {
		calls := scripts(node)
		t.Logf("node %d: %v script calls of a policy with %d shards", node, calls, spread.Shards)
		if calls < 5 {
			t.Errorf("node %d has answered %v calls", node, calls)
		}
	}

	d := &drain{
		TB:     t,
		asynq:  asynq.RedisClusterClientOpt{Addrs: c.Addrs()},
		each:   100,
		limits: connect,

		policies: drained(named("sluice:{%s}:q", "policy%d", 3)...), tenants: 3,
		queues: named("asynq:{%s}:pending", "queue%d", 2),
	}
	d.start()
	d.part(0.1)
	for _, key := range []string{"sluice:{" + d.policies[0].Name + "}:q", "asynq:{" + d.queues[0] + "}:pending"} {
		slot, _ := at(key)
		m, err := c.Migrate(ctx, slot, c.Nodes[2])
		if err != nil {
			t.Fatal(err)
		}
		for n := 1; n > 0; {
			if n, err = m.Move(ctx, 10); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Finish(ctx); err != nil {
			t.Fatal(err)
		}
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

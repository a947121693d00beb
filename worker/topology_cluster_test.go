package worker_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A slot of a policy and one of a queue move to another node while tasks wait in line. Then a
// primary is killed that has a policy and a queue, and its replica takes over.
func TestADrainGoesOnAfterAClusterFailover(t *testing.T) {
	t.Parallel()
	c := throttletest.Cluster(t, 3, 1)
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
	d := &drain{
		TB:     t,
		asynq:  asynq.RedisClusterClientOpt{Addrs: c.Addrs()},
		each:   100,
		limits: func() redis.UniversalClient { return redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs()}) },
		names:  named("sluice:{%s}:q", "policy%d", 3),
		queues: named("asynq:{%s}:pending", "queue%d", 2),
	}
	d.start()
	d.part(0.1)
	for _, key := range []string{"sluice:{" + d.names[0] + "}:q", "asynq:{" + d.queues[0] + "}:pending"} {
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
	slot, _ := at("sluice:{" + d.names[1] + "}:q")
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

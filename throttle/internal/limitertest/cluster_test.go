package limitertest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// While a slot is migrated the old node has a part of a policy's keys and the new one has the
// others. Every call is refused as a whole at any stage. Then the counts and the line go on.
func TestACallOnAMigratingSlotDoesAllOrNothing(t *testing.T) {
	t.Parallel()
	ctx, nodes := t.Context(), servers.Cluster(t, 2, 0)
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: nodes.Addrs(), MaxRedirects: 1})
	defer client.Close()
	for name, waiting := range map[string]bool{"nobody": false, "one": true} {
		p := throttle.Policy{Name: name, Windows: []throttle.Window{
			{Name: "each", Limit: 3, Period: h},
			{Name: "all", Limit: 4, Period: h, Shared: true},
		}}
		l := New(t, client, p)
		request := func(tenant string, cost int64) throttle.Request {
			return throttle.Request{Policy: name, Tenant: tenant, Cost: map[string]int64{throttle.Requests: cost}}
		}
		join := func(id string) error {
			r := request("slow", 3)
			r.Ticket = throttle.Ticket{Queue: "q", ID: id}
			decisions, err := l.Line(name).Join(ctx, []throttle.Request{r})
			if err == nil {
				err = decisions[0].Err
			}
			return err
		}
		Reserve(t, l, request("acme", 2))
		if waiting {
			expect.Must(t, join("0"))
		}
		slot := expect.Got(nodes.Slot(ctx, "sluice:{"+name+"}:q"))(t)
		to := nodes.Nodes[0]
		if from, err := nodes.Primary(ctx, slot); err != nil {
			t.Fatal(err)
		} else if from == to {
			to = nodes.Nodes[1]
		}
		before := keysOf(t, client)
		m := expect.Got(nodes.Migrate(ctx, slot, to))(t)
		refused := func(stage string) {
			t.Helper()
			for _, tenant := range []string{"acme", "new"} {
				expect.Err(t, expect.ErrOf(l.Reserve(ctx, request(tenant, 1))), throttle.ErrUnavailable)
			}
			expect.Err(t, join("1"), throttle.ErrUnavailable)
			taken, err := l.Line(name).Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 1})
			expect.That(t, errors.Is(err, throttle.ErrUnavailable), name, "waits", stage, "took", taken.Tickets, err)
			expect.Equal(t, keysOf(t, client), before, name, stage)
		}
		refused("no key has moved")
		n, err := m.Move(ctx, 1)
		expect.Require(t, n == 1 && err == nil, n, err)
		refused("one key has moved")
		expect.Must(t, expect.ErrOf(m.Move(ctx, 100)))
		refused("all keys have moved")
		expect.Must(t, m.Finish(ctx))
		d := Peek(t, l, request("acme", 1))
		expect.That(t, d.Windows[0].Used == 2 && d.Windows[1].Used == 2 && d.Granted != waiting,
			name, "waits, after the migration: granted", d.Granted, d.Windows)
	}
}

func keysOf(t *testing.T, client *redis.ClusterClient) int64 {
	t.Helper()
	var n atomic.Int64
	err := client.ForEachMaster(t.Context(), func(ctx context.Context, node *redis.Client) error {
		keys, err := node.DBSize(ctx).Result()
		n.Add(keys)
		return err
	})
	expect.Must(t, err)
	return n.Load()
}

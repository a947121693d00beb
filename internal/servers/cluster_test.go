package servers_test

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/servers"
)

func TestAClusterServesAndMigratesASlot(t *testing.T) {
	t.Parallel()
	c := servers.Cluster(t, 2, 1)
	ctx, client := t.Context(), c.Client(t)
	slot, err := c.Slot(ctx, "{a}")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"{a}1", "{a}2"} {
		if err := client.Set(ctx, key, "x", 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	from, err := c.Primary(ctx, slot)
	if err != nil {
		t.Fatal(err)
	}
	to := c.Nodes[0]
	if from == to {
		to = c.Nodes[1]
	}
	m, err := c.Migrate(ctx, slot, to)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := m.Move(ctx, 1); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if err := m.Finish(ctx); err != nil {
		t.Fatal(err)
	}
	if now, err := c.Primary(ctx, slot); now != to || err != nil {
		t.Errorf("the slot is at %v, %v", now, err)
	}
	if n, err := client.Exists(ctx, "{a}1", "{a}2").Result(); n != 2 || err != nil {
		t.Errorf("%d of 2 keys are there, %v", n, err)
	}
}

func TestSentinelsReplaceThePrimary(t *testing.T) {
	t.Parallel()
	s := servers.Sentinel(t, 1)
	ctx, client := t.Context(), s.Client(t)
	if err := client.Set(ctx, "key", "value", 0).Err(); err != nil {
		t.Fatal(err)
	}
	old, err := s.Primary(ctx)
	if err != nil || old != s.Redis[0] {
		t.Fatal(old, err)
	}
	old.Stop()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if now, err := s.Primary(ctx); err == nil && now == s.Redis[1] {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the primary was not replaced")
		}
	}
	if got, err := client.Get(ctx, "key").Result(); got != "value" || err != nil {
		t.Errorf("the new primary says %q, %v", got, err)
	}
}

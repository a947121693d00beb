package servers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// nodeTimeout is how long a node may be silent before the others suspect it, in a Cluster with replicas; else a minute.
const nodeTimeout = 1000 * time.Millisecond

// A RedisCluster is a running Redis Cluster. The slots are spread evenly over its first nodes, the
// primaries. The further nodes are their replicas, in turns.
type RedisCluster struct{ Nodes []*Process }

// Cluster starts a Redis Cluster with that many replicas of each primary. It ends with the test.
func Cluster(t testing.TB, primaries, replicas int, args ...string) *RedisCluster {
	t.Helper()
	return started(t, func(dir string) (*RedisCluster, error) { return StartCluster(dir, primaries, replicas, args...) })
}

// StartCluster is Cluster for programs that are not tests: the servers work below the directory
// given, and Stop ends them. It returns when every node knows all others, within a minute.
func StartCluster(dir string, primaries, replicas int, args ...string) (*RedisCluster, error) {
	c := &RedisCluster{}
	if err := c.start(dir, primaries, replicas, args); err != nil {
		c.Stop()
		return nil, err
	}
	return c, nil
}

func (c *RedisCluster) start(dir string, primaries, replicas int, args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	n := primaries * (1 + replicas)
	for i := range n {
		p, err := startIn(dir, fmt.Sprint("node", i), append([]string{
			"--cluster-enabled", "yes", "--cluster-node-timeout", fmt.Sprint(nodeTimeout.Milliseconds()),
			"--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", "--repl-diskless-load", "swapdb",
		}, args...)...)
		if err != nil {
			return err
		}
		c.Nodes = append(c.Nodes, p)
	}
	for i, p := range c.Nodes {
		calls := [][]any{{"cluster", "set-config-epoch", i + 1}}
		if i < primaries {
			add := []any{"cluster", "addslots"} // ADDSLOTSRANGE needs Redis 7.0
			for slot := i * slots / primaries; slot < (i+1)*slots/primaries; slot++ {
				add = append(add, slot)
			}
			calls = append(calls, add)
		}
		if i > 0 {
			host, port, _ := strings.Cut(c.Nodes[0].Addr, ":")
			calls = append(calls, []any{"cluster", "meet", host, port})
		}
		for _, call := range calls {
			if err := p.do(ctx, call...).Err(); err != nil {
				return fmt.Errorf("%v: %w", call[:2], err)
			}
		}
	}
	for i, p := range c.Nodes[primaries:] {
		id, err := c.Nodes[i%primaries].do(ctx, "cluster", "myid").Text()
		if err != nil {
			return err
		}
		if err := until(ctx, func() bool { return p.do(ctx, "cluster", "replicate", id).Err() == nil }); err != nil {
			return fmt.Errorf("node %d becomes a replica: %w", primaries+i, err)
		}
	}
	if err := c.Settled(ctx, n-primaries); err != nil || replicas > 0 {
		return err
	}
	// Nobody can take over from a node that is slow to answer.
	for _, p := range c.Nodes {
		if err := p.do(ctx, "config", "set", "cluster-node-timeout", time.Minute.Milliseconds()).Err(); err != nil {
			return err
		}
	}
	return nil
}

const slots = 16384

// Settled waits until all nodes say that the cluster serves all slots, and that many replicas
// follow their primaries. Nodes that were stopped are left out.
func (c *RedisCluster) Settled(ctx context.Context, replicas int) error {
	return until(ctx, func() bool {
		following := 0
		for _, p := range c.Nodes {
			if p.ended() {
				continue
			}
			state, err := p.do(ctx, "cluster", "info").Text()
			if err != nil || !strings.Contains(state, "cluster_state:ok") ||
				!strings.Contains(state, fmt.Sprint("cluster_slots_ok:", slots)) {
				return false
			}
			nodes, err := p.do(ctx, "cluster", "slots").Slice()
			if err != nil || len(nodes) == 0 {
				return false
			}
			info, err := p.do(ctx, "info", "replication").Text()
			if err != nil {
				return false
			}
			if strings.Contains(info, "role:slave") && strings.Contains(info, "master_link_status:up") {
				following++
			}
		}
		return following >= replicas
	})
}

// Addrs returns the addresses of all nodes.
func (c *RedisCluster) Addrs() []string { return addrsOf(c.Nodes) }

// Client returns a client of the cluster that is closed when the test ends.
func (c *RedisCluster) Client(t testing.TB) *redis.ClusterClient {
	t.Helper()
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs()})
	t.Cleanup(func() { client.Close() })
	return client
}

// Slot returns the slot of a key.
func (c *RedisCluster) Slot(ctx context.Context, key string) (int, error) {
	for _, p := range c.Nodes {
		if !p.ended() {
			return p.do(ctx, "cluster", "keyslot", key).Int()
		}
	}
	return 0, errors.New("no node runs")
}

// Primary returns the node that serves a slot now, as the nodes that run see it.
func (c *RedisCluster) Primary(ctx context.Context, slot int) (*Process, error) {
	for _, p := range c.Nodes {
		if p.ended() {
			continue
		}
		client := p.client()
		//lint:ignore SA1019 Redis 6.2 has no CLUSTER SHARDS
		ranges, err := client.ClusterSlots(ctx).Result()
		client.Close()
		if err != nil {
			continue
		}
		for _, r := range ranges {
			if r.Start > slot || slot > r.End || len(r.Nodes) == 0 {
				continue
			}
			for _, node := range c.Nodes {
				if node.Addr == r.Nodes[0].Addr && !node.ended() {
					return node, nil
				}
			}
		}
	}
	return nil, fmt.Errorf("no node serves slot %d", slot)
}

// A Migration moves a slot from one primary to another, as redis-cli does.
type Migration struct {
	Slot     int
	From, To *Process

	cluster        *RedisCluster
	fromID, toID   string
	host, portText string
}

// Migrate opens the migration of a slot to a primary. Keys have not moved yet.
func (c *RedisCluster) Migrate(ctx context.Context, slot int, to *Process) (*Migration, error) {
	from, err := c.Primary(ctx, slot)
	if err != nil {
		return nil, err
	}
	m := &Migration{Slot: slot, From: from, To: to, cluster: c}
	m.host, m.portText, _ = strings.Cut(to.Addr, ":")
	if m.fromID, err = from.do(ctx, "cluster", "myid").Text(); err != nil {
		return nil, err
	}
	if m.toID, err = to.do(ctx, "cluster", "myid").Text(); err != nil {
		return nil, err
	}
	if err := to.do(ctx, "cluster", "setslot", slot, "importing", m.fromID).Err(); err != nil {
		return nil, err
	}
	return m, from.do(ctx, "cluster", "setslot", slot, "migrating", m.toID).Err()
}

// Move moves up to n keys, and returns how many it has moved.
func (m *Migration) Move(ctx context.Context, n int) (int, error) {
	keys, err := m.From.do(ctx, "cluster", "getkeysinslot", m.Slot, n).StringSlice()
	if err != nil || len(keys) == 0 {
		return 0, err
	}
	args := []any{"migrate", m.host, m.portText, "", 0, 5000, "keys"}
	for _, key := range keys {
		args = append(args, key)
	}
	return len(keys), m.From.do(ctx, args...).Err()
}

// Finish moves the keys that are left, and ends the migration.
func (m *Migration) Finish(ctx context.Context) error {
	for {
		n, err := m.Move(ctx, 100)
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
	}
	for _, p := range []*Process{m.To, m.From} {
		if err := p.do(ctx, "cluster", "setslot", m.Slot, "node", m.toID).Err(); err != nil {
			return err
		}
	}
	return nil
}

// Stop kills all nodes that still run.
func (c *RedisCluster) Stop() {
	for _, p := range c.Nodes {
		p.Stop()
	}
}

// until waits until the condition is true.
func until(ctx context.Context, condition func() bool) error {
	for !condition() {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (p *Process) client() *redis.Client { return redis.NewClient(&redis.Options{Addr: p.Addr}) }

// do sends one command by a connection of its own.
func (p *Process) do(ctx context.Context, args ...any) *redis.Cmd {
	client := p.client()
	defer client.Close()
	return client.Do(ctx, args...)
}

// ended reports whether the server has exited.
func (p *Process) ended() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

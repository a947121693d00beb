package sitetest

import (
	"context"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/sluice-go/sluice/internal/servers"
)

// Cluster starts a Redis Cluster of one node, which refuses calls across slots as any other does.
func Cluster(t *testing.T) (addr string) {
	t.Helper()
	addr = servers.Cluster(t, 1, 0).Nodes[0].Addr
	clusters.Store(addr, true)
	return addr
}

// OnCluster reports whether tests that run on real Redis run on a Redis Cluster instead, by SLUICE_CLUSTER.
func OnCluster() bool { return os.Getenv("SLUICE_CLUSTER") != "" }

// Dialed makes clients with these options.
type Dialed struct{ *redis.Options }

// MakeRedisClient is that of an asynq.RedisConnOpt.
func (d Dialed) MakeRedisClient() any { return Connect(d.Options) }

// clusters has the addresses of Redis Clusters of one node.
var clusters sync.Map

// Connect returns a client with these options.
func Connect(o *redis.Options) redis.UniversalClient {
	if _, ok := clusters.Load(o.Addr); !ok {
		options := *o
		return redis.NewClient(&options)
	}
	return redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{o.Addr}, Dialer: o.Dialer, ReadTimeout: o.ReadTimeout,
		MaintNotificationsConfig: o.MaintNotificationsConfig,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) { // the dialer goes by its own address
			return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: o.Addr}}}}, nil
		},
	})
}

// unnotified keeps a client from asking Redis for notices of its maintenance. Each client writes to its config.
func unnotified() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// SameRedis are options of new clients of the same Redis.
func SameRedis(client *redis.Client) *redis.Options {
	o := client.Options()
	return &redis.Options{Addr: o.Addr, Dialer: o.Dialer, MaintNotificationsConfig: unnotified()}
}

// SetClock keeps the clock of a miniredis ahead of this machine's, until its result is called.
func SetClock(m *miniredis.Miniredis, ahead *atomic.Int64) (end func()) {
	ended := make(chan struct{})
	go func() {
		for {
			m.SetTime(time.Now().Add(time.Duration(ahead.Load())))
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ended:
				return
			}
		}
	}()
	synctest.Wait()
	return func() { close(ended) }
}

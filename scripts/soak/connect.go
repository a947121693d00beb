package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// A redisOpt makes clients of a Redis, or of one node that is a whole Redis Cluster. It is an
// asynq.RedisConnOpt.
type redisOpt struct {
	addr    string
	cluster bool
}

func (o redisOpt) MakeRedisClient() any { return o.client() }

func (o redisOpt) client() redis.UniversalClient {
	if !o.cluster {
		return redis.NewClient(&redis.Options{Addr: o.addr})
	}
	return redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{o.addr},
		// The node tells its own address, not the proxy's.
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{Start: 0, End: lastSlot, Nodes: []redis.ClusterNode{{Addr: o.addr}}}}, nil
		},
	})
}

const lastSlot = 16383

// makeCluster makes a node that was started with cluster-enabled a whole Cluster.
func makeCluster(ctx context.Context, node *redis.Client) error {
	if err := node.ClusterAddSlotsRange(ctx, 0, lastSlot).Err(); err != nil {
		return err
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		info, err := node.ClusterInfo(ctx).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") {
			return nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return fmt.Errorf("the Redis Cluster does not come up: %v, %q", err, info)
		}
	}
}

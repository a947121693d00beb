package asynqredis

import (
	"context"
	"errors"
	"slices"

	"github.com/redis/go-redis/v9"
)

// OneSlot reports whether one command may name keys of several queues: not on a Redis Cluster.
func (c *Client) OneSlot() bool {
	_, one := c.redis.(*redis.Client)
	return one
}

// run calls a script that derives keys of tasks.
//
// While a Cluster migrates a slot, its old node has some of the keys and its new node the others. A script that
// derives keys would fail halfway on the old node, and miss tasks on the new node. A further key that never exists
// makes both nodes refuse the whole call (TRYAGAIN). The client repeats it.
//
// A client reads once a minute which nodes serve a Cluster. When a node does not answer, run makes it do so at once.
func (c *Client) run(ctx context.Context, script, queue string, keys []string, args ...any) *redis.Cmd {
	cmd := scripts[script].Run(ctx, c.redis, c.guarded(queue, keys), args...)
	cluster, ok := c.redis.(interface{ ReloadState(ctx context.Context) })
	if ok && cmd.Err() != nil && !errors.As(cmd.Err(), new(redis.Error)) {
		cluster.ReloadState(ctx)
	}
	return cmd
}

func (c *Client) guarded(queue string, keys []string) []string {
	if c.OneSlot() {
		return keys
	}
	return append(slices.Clone(keys), prefix(queue)+"sluice:none")
}

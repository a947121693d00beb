package asynqredis

import (
	"context"
	"errors"
	"slices"

	"github.com/redis/go-redis/v9"
)

// A cluster is the client of a Redis Cluster.
type cluster interface{ ReloadState(ctx context.Context) }

// run calls a script that derives keys of tasks.
//
// While a slot of a Cluster is migrated, its old node has a part of the keys and its new node has
// the others. A script that derives keys would fail halfway at the one, and miss tasks at the
// other. A further key that never exists makes both refuse the call as a whole (TRYAGAIN). The
// client repeats it.
func (c *Client) run(ctx context.Context, script, queue string, keys []string, args ...any) *redis.Cmd {
	return scripts[script].Run(ctx, c.redis, c.guarded(queue, keys), args...)
}

func (c *Client) guarded(queue string, keys []string) []string {
	if c.OneSlot() {
		return keys
	}
	return append(slices.Clone(keys), prefix(queue)+"sluice:none")
}

// A reload is a hook of a Cluster's client. If a node does not answer, it looks at once which node
// serves its slots by now. The client itself looks once a minute.
type reload struct{ cluster }

func (r reload) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r reload) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		return r.after(ctx, next(ctx, cmd))
	}
}

func (r reload) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		return r.after(ctx, next(ctx, cmds))
	}
}

func (r reload) after(ctx context.Context, err error) error {
	var answer redis.Error
	if err != nil && !errors.As(err, &answer) {
		r.ReloadState(ctx)
	}
	return err
}

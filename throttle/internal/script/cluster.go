package script

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

// A cluster is the client of a Redis Cluster.
type cluster interface{ ReloadState(ctx context.Context) }

// run makes one call.
//
// While a slot of a Cluster is migrated, its old node has a part of the keys and its new node has
// the others. A script that derives keys would fail halfway at the one, and find empty windows at
// the other. A second key that never exists makes both refuse the call as a whole (TRYAGAIN). The
// client repeats it.
//
// A client looks once a minute which nodes a Cluster has. If a node does not answer, another one
// may serve its slots by now.
func (r *Runner) run(ctx context.Context, p *Policy, script *redis.Script, args []any) ([]any, error) {
	if r.cluster == nil {
		return script.Run(ctx, r.client, p.keys[:1], args...).Slice()
	}
	reply, err := script.Run(ctx, r.client, p.keys, args...).Slice()
	var answer redis.Error
	if err != nil && !errors.As(err, &answer) {
		r.cluster.ReloadState(ctx)
	}
	return reply, err
}

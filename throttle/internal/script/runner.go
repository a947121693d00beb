package script

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Runner makes scripts, and sends calls. Its fields are set before the first call. It is safe for
// concurrent use.
type Runner struct {
	Client redis.UniversalClient

	// Prefix begins all keys. It holds no brace.
	Prefix string

	// Now, if not nil, returns the time for the scripts in microseconds, or 0 for the clock of Redis.
	Now func() int64

	// Edit, if not nil, changes the text of every script: for tests.
	Edit func(text string) string

	// Called, if not nil, is called after each call of a script, which is "decide" or "take", for n
	// requests, or by which n tickets were taken.
	Called func(ctx context.Context, line, script string, n int, took time.Duration, err error)

	made sync.Map // *scripts by their algorithms
}

// NewID returns 16 random hex digits.
func NewID() string { return fmt.Sprintf("%016x", rand.Uint64()) }

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
	cluster, ok := r.Client.(interface{ ReloadState(ctx context.Context) })
	if !ok {
		return script.Run(ctx, r.Client, p.keys[:1], args...).Slice()
	}
	reply, err := script.Run(ctx, r.Client, p.keys, args...).Slice()
	if err != nil && !errors.As(err, new(redis.Error)) {
		cluster.ReloadState(ctx)
	}
	return reply, err
}

func (r *Runner) called(ctx context.Context, p *Policy, script string, n int, begun time.Time, err error) {
	if r.Called != nil {
		r.Called(ctx, p.Line, script, n, time.Since(begun), err)
	}
}

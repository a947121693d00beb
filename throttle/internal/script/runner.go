package script

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
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

	made sync.Map // *redis.Script by their names and algorithms
}

// NewID returns 16 random hex digits.
func NewID() string { return fmt.Sprintf("%016x", rand.Uint64()) }

// call makes one call of the script of that name, of a process, and has the reply read. It has the same number
// when it is repeated.
//
// While a slot of a Cluster is migrated, its old node has a part of the keys and its new node has
// the others. A script that derives keys would fail halfway at the one, and find empty windows at
// the other. A second key that never exists makes both refuse the call as a whole (TRYAGAIN). The
// client repeats it.
//
// A client looks once a minute which nodes a Cluster has. If a node does not answer, another one
// may serve its slots by now.
func (r *Runner) call(
	ctx context.Context, p *Policy, name, process string, seq int64, args []any, read func(reply []any) (n int, err error),
) error {
	begun, now, n := time.Now(), int64(0), 0
	if r.Now != nil {
		now = r.Now()
	}
	keys := []string{Prefix(r.Prefix, p.Line) + "q"}
	cluster, ok := r.Client.(interface{ ReloadState(ctx context.Context) })
	if ok {
		keys = append(keys, Prefix(r.Prefix, p.Line)+"none")
	}
	args = slices.Concat([]any{now, process, seq, p.text, p.listsText(now)}, args)
	reply, err := p.scripts[name].Run(ctx, r.Client, keys, args...).Slice()
	if ok && err != nil && !errors.As(err, new(redis.Error)) {
		cluster.ReloadState(ctx)
	}
	if err == nil {
		n, err = read(reply)
	}
	if r.Called != nil {
		r.Called(ctx, p.Line, name, n, time.Since(begun), err)
	}
	return err
}

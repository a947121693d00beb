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

// A Runner makes scripts, and sends calls. Its fields are set before the first call. It is safe for concurrent use.
type Runner struct {
	Client redis.UniversalClient

	// Prefix begins all keys. It holds no brace.
	Prefix string

	// Now, if not nil, returns the time for the scripts in microseconds, or 0 for the clock of Redis.
	Now func() int64

	// Edit, if not nil, changes the text of every script: for tests.
	Edit func(text string) string

	// Called, if not nil, is called after each call of the script "decide" or "take". n counts requests, or tickets
	// taken.
	Called func(ctx context.Context, line, script string, n int, took time.Duration, err error)

	made sync.Map // *redis.Script, by name and algorithms
}

// NewID returns 16 random hex digits.
func NewID() string { return fmt.Sprintf("%016x", rand.Uint64()) }

// call makes one call of the named script for a process, and reads the reply. A repeated call has the same number.
//
// While a slot of a Cluster is migrated, its old node has some of the keys and its new node the others. A script that
// derives keys would fail halfway on the old node, and find empty windows on the new one. A second key that never
// exists makes both refuse the whole call (TRYAGAIN), and the client repeats it.
//
// A client asks once a minute which nodes a Cluster has. If a node does not answer, another one may serve its slots
// by now, so call makes it ask at once.
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

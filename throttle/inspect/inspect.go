// Package inspect shows how the lines of a throttle.Limiter stand: who waits, since when, why and until when, and
// what would be with other limits. A line is read by several commands: what changes meanwhile may show twice. The
// package changes no position and no count, but its calls, like all calls of a line, remove claims of ended processes.
package inspect

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/quote"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// Bounds and defaults.
const (
	MaxLimit = 500                  // of Query.Limit, and its default
	MaxPlan  = 400 * 24 * time.Hour // how far ahead plans and simulations look
)

// An Inspector looks at the lines of a limiter. It is safe for concurrent use. Errors are Limiter.Reserve's.
type Inspector struct{ limiter *throttle.Limiter }

// Of returns an inspector of a limiter.
func Of(l *throttle.Limiter) Inspector { return Inspector{l} }

// Policies returns the names of the limiter's policies, and of removed policies for which tickets still wait.
func (i Inspector) Policies() []string {
	names := i.limiter.Lines()
	for n, line := range names {
		names[n] = throttle.PolicyOf(line)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Orphans returns how many tickets wait in lines of policies that the limiter does not have, by policy.
// It looks through all keys of a Redis, some thousand a call.
func (i Inspector) Orphans(ctx context.Context) (map[string]int64, error) {
	known, orphans := i.Policies(), map[string]int64{}
	var mu sync.Mutex
	scan := func(ctx context.Context, node redis.Cmdable) error {
		mu.Lock()
		defer mu.Unlock()
		lines := node.Scan(ctx, 0, script.Prefix(i.limiter.Config().Prefix, "*")+"t", 5000).Iterator()
		for lines.Next(ctx) {
			_, name, _ := strings.Cut(lines.Val(), "{")
			if policy := throttle.PolicyOf(strings.TrimSuffix(name, "}:t")); !slices.Contains(known, policy) {
				n, err := node.HLen(ctx, lines.Val()).Result()
				if err != nil {
					return err
				}
				orphans[policy] += n
			}
		}
		return lines.Err()
	}
	return orphans, i.limiter.Line("").Read(ctx, func(client redis.UniversalClient, _ string) error {
		if c, ok := client.(*redis.ClusterClient); ok {
			return c.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error { return scan(ctx, node) })
		}
		return scan(ctx, client)
	})
}

// lines returns the names of the lines of a policy, also of a removed one, while somebody waits for it.
func (i Inspector) lines(policy string) ([]string, error) {
	other := func(line string) bool { return throttle.PolicyOf(line) != policy }
	lines := slices.DeleteFunc(i.limiter.Lines(), other)
	if len(lines) == 0 {
		return nil, fmt.Errorf("%w %q", throttle.ErrUnknownPolicy, quote.Short(policy))
	}
	return lines, nil
}

// Package inspect shows how the lines of a throttle.Limiter stand: who waits, since when, why and
// until when, and what would be if limits were others. All is read from one snapshot of a line.
// Nothing is changed.
package inspect

import (
	"cmp"
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
	DefaultLimit = 50                   // of Query.Limit
	MaxLimit     = 500                  // of Query.Limit
	MaxPlan      = 400 * 24 * time.Hour // how far ahead plans and simulations look
)

// An Inspector looks at the lines of a limiter. It is safe for concurrent use. Its errors are those of
// Limiter.Reserve.
type Inspector struct{ limiter *throttle.Limiter }

// Of returns an inspector of a limiter.
func Of(l *throttle.Limiter) Inspector { return Inspector{l} }

// Policies returns the names of the limiter's policies, with those that were removed while somebody waits.
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
			name, _, _ = strings.Cut(name, "}")
			if policy := throttle.PolicyOf(name); !slices.Contains(known, policy) {
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

// lines returns the names of the lines of a policy, also of one that was removed while somebody waits.
func (i Inspector) lines(policy string) ([]string, error) {
	other := func(line string) bool { return throttle.PolicyOf(line) != policy }
	lines := slices.DeleteFunc(i.limiter.Lines(), other)
	if len(lines) == 0 {
		return nil, fmt.Errorf("%w %q", throttle.ErrUnknownPolicy, quote.Short(policy))
	}
	return lines, nil
}

// Limits say which windows and pauses hold requests up, and until when. As JSON, times are of RFC 3339, and
// durations are seconds.
type Limits struct {
	At      time.Time              `json:"at"` // by the clock of Redis
	Windows []throttle.WindowState `json:"windows"`

	// Binds is what holds up the last ticket for longest, as throttle.Place.Binds. Expected is when that is
	// expected to start, and Latest the upper bound of it. They are zero if nobody waits, Latest also
	// where no bound is known.
	Binds    string    `json:"binds,omitempty"`
	Expected time.Time `json:"expected,omitzero"`
	Latest   time.Time `json:"latest,omitzero"`

	Pause     *throttle.Pause     `json:"pause,omitempty"`      // nil if there is none
	Adapted   *throttle.Adapted   `json:"adapted,omitempty"`    // the rate, if it is not the published one
	Remaining *throttle.Remaining `json:"remaining,omitempty"`  // what the upstream has left, if it says so
	Observes  bool                `json:"observes,omitempty"`   // the policy only observes: nothing is delayed
	Removed   bool                `json:"removed,omitempty"`    // the policy was: its last windows hold
	PerSecond float64             `json:"per_second,omitempty"` // requests, lately; 0 if unknown
}

// limitsOf returns the limits of a standing: by the windows that all tenants share, the other windows, or both.
func limitsOf(s *throttle.Standing, shared, others bool) Limits {
	d := s.Decision
	l := Limits{
		At: cmp.Or(d.At, time.Now()), Windows: []throttle.WindowState{}, Pause: d.Pause, Adapted: d.Adapted,
		Remaining: d.Remaining, Observes: s.Policy.Observe, Removed: s.Removed,
	}
	if d.AlreadyQueued {
		l.Binds, l.Expected = d.Binds, d.At.Add(d.RetryIn)
		if d.Latest >= d.RetryIn {
			l.Latest = d.At.Add(d.Latest)
		}
	}
	shortest := time.Duration(0)
	for _, w := range d.Windows {
		if ofAll := len(w.Scope.Attributes) == 0; ofAll && !shared || !ofAll && !others {
			continue
		}
		l.Windows = append(l.Windows, w)
		first := shortest == 0 || w.Period > 0 && w.Period < shortest
		if rate := w.PerSecond(d.At); w.Unit == throttle.Requests && rate > 0 && first {
			l.PerSecond, shortest = rate, w.Period
		}
	}
	return l
}

package promthrottle

import (
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const maxRates = 10_000

// rates are those in force after refusals, as far as this process knows.
type rates struct {
	mu      sync.Mutex
	byCount map[string]rate // by policy, window and scope
}

type rate struct {
	policy string
	ratio  float64 // of the published one
	until  time.Time
}

func (r *rates) note(policy string, a throttle.Adapted, at time.Time) {
	now := time.Now()
	key := policy + "\x00" + a.Window + "\x00" + strings.Join(a.Scope.Values, "\x00")
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.byCount[key]; !known && len(r.byCount) >= maxRates {
		r.drop(now)
		if len(r.byCount) >= maxRates {
			return
		}
	}
	r.byCount[key] = rate{policy, a.Rate / a.Published, now.Add(a.Until.Sub(at))}
}

// drop forgets what is over. The lock is held.
func (r *rates) drop(now time.Time) {
	maps.DeleteFunc(r.byCount, func(_ string, rate rate) bool { return !now.Before(rate.until) })
}

// An adaptation is how far a policy has adapted.
type adaptation struct {
	counts int
	lowest float64 // ratio
}

// inForce returns the adaptation of these policies, and of all that have adapted.
func (r *rates) inForce(now time.Time, policies []string) map[string]adaptation {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop(now)
	all := map[string]adaptation{}
	for _, policy := range policies {
		all[policy] = adaptation{lowest: 1}
	}
	for _, rate := range r.byCount {
		a, known := all[rate.policy]
		if !known {
			a.lowest = 1
		}
		all[rate.policy] = adaptation{a.counts + 1, min(a.lowest, rate.ratio)}
	}
	return all
}

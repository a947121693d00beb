package inspect

import (
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	starvesAfter = 75 * time.Second // for which a tenant's oldest ticket has stood
	starvesDue   = 20               // and its share of the grants meanwhile is more than this
	maxHeads     = 10_000           // after which all are forgotten
)

// Heads find tenants that starve in a queue, where others get grants. From one noted state to the next they
// remember each tenant's oldest ticket. The zero value is ready. Heads are safe for concurrent use.
type Heads struct {
	mu  sync.Mutex
	all map[[2]string]State // by policy and flow: as of the last change of its oldest ticket or of its tag
}

// Note notes a state. It returns those of its tenants that starve: for starvesAfter their oldest ticket and their tag
// have been the same, no pause and no window of their own delays them, and more than starvesDue grants would have
// been their share by weight, while others went first.
func (h *Heads) Note(s PolicyState) (starving []State) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all == nil || len(h.all) > maxHeads {
		h.all = map[[2]string]State{}
	}
	for _, t := range s.Tenants {
		full := func(w throttle.WindowState) bool { return w.Remaining < max(1, t.Cost[w.Unit]) }
		key := [2]string{s.Policy, t.flow.name}
		first := h.all[key]
		if !first.Oldest.Equal(t.Oldest) || first.flow.tag != t.flow.tag { // retries go first: the oldest may stay
			first, h.all[key] = t, t
		}
		stood := t.At.Sub(first.At)
		if !t.Oldest.IsZero() && t.Pause == nil && !slices.ContainsFunc(t.Windows, full) &&
			stood >= starvesAfter && s.PerSecond*stood.Seconds()*t.Share > starvesDue {
			starving = append(starving, t)
		}
	}
	return starving
}

package inspect

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	starvesAfter = 75 * time.Second // without a grant,
	starvesDue   = 20               // if more grants of its policy were its share meanwhile
	maxHeads     = 10_000           // after which all are forgotten
)

// Heads find tenants that starve: others are granted, and they are not. They remember the first ticket of
// each, of states that are noted again and again. The zero value is ready. It is safe for concurrent use.
type Heads struct {
	mu  sync.Mutex
	all map[[3]string]head // by policy, tenant and attributes
}

type head struct {
	joined, tags int64 // of the first ticket; of its tenant's flows, which move by each grant
	since        time.Time
}

// Note notes a state. It returns the tenants of it that starve: no pause and no window of their own holds
// them up, and more than 20 grants were their share by weight since their first ticket is the same. Their
// queue or class gives way.
func (h *Heads) Note(s PolicyState) (starving []TenantState) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all == nil || len(h.all) > maxHeads {
		h.all = map[[3]string]head{}
	}
	full := func(w throttle.WindowState) bool { return w.Remaining == 0 }
	for _, t := range s.Tenants {
		key := [3]string{s.Policy, t.Tenant, fmt.Sprint(t.Attributes)}
		first := h.all[key]
		if now := (head{t.Oldest.UnixMicro(), t.tags, s.At}); first.joined != now.joined || first.tags != now.tags {
			first, h.all[key] = now, now // retries go before the first ticket: it may stay for long
		}
		stood := s.At.Sub(first.since)
		if !t.Oldest.IsZero() && t.Pause == nil && !slices.ContainsFunc(t.Windows, full) &&
			stood >= starvesAfter && s.PerSecond*stood.Seconds()*t.Share > starvesDue {
			starving = append(starving, t)
		}
	}
	return starving
}

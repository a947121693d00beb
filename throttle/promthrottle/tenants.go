package promthrottle

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/quote"
)

const (
	tenantLabel = "tenant"

	// others is the label of tenants that have none of their own.
	others = "other"

	// maxSeen bounds the tenants that are counted between two reviews.
	maxSeen = 10_000

	// reviewEvery is how often tenants may lose their labels to others.
	reviewEvery = time.Minute
)

// tenants chooses the tenants that have labels of their own. As long as there are labels left the
// first ones get them. Every minute those with more than twice the events of one that has a label
// get its label.
type tenants struct {
	most int

	mu       sync.Mutex
	labelled map[string]bool
	reviewed time.Time
	seen     map[string]int64 // events since the last review, by label
}

// lock locks, if tenants are told apart, until what it returns is called: a series that is deleted
// must not be written to any more.
func (t *tenants) lock() (unlock func()) {
	if t.most == 0 {
		return func() {}
	}
	t.mu.Lock()
	return t.mu.Unlock
}

// label counts an event, and returns the tenant's label. Forget is called for labels that are no
// longer used. The lock is held.
func (t *tenants) label(tenant string, now time.Time, forget func(label string)) string {
	name := labelOf(tenant)
	if t.labelled == nil {
		t.labelled, t.seen, t.reviewed = map[string]bool{}, map[string]int64{}, now
	}
	if now.Sub(t.reviewed) >= reviewEvery {
		t.review(forget)
		t.reviewed = now
	}
	if _, known := t.seen[name]; known || len(t.seen) < maxSeen || t.labelled[name] {
		t.seen[name]++
	}
	if !t.labelled[name] && len(t.labelled) >= t.most {
		return others
	}
	t.labelled[name] = true
	return name
}

// review gives the labels of the least active tenants to more active ones.
func (t *tenants) review(forget func(label string)) {
	fewest := slices.SortedFunc(maps.Keys(t.labelled), func(a, b string) int {
		return cmp.Or(cmp.Compare(t.seen[a], t.seen[b]), cmp.Compare(a, b))
	})
	var rivals []string
	for name := range t.seen {
		if !t.labelled[name] {
			rivals = append(rivals, name)
		}
	}
	slices.SortFunc(rivals, func(a, b string) int {
		return cmp.Or(cmp.Compare(t.seen[b], t.seen[a]), cmp.Compare(a, b))
	})
	for i, rival := range rivals {
		if i >= len(fewest) || t.seen[rival] <= 2*t.seen[fewest[i]] {
			break
		}
		delete(t.labelled, fewest[i])
		forget(fewest[i])
		t.labelled[rival] = true
	}
	clear(t.seen)
}

// labelOf makes a label of a tenant's name: valid UTF-8, not long, and not that of the others. What
// does not print is quoted.
func labelOf(tenant string) string {
	name := strings.ToValidUTF8(quote.Short(tenant), "\uFFFD")
	if quoted := strconv.Quote(name); name == others || quoted[1:len(quoted)-1] != name {
		return quoted
	}
	return name
}

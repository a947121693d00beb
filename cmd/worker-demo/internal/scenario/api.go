package scenario

import (
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"time"
)

// An API is the third party of the scenario: an HTTP handler with published limits, which it
// enforces by code of its own and by its own clock. It shares nothing with package throttle:
// it keeps the time of every call that it served, and counts them.
type API struct {
	Latency time.Duration // how long an answer takes
	Limits  []APILimit
	Trouble Trouble

	mu      sync.Mutex
	begun   time.Time              // the first call
	refused map[string]int         // 429s, by tenant
	served  map[string][]time.Time // by tenant, oldest first; "" for all of them
}

// An APILimit is one published limit: so many calls in any span of that length.
type APILimit struct {
	Calls     int
	Name      string
	PerTenant bool
	Span      time.Duration
}

// A Trouble is a time in which an API grants half of one of its limits, without notice.
type Trouble struct {
	After, For time.Duration // after the first call
	Limit      string        // the limit's name
}

// ServeHTTP serves /TENANT/anything, or answers 429 with a Retry-After.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tenant, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if wait := a.admit(tenant); wait > 0 {
		w.Header().Set("Retry-After", fmt.Sprint(math.Ceil(wait.Seconds())))
		http.Error(w, "too many requests", http.StatusTooManyRequests)
		return
	}
	time.Sleep(a.Latency)
	fmt.Fprintln(w, "done")
}

// admit returns 0, or for how long the call has to stay away.
func (a *API) admit(tenant string) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if a.begun.IsZero() {
		a.begun = now
	}
	since, trouble := now.Sub(a.begun), a.Trouble
	for _, limit := range a.Limits {
		log, calls := a.served[limit.whom(tenant)], limit.Calls
		if limit.Name == trouble.Limit && since >= trouble.After && since < trouble.After+trouble.For {
			calls /= 2
		}
		if len(log) < calls {
			continue
		}
		if wait := log[len(log)-calls].Add(limit.Span).Sub(now); wait > 0 {
			if a.refused == nil {
				a.refused = map[string]int{}
			}
			a.refused[tenant]++
			return wait
		}
	}
	if a.served == nil {
		a.served = map[string][]time.Time{}
	}
	a.served[tenant] = append(a.served[tenant], now)
	a.served[""] = append(a.served[""], now)
	return 0
}

func (l APILimit) whom(tenant string) string {
	if l.PerTenant {
		return tenant
	}
	return ""
}

// Refused is how often the tenant was answered 429.
func (a *API) Refused(tenant string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refused[tenant]
}

// MostServed is the most calls that one span of the limit held, by the API's own log.
func (a *API) MostServed(limit APILimit, tenant string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	most, first := 0, 0
	log := a.served[limit.whom(tenant)]
	for i, at := range log {
		for at.Sub(log[first]) >= limit.Span {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}

package main

import (
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"time"
)

// An api is the third party: an HTTP handler with published limits, which it enforces by code of its
// own and by its own clock. It keeps the time of every call that it served, and counts them.
type api struct {
	latency      time.Duration // how long an answer takes
	limits       []limit
	troubleAfter time.Duration // after the first call it grants half of its last limit ...
	troubleFor   time.Duration // ... for so long

	mu     sync.Mutex
	begun  time.Time              // the first call
	served map[string][]time.Time // by tenant, oldest first; "" for all of them
}

// A limit is one that the API publishes: so many calls in any span of that length.
type limit struct {
	calls     int
	perTenant bool
	span      time.Duration
}

func (l limit) String() string {
	whose := "all tenants together"
	if l.perTenant {
		whose = "each tenant"
	}
	return fmt.Sprintf("%d calls per %v of %s", l.calls, l.span, whose)
}

func newAPI() *api {
	return &api{
		latency: 20 * time.Millisecond,
		limits: []limit{
			{calls: 4, perTenant: true, span: time.Second},
			{calls: 14, perTenant: true, span: 7 * time.Second},
			{calls: 8, span: time.Second},
		},
		troubleAfter: 2 * time.Second, troubleFor: 5 * time.Second,
		served: map[string][]time.Time{},
	}
}

// ServeHTTP serves /TENANT, or answers 429 with a Retry-After.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if wait := a.admit(strings.TrimPrefix(r.URL.Path, "/")); wait > 0 {
		w.Header().Set("Retry-After", fmt.Sprint(math.Ceil(wait.Seconds())))
		http.Error(w, "too many requests", http.StatusTooManyRequests)
		return
	}
	time.Sleep(a.latency)
	fmt.Fprintln(w, "done")
}

// admit returns 0, or for how long the call has to stay away.
func (a *api) admit(tenant string) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if a.begun.IsZero() {
		a.begun = now
	}
	for i, l := range a.limits {
		log, calls, since := a.served[l.whose(tenant)], l.calls, now.Sub(a.begun)
		if i == len(a.limits)-1 && since >= a.troubleAfter && since < a.troubleAfter+a.troubleFor {
			calls /= 2
		}
		if len(log) < calls {
			continue
		}
		if wait := log[len(log)-calls].Add(l.span).Sub(now); wait > 0 {
			return wait
		}
	}
	a.served[tenant] = append(a.served[tenant], now)
	a.served[""] = append(a.served[""], now)
	return 0
}

// whose is the log that counts for the limit.
func (l limit) whose(tenant string) string {
	if l.perTenant {
		return tenant
	}
	return ""
}

// mostServed is the most calls that one span of the limit held.
func (a *api) mostServed(l limit) (most int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for tenant, log := range a.served {
		if (tenant != "") != l.perTenant {
			continue
		}
		first := 0
		for i, at := range log {
			for at.Sub(log[first]) >= l.span {
				first++
			}
			most = max(most, i-first+1)
		}
	}
	return most
}

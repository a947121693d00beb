package main

import (
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"time"
)

// An api is the third party: an HTTP handler that publishes limits, and enforces them without Sluice. It keeps the
// times of all calls that it served.
type api struct {
	latency      time.Duration // of an answer
	limits       []limit
	troubleAfter time.Duration // from the first call until the API grants only half of its last limit
	troubleFor   time.Duration // from then until it grants the whole limit again

	mu     sync.Mutex
	begun  time.Time              // when the first call came
	served map[string][]time.Time // by tenant, oldest first; "" for all tenants
}

// A limit is the most calls that the API serves in any span of time of one length.
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

// admit counts a call that may be served and returns 0, or returns the time until it may be.
func (a *api) admit(tenant string) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if a.begun.IsZero() {
		a.begun = now
	}
	age := now.Sub(a.begun)
	inTrouble := age >= a.troubleAfter && age < a.troubleAfter+a.troubleFor
	for i, l := range a.limits {
		served, calls := a.served[""], l.calls
		if l.perTenant {
			served = a.served[tenant]
		}
		if i == len(a.limits)-1 && inTrouble {
			calls /= 2
		}
		if len(served) < calls {
			continue
		}
		if wait := served[len(served)-calls].Add(l.span).Sub(now); wait > 0 {
			return wait
		}
	}
	a.served[tenant] = append(a.served[tenant], now)
	a.served[""] = append(a.served[""], now)
	return 0
}

// mostServed returns the most calls that the API has served in one span of the limit.
func (a *api) mostServed(l limit) (most int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for tenant, served := range a.served {
		if ofTenant := tenant != ""; ofTenant != l.perTenant {
			continue
		}
		first := 0
		for i, at := range served {
			for at.Sub(served[first]) >= l.span {
				first++
			}
			most = max(most, i-first+1)
		}
	}
	return most
}

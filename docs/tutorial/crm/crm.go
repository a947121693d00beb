// Package crm is the third-party API of the tutorial, on a loopback port.
package crm

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"time"
)

// Start returns the address of an API that serves limit calls in any span of period. It refuses
// the others by 429, and does not count them.
func Start(limit int, period time.Duration) (url string, end func()) {
	api := &api{limit: limit, period: period}
	server := httptest.NewServer(api)
	return server.URL, server.Close
}

// StartBusy is Start for an API that also refuses the call numbered refused, once: somebody else
// has used up the limit.
func StartBusy(limit int, period time.Duration, refused int) (url string, end func()) {
	api := &api{limit: limit, period: period, refused: refused}
	server := httptest.NewServer(api)
	return server.URL, server.Close
}

type api struct {
	limit   int
	period  time.Duration
	refused int

	mu     sync.Mutex
	calls  int
	served []time.Time
}

func (a *api) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
	now := time.Now()
	a.served = slices.DeleteFunc(a.served, func(at time.Time) bool { return now.Sub(at) >= a.period })
	if len(a.served) >= a.limit || a.calls == a.refused {
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		return
	}
	a.served = append(a.served, now)
}

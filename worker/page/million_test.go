package page_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/worker/page"
)

// How long the page takes while 1,000,000 tickets of 100,000 tenants wait:
//
//	go test -run - -bench AtAMillion -benchtime 100x ./worker/page
func BenchmarkThePageAtAMillion(b *testing.B) {
	client := redis.NewClient(&redis.Options{Addr: servers.Redis(b).Addr, ReadTimeout: time.Minute})
	defer client.Close()
	limiter, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{{Name: "p", Windows: []throttle.Window{
		{Name: "shared", Limit: 100, Period: time.Second, Scope: throttle.ScopeShared}, {Name: "own", Limit: 5, Period: time.Minute},
	}}}})
	if err != nil {
		b.Fatal(err)
	}
	const tenants, each, chunk = 100_000, 10, 500
	for at := 0; at < tenants*each; at += chunk {
		requests := make([]throttle.Request, chunk)
		for i := range requests {
			n := at + i
			requests[i] = throttle.Request{Policy: "p", Tenant: fmt.Sprint("tenant-", n%tenants), Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(n)}}
		}
		if _, err := limiter.Line("p").Join(b.Context(), requests); err != nil {
			b.Fatal(err)
		}
	}
	store, err := control.NewStore(limiter)
	if err != nil {
		b.Fatal(err)
	}
	p, err := page.New(page.Config{Control: store, Limiter: limiter})
	if err != nil {
		b.Fatal(err)
	}
	for name, path := range map[string]string{"home": "/", "policy": "/?policy=p", "tenant": "/?policy=p&tenant=tenant-7"} {
		b.Run(name, func(b *testing.B) {
			var took []time.Duration
			for b.Loop() {
				time.Sleep(1010 * time.Millisecond) // what was asked is kept for a second
				begun := time.Now()
				w := httptest.NewRecorder()
				p.ServeHTTP(w, httptest.NewRequestWithContext(b.Context(), "GET", path, nil))
				if took = append(took, time.Since(begun)); w.Code != http.StatusOK {
					b.Fatal(w.Body)
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
			b.ReportMetric(0, "ns/op")
		})
	}
}

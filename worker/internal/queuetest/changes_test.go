package queuetest

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Limits and weights that are changed hold at once for those that wait, and also if it is a new
// worker that knows them.
func TestChangesActOnTheBacklog(t *testing.T) {
	t.Parallel()
	own := func(limit int64) map[string]throttle.Override {
		return map[string]throttle.Override{"window": {Limit: limit}}
	}
	type counts map[string]int
	for _, row := range []struct {
		name       string
		policy     throttle.Policy
		change     func(*throttle.Policy)
		soon, late counts // granted in the 5 s and in the half minute after
	}{
		{"limit raised", sitetest.Policy(5, 30*time.Second), func(p *throttle.Policy) { p.Windows[0].Limit = 15 },
			counts{"acme": 10, "beta": 10}, counts{"acme": 10 + 5, "beta": 10 + 5}},
		{"limit cut", sitetest.Policy(5, 30*time.Second), func(p *throttle.Policy) { p.Windows[0].Limit = 3 },
			counts{}, counts{"acme": 3, "beta": 3}},
		{"limit raised, shared", sitetest.Shared(6, 30*time.Second), func(p *throttle.Policy) { p.Windows[0].Limit = 20 },
			counts{"acme": 7, "beta": 7}, counts{"acme": 10, "beta": 10}},
		{"tenant's own limit", sitetest.Policy(5, 30*time.Second),
			func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Windows: own(15)}} },
			counts{"acme": 10}, counts{"acme": 10 + 5, "beta": 5}},
		{"tenant's own limit, beside a shared window", func() throttle.Policy {
			p := sitetest.Policy(5, 30*time.Second)
			p.Windows = append(p.Windows, throttle.Window{Name: "all", Limit: 1000, Period: time.Minute, Scope: throttle.ScopeShared})
			return p
		}(), func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Windows: own(15)}} },
			counts{"acme": 10}, counts{"acme": 10 + 5, "beta": 5}},
		{"weight", sitetest.Shared(10, 30*time.Second),
			func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Weight: 4}} },
			counts{}, counts{"acme": 8, "beta": 2}},
	} {
		for _, restart := range []bool{false, true} {
			if restart && row.name != "limit raised" && row.name != "weight" {
				continue // what is read at a start is the same for all
			}
			t.Run(fmt.Sprintf("%s, restart %v", row.name, restart), func(t *testing.T) {
				sitetest.Bubble(t, row.policy, func(t *testing.T, s *sitetest.Site) {
					l := sitetest.NewLedger()
					var limiters []*throttle.Limiter
					var servers []*worker.Server
					serve := func() {
						limiter := s.AnotherLimiter()
						limiters = append(limiters, limiter)
						own := sitetest.By(limiter)
						servers = append(servers, s.Serve(s.Ok, l.Watch, sitetest.Calm, own))
					}
					serve()
					serve()
					// No waiting task wakes within the test without a call.
					s.EnqueueMany("acme", 0, 25)
					s.EnqueueMany("beta", 0, 25)
					time.Sleep(15 * time.Second)
					before := l.Count()
					if restart {
						servers[0].Shutdown()
						servers[1].Shutdown()
						s.SetPolicy(row.change, s.Limiter)
						serve()
					} else {
						s.SetPolicy(row.change, limiters...)
					}
					for _, after := range []struct {
						sleep time.Duration
						want  counts
					}{{5 * time.Second, row.soon}, {24 * time.Second, row.late}} { // at 30 s some fit again
						time.Sleep(after.sleep)
						got := counts{}
						for _, g := range l.Sorted()[before:] {
							got[g.Tenant]++
						}
						if !maps.Equal(got, after.want) {
							t.Errorf("%v after the last look, granted: %v, want %v", after.sleep, got, after.want)
						}
					}
				})
			})
		}
	}
}

// A tenant that becomes exempt while its tasks wait leaves nothing in the line.
func TestATenantThatBecomesExemptLeavesTheLine(t *testing.T) {
	sitetest.Bubble(t, sitetest.Shared(1, time.Minute), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		s.Serve(s.Ok, l.Watch, sitetest.Calm)
		s.EnqueueMany("acme", 0, 5)
		time.Sleep(5 * time.Second)
		s.SetPolicy(func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Exempt: true}} }, s.Limiter)
		s.SleepUntil(l, 5, 5*time.Minute)
		s.WantNobodyInLine()
	})
}

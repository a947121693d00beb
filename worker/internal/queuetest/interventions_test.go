package queuetest

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// What operators put in force, and a policy that begins to observe, hold for the tasks that wait.
func TestInterventionsActOnTheBacklog(t *testing.T) {
	t.Parallel()
	pause := func(tenant string) func(s *sitetest.Site) {
		return func(s *sitetest.Site) {
			now := time.Now()
			s.Limiter.SetInterventions(throttle.Interventions{At: now, Pauses: []throttle.OperatorPause{
				{By: "anna", Policy: s.Limiter.Policies()[0].Name, Tenant: tenant, Until: now.Add(3 * time.Minute), Why: "it is down"},
			}})
		}
	}
	override := func(o throttle.TenantOverride) func(s *sitetest.Site) {
		return func(s *sitetest.Site) {
			now := time.Now()
			o.Policy, o.Tenant, o.Until = s.Limiter.Policies()[0].Name, "acme", now.Add(time.Hour)
			s.Limiter.SetInterventions(throttle.Interventions{At: now, Overrides: []throttle.TenantOverride{o}})
		}
	}
	for name, row := range map[string]struct {
		policy     throttle.Policy
		change     func(s *sitetest.Site)
		soon, late int           // tasks that have run 3 s and 2.5 minutes after the change
		all        time.Duration // after it all have run
	}{
		"a pause":             {sitetest.Policy(2, 10*time.Second), pause(""), 2, 2, 4 * time.Minute},
		"a pause of a tenant": {sitetest.Shared(2, 10*time.Second), pause("acme"), 2, 2, 4 * time.Minute},
		"an exempt tenant": {sitetest.Policy(2, 5*time.Minute), override(throttle.TenantOverride{Exempt: new(true)}),
			8, 8, 3 * time.Minute},
		"a higher limit": {sitetest.Policy(2, 5*time.Minute), override(throttle.TenantOverride{
			Windows: map[string]throttle.Override{"window": {Limit: 6}},
		}), 6, 6, 6 * time.Minute},
		"a policy that observes": {sitetest.Shared(2, 5*time.Minute), func(s *sitetest.Site) {
			s.SetPolicy(func(p *throttle.Policy) { p.Mode = throttle.ModeObserve }, s.Limiter)
		}, 8, 8, 3 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			sitetest.Bubble(t, row.policy, func(t *testing.T, s *sitetest.Site) {
				l := sitetest.NewLedger()
				s.Serve(s.Ok, l.Watch, sitetest.Calm)
				s.EnqueueMany("acme", 0, 3)
				s.JoinMany(s.Client(s.Limiter), "acme", 3, 3)
				time.Sleep(5 * time.Second)
				if n := len(s.Runs()); n != 2 {
					t.Fatalf("%d tasks have run before, want 2", n)
				}
				row.change(s)
				s.EnqueueMany("acme", 6, 2)
				time.Sleep(3 * time.Second)
				if n := len(s.Runs()); n != row.soon {
					t.Errorf("%d tasks have run 3 s after the change, want %d", n, row.soon)
				}
				time.Sleep(150*time.Second - 3*time.Second)
				if n := len(s.Runs()); n != row.late {
					t.Errorf("%d tasks have run 2.5 minutes after the change, want %d", n, row.late)
				}
				time.Sleep(row.all - 150*time.Second)
				if n := len(s.Runs()); n != 8 {
					t.Errorf("%d tasks have run in the end, want 8", n)
				}
				s.WantNobodyInLine()
				s.WantCounters(sitetest.Counters{Processed: 8})
			})
		})
	}
}

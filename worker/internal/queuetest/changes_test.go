package queuetest

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
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
		{"exempt", sitetest.Policy(5, 30*time.Second),
			func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Exempt: true}} },
			counts{"acme": 20}, counts{"acme": 20, "beta": 5}},
	} {
		for _, restart := range []bool{false, true} {
			if restart && row.name != "limit raised" && row.name != "weight" {
				continue // what is read at a start is the same for all
			}
			t.Run(fmt.Sprintf("%s, restart %v", row.name, restart), func(t *testing.T) {
				sitetest.Bubble(t, row.policy, func(t *testing.T, s *sitetest.Site) {
					var limiters []*throttle.Limiter
					var servers []*worker.Server
					serve := func() {
						limiter := s.AnotherLimiter()
						limiters = append(limiters, limiter)
						own := sitetest.By(limiter)
						servers = append(servers, s.Serve(s.Ok, sitetest.Calm, own))
					}
					serve()
					serve()
					// No waiting task wakes within the test without a call.
					s.EnqueueMany("acme", 0, 25)
					s.EnqueueMany("beta", 0, 25)
					time.Sleep(15 * time.Second)
					before := s.Granted()
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
						for _, g := range s.Grants()[before:] {
							got[g.Tenant]++
						}
						expect.That(t, maps.Equal(got, after.want),
							after.sleep, "after the last look, granted:", got, ", want", after.want)
					}
				})
			})
		}
	}
}

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
				s.Serve(s.Ok, sitetest.Calm)
				s.EnqueueMany("acme", 0, 3)
				s.JoinMany(s.Client(s.Limiter), "acme", 3, 3)
				time.Sleep(5 * time.Second)
				n := len(s.Runs())
				expect.Require(t, n == 2, n, "tasks have run before, want 2")
				row.change(s)
				s.EnqueueMany("acme", 6, 2)
				time.Sleep(3 * time.Second)
				expect.Equal(t, len(s.Runs()), row.soon, "tasks have run 3 s after the change")
				time.Sleep(150*time.Second - 3*time.Second)
				expect.Equal(t, len(s.Runs()), row.late, "tasks have run 2.5 minutes after the change")
				time.Sleep(row.all - 150*time.Second)
				expect.Equal(t, len(s.Runs()), 8, "tasks have run in the end, want 8")
				s.WantNobodyInLine()
				s.WantCounters(sitetest.Counters{Processed: 8})
			})
		})
	}
}

// wantEveryKeyToExpire checks until stop, or the end of the test, that all keys of ours have a TTL,
// in the limiter's Redis and in asynq's.
func wantEveryKeyToExpire(s *sitetest.Site) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	ctx := context.Background()
	go func() {
		defer close(ended)
		for seen := map[string]bool{}; ; {
			for _, key := range s.Redis.Keys(ctx, "*sluice*").Val() {
				if ttl := s.Redis.PTTL(ctx, key).Val(); ttl == -1 && !seen[key] { // in nanoseconds: -1 is no TTL
					seen[key] = true
					s.Errorf("%s does not expire", key)
				}
			}
			select {
			case <-done:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	return sync.OnceFunc(func() { close(done); <-ended })
}

// Policies change their shape while 60 tasks wait, half of them by a plain client. All tasks run,
// at the pace of the new policies. No key is left without an expiry.
func TestScenePoliciesChangeWhileTasksWait(t *testing.T) {
	own := throttle.Window{Name: "own", Limit: 10, Period: time.Second}
	all := throttle.Window{Name: "all", Limit: 20, Period: time.Second, Scope: throttle.ScopeShared}
	api := func(windows ...throttle.Window) throttle.Policy {
		return throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows}
	}
	renamed := api(own, all)
	renamed.Name = "renamed"
	for name, row := range map[string]struct {
		before throttle.Policy
		after  []throttle.Policy
	}{
		"the first shared window comes": {api(own), []throttle.Policy{api(own, all)}},
		"the last shared window goes":   {api(own, all), []throttle.Policy{api(own)}},
		"renamed":                       {api(own, all), []throttle.Policy{renamed}},
		"removed":                       {api(own, all), nil},
		"a window is renamed": {api(own, all), []throttle.Policy{api(own,
			throttle.Window{Name: "whole", Limit: 20, Period: time.Second, Scope: throttle.ScopeShared})}},
	} {
		t.Run(name, func(t *testing.T) {
			sitetest.OnRedis(t, append(idle(20), row.before), func(t *testing.T, s *sitetest.Site) {
				stop := wantEveryKeyToExpire(s)
				defer stop()
				limiters := []*throttle.Limiter{s.AnotherLimiter(), s.AnotherLimiter()}
				for _, limiter := range limiters {
					s.Serve(s.Ok, sitetest.By(limiter))
				}
				client := s.Client(s.AnotherLimiter())
				for i := range 60 {
					enqueue := client.Enqueue
					if i%2 == 1 {
						enqueue = s.Plain.Enqueue
					}
					_, err := enqueue(sitetest.Task([]string{"acme", "beta", "chip"}[i%3]), asynq.TaskID(fmt.Sprint(i)))
					sitetest.Must(t, err)
				}
				time.Sleep(200 * time.Millisecond)
				changed := time.Now()
				for _, limiter := range limiters {
					sitetest.Must(t, limiter.SetPolicies(append(idle(20), row.after...)))
					time.Sleep(50 * time.Millisecond)
				}
				// At 20 a second all run within three seconds. A task that is stranded waits for two minutes.
				s.Wait("all have run", func() bool { return s.Done() == 60 })
				t.Logf("all ran within %v", time.Since(changed))
				s.Wait("nobody is in line", func() bool { return len(s.InLine()) == 0 })
				s.WantOnceEach(t, 60)
				stop()
			})
		})
	}
}

// A limit is cut below the cost of tasks that wait. They fail once, by that, and no ticket outlives its
// task. The small tasks of other tenants go on at the full rate.
func TestSceneCutBelowTheCostOfWaitingTasks(t *testing.T) {
	const costly, small, limit = 20, 80, 6
	own := throttle.Window{Name: "own", Limit: 10, Period: time.Second}
	all := throttle.Window{Name: "all", Limit: 20, Period: time.Second, Scope: throttle.ScopeShared}
	p := throttle.Policy{Name: "api", Match: []string{"*"}, Windows: []throttle.Window{own, all}}
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprint("plain client ", plain), func(t *testing.T) {
			sitetest.Bubble(t, p, func(t *testing.T, s *sitetest.Site) {
				s.Serve(s.Ok, sitetest.Calm)
				enqueue := s.Client(s.AnotherLimiter()).Enqueue
				if plain {
					enqueue = s.Plain.Enqueue
				}
				for i := range costly + small {
					task := sitetest.Task([]string{"acme", "beta"}[i%2])
					if i < costly {
						task = sitetest.Task("big", map[string]int64{throttle.Requests: 7})
					}
					_, err := enqueue(task, asynq.TaskID(fmt.Sprintf("t%02d", i)), asynq.MaxRetry(0))
					sitetest.Must(t, err)
				}
				time.Sleep(1500 * time.Millisecond)
				s.SetPolicy(func(p *throttle.Policy) { p.Windows[1].Limit = limit }, s.Limiter)
				time.Sleep(small*time.Second/limit + 3*time.Second)
				big := len(s.GrantsOf("big"))
				expect.Equal(t, s.Granted()-big, small, "of", "small tasks have run")
				time.Sleep(3 * time.Minute)
				failed := int64(costly - big)
				s.WantCounters(sitetest.Counters{Processed: costly + small, Failed: failed, Archived: failed})
				archived, err := s.Inspector.ListArchivedTasks("default")
				sitetest.Must(t, err)
				for _, task := range archived {
					if !strings.Contains(task.LastErr, "cost of 7 requests never fits: the window holds 6 at most") {
						t.Errorf("%s failed by %q", task.ID, task.LastErr)
					}
				}
				s.WantNobodyInLine()
			})
		})
	}
}

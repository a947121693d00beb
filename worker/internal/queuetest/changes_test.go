package queuetest

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// What is changed holds at once for those that wait: limits and weights, what operators put in force,
// and the mode. It does also if it is a new worker that knows it.
func TestChangesActOnTheBacklog(t *testing.T) {
	t.Parallel()
	type changes func(s *sitetest.Site, limiters ...*throttle.Limiter)
	to := func(change func(*throttle.Policy)) changes {
		return func(s *sitetest.Site, limiters ...*throttle.Limiter) { s.SetPolicy(change, limiters...) }
	}
	pause := func(_ *sitetest.Site, limiters ...*throttle.Limiter) {
		for _, l := range limiters {
			l.SetInterventions(throttle.Interventions{At: time.Now(), Pauses: []throttle.Pause{
				{Author: "anna", Cause: "it is down", Policy: "api", Until: time.Now().Add(time.Hour)},
			}})
		}
	}
	type counts map[string]int
	for _, row := range []struct {
		name       string
		policy     throttle.Policy
		change     changes
		soon, late counts // granted in the 5 s and in the half minute after
	}{
		{"limit raised", sitetest.Policy(5, 30*time.Second), to(func(p *throttle.Policy) { p.Windows[0].Limit = 15 }),
			counts{"acme": 10, "beta": 10}, counts{"acme": 10 + 5, "beta": 10 + 5}},
		{"weight", sitetest.Shared(10, 30*time.Second),
			to(func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Weight: 4}} }),
			counts{}, counts{"acme": 8, "beta": 2}},
		{"exempt", sitetest.Policy(5, 30*time.Second),
			to(func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"acme": {Exempt: true}} }),
			counts{"acme": 20}, counts{"acme": 20, "beta": 5}},
		{"observes", sitetest.Policy(5, 30*time.Second), to(func(p *throttle.Policy) { p.Observe = true }),
			counts{"acme": 20, "beta": 20}, counts{"acme": 20, "beta": 20}},
		{"paused", sitetest.Policy(5, 30*time.Second), pause, counts{}, counts{}},
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
						servers = append(servers, s.Serve(s.Ok, sitetest.By(limiter)))
					}
					serve()
					serve()
					// No waiting task wakes within the test without a call.
					s.EnqueueMany("acme", 0, 25)
					s.EnqueueMany("beta", 0, 25)
					time.Sleep(15 * time.Second)
					granted := s.Granted()
					if restart {
						servers[0].Shutdown()
						servers[1].Shutdown()
						row.change(s, s.Limiter)
						serve()
					} else {
						row.change(s, limiters...)
					}
					for _, after := range []struct {
						sleep time.Duration
						want  counts
					}{{5 * time.Second, row.soon}, {24 * time.Second, row.late}} { // at 30 s some fit again
						time.Sleep(after.sleep)
						got := counts{}
						for _, g := range s.Grants()[granted:] {
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

// A limit is cut below the cost of tasks that wait. They fail once, by that, and no ticket outlives its
// task. The small tasks of other tenants go on at the full rate.
func TestCutBelowTheCostOfWaitingTasks(t *testing.T) {
	const costly, small, limit = 20, 80, 6
	perTenant := throttle.Window{Name: "own", Limit: 10, Period: time.Second}
	all := throttle.Window{Name: "all", Limit: 20, Period: time.Second, Shared: true}
	p := throttle.Policy{Name: "api", Match: []string{"*"}, Windows: []throttle.Window{perTenant, all}}
	sitetest.EachBubble(t, sitetest.Values(false, true), func(t *testing.T, plain bool) {
		s := sitetest.NewInBubble(t, p)
		s.Serve(s.Ok)
		enqueue := s.Client(s.AnotherLimiter()).Enqueue
		if plain {
			enqueue = s.Plain.Enqueue
		}
		for i := range costly + small {
			task := sitetest.Task([]string{"acme", "beta"}[i%2])
			if i < costly {
				task = sitetest.Task("big", map[string]int64{throttle.Requests: 7})
			}
			expect.Must(t, expect.ErrOf(enqueue(task, asynq.TaskID(fmt.Sprintf("t%02d", i)), asynq.MaxRetry(0))))
		}
		time.Sleep(1500 * time.Millisecond)
		s.SetPolicy(func(p *throttle.Policy) { p.Windows[1].Limit = limit }, s.Limiter)
		time.Sleep(small*time.Second/limit + 3*time.Second)
		big := len(s.GrantsOf("big"))
		expect.Equal(t, s.Granted()-big, small, "of", "small tasks have run")
		time.Sleep(3 * time.Minute)
		failed := int64(costly - big)
		s.WantCounters(sitetest.Counters{Processed: costly + small, Failed: failed, Archived: failed})
		archived := expect.Got(s.Inspector.ListArchivedTasks("default"))(t)
		for _, task := range archived {
			why := strings.Contains(task.LastErr, "cost requests 7: never fits: the window grants 6 at most")
			expect.That(t, why, task.ID, "failed by", task.LastErr)
		}
		s.WantNobodyInLine()
	})
}

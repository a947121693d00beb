package queuetest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A limit is cut below the cost of tasks that wait, or their tenant's weight to almost nothing. The
// small tasks of the other tenants go on at the full rate. What cannot fit any more fails once, by
// that, and no ticket outlives its task.
func TestSceneCutBelowTheCostOfWaitingTasks(t *testing.T) {
	t.Parallel()
	const costly, small = 20, 40 // small tasks of each of two tenants
	own := throttle.Window{Name: "own", Limit: 10, Period: time.Second}
	all := throttle.Window{Name: "all", Limit: 20, Period: time.Second, Scope: throttle.ScopeShared}
	p := throttle.Policy{Name: "api", Match: []string{"*"}, Windows: []throttle.Window{own, all}}
	for _, row := range []struct {
		name   string
		change func(*throttle.Policy)
		perSec int // how many small tasks run each second afterwards
		fail   bool
	}{
		{"the shared limit", func(p *throttle.Policy) { p.Windows[1].Limit = 6 }, 6, true},
		{"an override", func(p *throttle.Policy) {
			p.Tenants = map[string]throttle.Tenant{"big": {Windows: map[string]throttle.Override{"own": {Limit: 6}}}}
		}, 20, true},
		{"the weight", func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{"big": {Weight: 0.001}} }, 20, false},
	} {
		for _, plain := range []bool{false, true} {
			if plain && row.name != "the shared limit" {
				continue // its tasks are in the same line by then
			}
			t.Run(fmt.Sprintf("%s, plain client %v", row.name, plain), func(t *testing.T) {
				sitetest.Bubble(t, p, func(t *testing.T, s *sitetest.Site) {
					d := newDiary()
					limiter := s.AnotherLimiter()
					s.Serve(d.handle, d.watch, s.Apart, sitetest.Calm, sitetest.By(limiter))
					client := s.Client(s.AnotherLimiter())
					enqueue := func(tenant string, i int, cost int64) {
						who := worker.Identity{Tenant: tenant, Cost: map[string]int64{"requests": cost}}
						task := worker.NewTask(who, "x", fmt.Appendf(nil, "%s-%04d", tenant, i))
						var err error
						if plain {
							err = d.enqueue(s.Plain, task, asynq.MaxRetry(0))
						} else {
							err = d.plan(client, task, asynq.MaxRetry(0))
						}
						sitetest.Must(t, err)
					}
					for i := range costly {
						enqueue("big", i, 7)
					}
					for i := range small {
						enqueue("acme", i, 1)
						enqueue("beta", i, 1)
					}
					time.Sleep(1500 * time.Millisecond)
					before := d.ran()
					begun := time.Now()
					s.SetPolicy(row.change, limiter)
					time.Sleep(time.Duration(2*small)*time.Second/time.Duration(row.perSec) + 3*time.Second)
					bigStarts := 0
					d.mu.Lock()
					for payload, e := range d.tasks {
						if strings.HasPrefix(payload, "big") {
							bigStarts += len(e.starts)
						} else if len(e.starts) != 1 {
							t.Errorf("%s started %d times within %v", payload, len(e.starts), time.Since(begun))
						}
					}
					d.mu.Unlock()
					t.Logf("%d had run before, %d of %d costly ones %v after", before, bigStarts, costly, time.Since(begun))
					time.Sleep(3 * time.Minute)
					if row.fail {
						failed := int64(costly - bigStarts)
						s.WantCounters(sitetest.Counters{Processed: costly + 2*small, Failed: failed, Archived: failed})
						archived, err := s.Inspector.ListArchivedTasks("default")
						sitetest.Must(t, err)
						for _, task := range archived {
							if !strings.Contains(task.LastErr, "cost of 7 requests never fits: the window holds 6 at most") {
								t.Errorf("%s failed by %q", task.ID, task.LastErr)
							}
						}
					} else {
						s.WantCounters(sitetest.Counters{Processed: costly + 2*small})
					}
					s.WantNobodyInLine()
				})
			})
		}
	}
}

package faulttest

import (
	"context"
	"fmt"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// inShards is a policy whose tenants are in that many shards.
func inShards(shards, limit int, period time.Duration) throttle.Policy {
	return throttle.Policy{Name: "api", Match: []string{"*"}, Shards: shards, Windows: []throttle.Window{
		{Name: "each", Limit: int64(limit), Period: period},
	}}
}

// Tasks of all shards, of our client and of plain ones, start in order and at once when they fit,
// also those that wait while the number of shards changes.
func TestTasksWaitInTheLinesOfShards(t *testing.T) {
	const tenants, each, limit, period = 6, 8, 2, time.Minute
	sitetest.Bubble(t, inShards(3, limit, period), func(t *testing.T, s *sitetest.Site) {
		s.Serve(s.Ok)
		client := s.Client(s.Limiter)
		for i := range each {
			for tenant := range tenants {
				task := worker.NewTask(worker.Identity{Tenant: fmt.Sprint("tenant", tenant)}, "api:x", nil)
				id := asynq.TaskID(fmt.Sprint(tenant, "-", i))
				if i >= 6 {
					s.Enqueue(task, id)
				} else if _, err := client.Enqueue(task, id); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(time.Second)
		}
		lines := map[string]bool{}
		for tenant := range tenants {
			lines[s.Limiter.LineOf("api", fmt.Sprint("tenant", tenant))] = true
		}
		expect.Require(t, len(lines) == 3, "all tenants are in", lines)
		check := func(from time.Time, wants int) {
			t.Helper()
			byTenant := map[string][]sitetest.TaskGrant{}
			for _, g := range s.Grants() {
				if !g.At.Before(from) {
					byTenant[g.Tenant] = append(byTenant[g.Tenant], g)
				}
			}
			for tenant, all := range byTenant {
				for i := limit; i < len(all); i++ {
					if apart := all[i].At.Sub(all[i-limit].At); apart < period || apart > period+sitetest.Spacing {
						t.Errorf("%s: task %s started %v after the one %d before it", tenant, all[i].ID, apart, limit)
					}
				}
				for i, g := range all {
					want := fmt.Sprint(tenant[len("tenant"):], "-", i+each-wants)
					expect.That(t, g.ID == want || i+each-wants >= 6, tenant, "task", g.ID, "started before", want)
				}
			}
			expect.Equal(t, len(byTenant), tenants, "tasks of", "tenants ran")
		}
		time.Sleep(period)
		check(time.Time{}, each)
		expect.Equal(t, s.Granted(), tenants*2*limit, "tasks ran within two periods")
		changed := time.Now()
		expect.Must(t, s.Limiter.SetPolicies([]throttle.Policy{inShards(2, limit, period)}))
		s.SleepUntil(tenants*each, 5*time.Minute)
		check(changed, each-2*limit)
		time.Sleep(time.Minute)
		expect.Equal(t, len(s.Limiter.Lines()), 2, "lines, and all tasks have run")
	})
}

// Tenants of one policy share the slots by weight, whatever shards they are in: here one is alone in
// its shard. A shard's turn is both slots, and a tenant's in its shard is a task.
func TestShardsShareSlotsByWeight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := inShards(3, 1000, time.Hour)
		s := sitetest.NewInBubble(t, p)
		weights := map[string]float64{}
		for i, alone := 0, false; len(weights) < 5; i++ {
			switch tenant := fmt.Sprint("tenant", i); s.Limiter.LineOf("api", tenant) {
			case "api/1of3":
				if !alone {
					weights[tenant], alone = 1, true
				}
			case "api/2of3":
				if alone {
					weights[tenant] = 1
				}
			}
		}
		p.Tenants = map[string]throttle.Tenant{}
		for tenant := range weights {
			if s.Limiter.LineOf("api", tenant) == "api/2of3" {
				weights[tenant] = 3
				break
			}
		}
		sum := 0.0
		for tenant, weight := range weights {
			p.Tenants[tenant], sum = throttle.Tenant{Weight: weight}, sum+weight
		}
		expect.Must(t, s.Limiter.SetPolicies([]throttle.Policy{p}))
		client := s.Client(s.Limiter)
		for tenant := range weights {
			var tasks []*asynq.Task
			for range 50 {
				tasks = append(tasks, sitetest.Task(tenant))
			}
			for _, e := range client.EnqueueBulk(t.Context(), tasks) {
				expect.Must(t, e.Err)
			}
		}
		second := func(context.Context, *asynq.Task) error { time.Sleep(time.Second); return nil }
		two := func(c *asynq.Config, _ *worker.Config) { c.Concurrency = 2 }
		s.Serve(second, two)
		s.SleepUntil(105, 2*time.Minute)
		got := map[string]int{}
		for _, g := range s.Grants()[:105] {
			got[g.Tenant]++
		}
		shards, mates := map[string]float64{}, map[string]map[string]float64{}
		for tenant, weight := range weights {
			shard := s.Limiter.LineOf("api", tenant)
			if mates[shard] == nil {
				mates[shard] = map[string]float64{}
			}
			shards[shard], mates[shard][tenant] = shards[shard]+weight, weight
		}
		for tenant, weight := range weights {
			shard := s.Limiter.LineOf("api", tenant)
			within := offMean(shards, shard, 2) + offMean(mates[shard], tenant, 1)
			if off := float64(got[tenant])/weight - 105/sum; math.Abs(off) > within {
				t.Errorf("%s of weight %v has %d of 105, want %.0f, and %.1f more or less", tenant, weight, got[tenant], 105*weight/sum, within*weight)
			}
		}
	})
}

// offMean returns how far, in units for a weight of 1, one may be from the mean of all. By
// start-time fair queueing each two of them differ by one turn of each.
func offMean(weights map[string]float64, one string, turn float64) (off float64) {
	sum := 0.0
	for _, weight := range weights {
		sum += weight
	}
	for name, weight := range weights {
		if name != one {
			off += weight / sum * (turn/weights[one] + turn/weight)
		}
	}
	return off
}

// Many servers with two slots each take from one line of 500 a second. Nothing runs twice, and no limit is exceeded.
func TestAFleetSharesOneLine(t *testing.T) {
	const servers, limit, period, n = 20, 50, 100 * time.Millisecond, 1000
	s := sitetest.OnRedis(t, sitetest.Shared(limit, period))
	var tasks []*asynq.Task
	for i := range n {
		tasks = append(tasks, worker.NewTask(worker.Identity{Tenant: fmt.Sprint("tenant", i%10)}, "x", nil))
	}
	for _, enqueued := range s.Client(s.AnotherLimiter()).EnqueueBulk(t.Context(), tasks) {
		expect.Must(t, enqueued.Err)
	}
	var all []*worker.Server
	two := func(c *asynq.Config, _ *worker.Config) { c.Concurrency = 2 }
	for range servers {
		all = append(all, s.Serve(s.Ok, sitetest.Calm, s.Apart, two))
	}
	s.Wait("all have run", func() bool { return s.Done() == n })
	s.WantOnceEach(t, n)
	sitetest.WantNeverOver(t, s.Grants(), limit, period)
	var ended sync.WaitGroup // one after the other they would take half a minute
	for _, server := range all {
		ended.Go(server.Shutdown)
	}
	ended.Wait()
}

// A client learns later than a server that a policy has another line: its tasks start at once all the same.
func TestATaskThatJoinsARemovedLineStarts(t *testing.T) {
	sitetest.Bubble(t, inShards(1, 100, time.Minute), func(t *testing.T, s *sitetest.Site) {
		client := s.Client(s.AnotherLimiter())
		s.Serve(s.Ok)
		expect.Must(t, s.Limiter.SetPolicies([]throttle.Policy{inShards(2, 100, time.Minute)}))
		for n := range 3 {
			expect.Must(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask())))
			s.SleepUntil(n+1, time.Second)
		}
	})
}

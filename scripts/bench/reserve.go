package main

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// A reserveFunc asks once for units, and returns whether they were granted.
type reserveFunc func(ctx context.Context, tenant string, cost int) bool

// ourReserve returns a reserve by our limiter with these windows. The tenant is also the user.
func ourReserve(client redis.UniversalClient, policy string, windows ...throttle.Window) reserveFunc {
	l := must(throttle.New(throttle.Config{
		Client:   client,
		Policies: []throttle.Policy{{Name: policy, Windows: windows}},
	}))
	return func(ctx context.Context, tenant string, cost int) bool {
		return must(l.Reserve(ctx, throttle.Request{
			Policy: policy, Tenant: tenant,
			Attributes: map[string]string{"user": tenant},
			Cost:       map[string]int64{throttle.Requests: int64(cost)},
		})).Granted
	}
}

// twoExact returns two sliding windows of each tenant that never deny here.
func twoExact() []throttle.Window {
	return []throttle.Window{
		{Name: "second", Limit: 100_000, Period: time.Second},
		{Name: "minute", Limit: 1_000_000, Period: time.Minute},
	}
}

func rateReserve(client redis.UniversalClient) reserveFunc {
	l := redis_rate.NewLimiter(client)
	limit := redis_rate.Limit{Rate: 100_000, Burst: 100_000, Period: time.Second}
	return func(ctx context.Context, tenant string, cost int) bool {
		return must(l.AllowN(ctx, tenant, limit, cost)).Allowed > 0
	}
}

// caseReserve: two exact windows by many goroutines, against one call of redis_rate.
func caseReserve(ctx context.Context, o scenarioOptions) []figure {
	const goroutines = 64
	s := newReserveTestbed(ctx, o, goroutines)
	n := o.size(10_000, 80_000)
	return medians(o.rounds, func(round int) []figure {
		var all []figure
		for _, c := range []struct {
			name    string
			tenants int
			cpu     float64
		}{{"10 tenants", 10, 0.7}, {"all different", math.MaxInt, 1.0}} {
			costs := s.compareRedisRate(ctx, n, c.tenants, goroutines)
			o.say("round %d of %d, %s: redis_rate %v; ours %v", round+1, o.rounds, c.name, costs[0], costs[1])
			throughput, cpu := costs[0].each/costs[1].each, costs[1].cpu/costs[0].cpu
			all = append(all,
				figure{Name: c.name + ": throughput, beside redis_rate", Value: throughput, AtLeast: new(2.)},
				figure{Name: c.name + ": Redis CPU a decision, beside redis_rate's", Value: cpu, AtMost: &c.cpu},
			)
		}
		return all
	})
}

// caseReserveOne: the same by one goroutine, which waits for each answer.
func caseReserveOne(ctx context.Context, o scenarioOptions) []figure {
	s := newReserveTestbed(ctx, o, 1)
	return medians(o.rounds, func(round int) []figure {
		costs := s.compareRedisRate(ctx, o.size(2_000, 10_000), 10, 1)
		o.say("round %d of %d: redis_rate %v; ours %v", round+1, o.rounds, costs[0], costs[1])
		return []figure{
			{Name: "time a call, beside redis_rate's", Value: costs[1].each / costs[0].each, AtMost: new(1.2)},
			{Name: "Redis CPU a decision, beside redis_rate's", Value: costs[1].cpu / costs[0].cpu},
		}
	})
}

// compareRedisRate returns the costs of redis_rate, and of two exact windows of ours.
func (s *reserveTestbed) compareRedisRate(ctx context.Context, n, tenants, goroutines int) []cost {
	ours := ourReserve(s.askers, "bench", twoExact()...)
	return s.compare(ctx, n, tenants, goroutines, rateReserve(s.askers), ours)
}

// caseShapes: policies of other shapes against two windows in one scope, by single calls.
func caseShapes(ctx context.Context, o scenarioOptions) []figure {
	window := func(name string, period time.Duration, per ...string) throttle.Window {
		return throttle.Window{Name: name, Limit: 1_000_000, Period: period, Per: per}
	}
	shapes := [][]throttle.Window{
		{window("second", time.Second), window("minute", time.Minute)},
		{window("second", time.Second), window("user", time.Minute, "tenant", "user")},
		{
			window("second", time.Second), window("minute", time.Minute), window("hour", time.Hour),
			window("day", 24*time.Hour), window("week", 7*24*time.Hour),
		},
	}
	s := newReserveTestbed(ctx, o, 1)
	var reserves []reserveFunc
	for i, windows := range shapes {
		reserves = append(reserves, ourReserve(s.askers, fmt.Sprint("shape-", i), windows...))
	}
	return medians(o.rounds, func(round int) []figure {
		costs := s.compare(ctx, o.size(2_000, 8_000), 100, 1, reserves...)
		two, scopes, five := costs[0], costs[1], costs[2]
		o.say("round %d of %d: two windows %v; two scopes %v; five windows %v", round+1, o.rounds, two, scopes, five)
		const cpu = ": Redis CPU a decision, beside two windows in one scope"
		return []figure{
			{Name: "two scopes with a window each" + cpu, Value: scopes.cpu / two.cpu, AtMost: new(1.3)},
			{Name: "five windows in one scope" + cpu, Value: five.cpu / two.cpu, AtMost: new(2.)},
		}
	})
}

// A reserveTestbed is a testbed with connections for goroutines that reserve.
type reserveTestbed struct {
	*testbed
	askers *redis.Client
}

func newReserveTestbed(ctx context.Context, o scenarioOptions, connections int) *reserveTestbed {
	s := newTestbed(o)
	s.learnIdle(ctx, nil)
	askers := redis.NewClient(&redis.Options{Addr: s.addr(), PoolSize: connections})
	o.cleanup(func() { askers.Close() })
	return &reserveTestbed{s, askers}
}

// compare calls each limiter n times, for tenants in turn. All calls must be granted.
func (s *reserveTestbed) compare(ctx context.Context, n, tenants, goroutines int, reserves ...reserveFunc) []cost {
	s.clear(ctx)
	var sides []func() int
	for _, reserve := range reserves {
		asked := 0
		sides = append(sides, func() int {
			from := asked
			asked += n / turns
			inParallel(n/turns, goroutines, func(i int) {
				if !reserve(ctx, "tenant-"+strconv.Itoa((from+i)%tenants), 1) {
					fail("a call was denied, and all should fit")
				}
			})
			return n / turns
		})
	}
	for _, act := range sides { // makes connections and loads scripts
		act()
	}
	return s.inTurns(ctx, sides...)
}

// caseReset: the rule by which a denied task comes back at the earliest reset.
func caseReset(ctx context.Context, o scenarioOptions) []figure {
	policy := policyOf(shared("shared", 20, 2300*time.Millisecond)) // resets are rarely on a whole second
	policy.EarliestReset = true
	s := newTestbed(o)
	return medians(o.rounds, func(int) []figure {
		var mu sync.Mutex
		resets := map[string]time.Time{} // as the last denial of a task said
		c := crew{policy: &policy, slots: 32, denied: func(id string, d throttle.Decision) {
			mu.Lock()
			defer mu.Unlock()
			resets[id] = d.At.Add(d.EarliestReset())
		}}
		ours := s.drainOurs(ctx, c, tasks(o.size(60, 200), 10))
		var late []time.Duration
		for _, s := range ours.starts {
			if reset, denied := resets[s.id]; denied {
				late = append(late, s.at.Sub(reset))
			}
		}
		return []figure{
			{Name: "reset to start p99", Value: quantile(late, 0.99).Seconds(), Unit: "s", AtMost: new(1.2)},
			{Name: "reset to start p50", Value: quantile(late, 0.5).Seconds(), Unit: "s"},
			{Name: "reset to start, earliest", Value: quantile(late, 0).Seconds(), Unit: "s", AtLeast: new(0.)},
			{Name: "wakes a task", Value: ours.wakes},
		}
	})
}

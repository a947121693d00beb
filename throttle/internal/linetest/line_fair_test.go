package linetest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// joinMany puts n tickets of a tenant in the line of a queue: "TENANT0", "TENANT1", ...
func (sc *scene) joinMany(queue, tenant string, n int) {
	sc.t.Helper()
	var requests []throttle.Request
	for i := range n {
		r := sc.of(tenant)
		r.Tenant, r.Ticket = tenant, throttle.Ticket{Queue: queue, ID: fmt.Sprint(tenant, i)}
		r.Cost = map[string]int64{"requests": sc.cost}
		requests = append(requests, r)
	}
	limitertest.Join(sc.t, sc.l, requests...)
}

// shares takes n tickets, never more than `most` at once, and returns how many units each tenant
// got. Time goes on as the line says.
func (sc *scene) shares(n, most int, queues ...string) map[string]int64 {
	sc.t.Helper()
	got := map[string]int64{}
	for n > 0 {
		taken := limitertest.Take(sc.t, sc.l, min(n, most), queues...)
		for _, ticket := range taken.Tickets {
			got[ticket.Decision.Tenant] += ticket.Decision.Reservation.Cost["requests"]
			n--
		}
		if taken.Next < 0 {
			sc.t.Fatalf("%d more were to be taken", n)
		}
		sc.c.US.Add(taken.Next.Microseconds())
	}
	return got
}

// inShares fails unless got are the units of tenants that had a backlog all the while, and had no
// ticket of a larger cost. None is ahead of another by more than a ticket of each: the bound of
// start-time fair queueing.
func (sc *scene) inShares(got map[string]int64, weights map[string]float64, cost int64) {
	sc.t.Helper()
	for one, w := range weights {
		for other, v := range weights { // multiplied by both weights, which have exact products
			if ahead := float64(got[one])*v - float64(got[other])*w; ahead > float64(cost)*(v+w) {
				sc.t.Fatalf("%s got %d units and %s %d, by the weights %v", one, got[one], other, got[other], weights)
			}
		}
	}
}

func weighted(weights map[string]float64, windows ...throttle.Window) throttle.Policy {
	p := limitertest.Policy(windows...)
	p.Tenants = map[string]throttle.Tenant{}
	for tenant, weight := range weights {
		p.Tenants[tenant] = throttle.Tenant{Weight: weight}
	}
	return p
}

// At a shared window tenants share by weight while several wait. One that comes later has no credit
// for the time before. What one does not use, the others do.
func TestSharesOfAWindow(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, weighted(map[string]float64{"d": 2, "e": 0.25}, limitertest.SharedWindow(50, s)))
		sc.joinMany("q", "a", 700)
		if got := sc.shares(200, 16, "q"); got["a"] != 200 {
			t.Errorf("alone it got %v", got)
		}
		sc.joinMany("q", "b", 400)
		sc.joinMany("q", "d", 400)
		sc.inShares(sc.shares(400, 16, "q"), map[string]float64{"a": 1, "b": 1, "d": 2}, sc.cost)
		sc.joinMany("q", "e", 100)
		sc.inShares(sc.shares(340, 16, "q"), map[string]float64{"a": 1, "b": 1, "d": 2, "e": 0.25}, sc.cost)
		sc.shares(200, 16, "q") // d is done
		sc.inShares(sc.shares(90, 16, "q"), map[string]float64{"a": 1, "b": 1, "e": 0.25}, sc.cost)
		limitertest.Agrees(t, client)
	})
}

// Where no window binds, handler slots are shared in the same way.
func TestSharesOfSlots(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		own := throttle.Window{Name: "own", Limit: 1e6, Period: s}
		for name, windows := range map[string][]throttle.Window{"own": {own}, "shared": {own, limitertest.SharedWindow(1e6, s)}} {
			for _, most := range []int{1, 16} {
				sc := newScene(t, client, limitertest.Policy(windows...))
				sc.joinMany("q", "bulk", 1000)
				for i := range 9 {
					sc.joinMany("q", fmt.Sprint("live", i), 20)
				}
				for tenant, n := range sc.shares(190, most, "q") { // as if by turns, among ten
					if n != 19 {
						t.Errorf("%s, %d: %s got %d of 190", name, most, tenant, n)
					}
				}
				if got := sc.shares(100, most, "q"); got["bulk"] != 91 { // each of the others had one left
					t.Errorf("%s, %d: %v", name, most, got)
				}
			}
		}
	})
}

// Weights hold in each queue, independently of other queues.
func TestSharesOfQueues(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, weighted(map[string]float64{"b": 3}, limitertest.SharedWindow(40, s)))
		for _, queue := range []string{"q1", "q2"} {
			sc.joinMany(queue, "a", 400)
			sc.joinMany(queue, "b", 400)
		}
		for i := range 10 {
			queue := []string{"q1", "q2"}[i%2]
			sc.inShares(sc.shares(80, 8, queue), map[string]float64{"a": 1, "b": 3}, sc.cost)
		}
	})
}

// Shares are kept at every moment, whatever tickets cost.
func TestFairAtEveryMoment(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		weights := map[string]float64{"a": 1, "b": 3, "c": 0.5, "d": 1}
		sc := newScene(t, client, weighted(weights, limitertest.SharedWindow(20, s)))
		random := rand.New(rand.NewPCG(5, 6))
		const largest = 6
		left := map[string]int{}
		for i := range 400 {
			sc.cost = 1 + random.Int64N(largest)
			tenant := "abcd"[i%4 : i%4+1]
			sc.joins(fmt.Sprint(tenant, i))
			left[tenant]++
		}
		got, backlog := map[string]int64{}, true
		for backlog {
			taken := limitertest.Take(t, sc.l, 16, "q")
			for _, ticket := range taken.Tickets {
				tenant := ticket.Decision.Tenant
				got[tenant] += ticket.Decision.Reservation.Cost["requests"]
				if left[tenant]--; left[tenant] == 0 {
					backlog = false
					break
				}
				sc.inShares(got, weights, largest)
			}
			sc.c.US.Add(taken.Next.Microseconds())
		}
	})
}

// A tenant with many users, or in many regions, has one share.
func TestSharesOfATenantWithManyFlows(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		for name, other := range map[string]throttle.Window{
			"nested":   {Name: "user", Limit: 30, Period: s, Scope: throttle.Per("tenant", "user")},
			"crossing": {Name: "region", Limit: 30, Period: s, Scope: throttle.Per("region")},
		} {
			sc := newScene(t, client, limitertest.Policy(throttle.Window{Name: "own", Limit: 1000, Period: s}, other, limitertest.SharedWindow(20, s)))
			for i := range 8 {
				sc.with = map[string]string{"user": fmt.Sprint("u", i), "region": fmt.Sprint("r", i%4)}
				for n := range 40 {
					sc.joins(fmt.Sprintf("a/%d/%d", i, n))
				}
			}
			sc.with = map[string]string{"user": "bob", "region": "r9"}
			sc.joinMany("q", "b", 100)
			t.Log(name)
			sc.inShares(sc.shares(160, 8, "q"), map[string]float64{"a": 1, "b": 1}, sc.cost)
			limitertest.Agrees(t, client)
		}
	})
}

// What a tenant was ahead by when it left is kept until the others have caught up, and no longer.
func TestTagsOfTenantsThatLeft(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		for name, windows := range map[string][]throttle.Window{
			"one scope":    {limitertest.SharedWindow(10, s)},
			"three scopes": {limitertest.SharedWindow(10, s), {Name: "region", Limit: 100, Period: s, Scope: throttle.Per("region")}},
		} {
			weights := map[string]float64{}
			for i := range 50 {
				weights[fmt.Sprint("visitor", i)] = 0.2 // a visit moves the tag by what five others take
			}
			sc := newScene(t, client, weighted(weights, windows...))
			sc.with = map[string]string{"region": "north"}
			sc.joinMany("q", "bulk", 600)
			most := 0
			for i := range 50 {
				sc.joinMany("q", fmt.Sprint("visitor", i), 1)
				for _, n := range []int{3, 7} { // the others catch up in between
					sc.shares(n, 1, "q")
					for key, set := range limitertest.ReadLine(t, client).Sets {
						if strings.HasPrefix(key, "g:") {
							most = max(most, len(set))
						}
					}
				}
			}
			if most == 0 || most > 3 {
				t.Errorf("%s: %d tags were kept at most", name, most)
			}
			limitertest.Agrees(t, client)
		}
		// Leaving and coming again is no way to be first.
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(1, s)))
		sc.at(h)
		limitertest.Must(t, client.FlushDB(t.Context()).Err())
		sc.joinMany("q", "b", 20)
		got := map[string]int64{}
		for i := range 20 {
			sc.joins(fmt.Sprint("a", i))
			for _, ticket := range limitertest.Take(t, sc.at(h+time.Duration(i)*s).l, 1, "q").Tickets {
				got[ticket.Decision.Tenant]++
			}
		}
		if got["a"] != 10 || got["b"] != 10 {
			t.Errorf("of 20 starts %v", got)
		}
	})
}

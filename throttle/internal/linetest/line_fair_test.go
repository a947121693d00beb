package linetest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// At a shared window tenants share by weight while several wait. One that comes later has no credit
// for the time before. What one does not use, the others do.
func TestSharesOfAWindow(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), weighted(map[string]float64{"d": 2, "e": 0.25}, limitertest.SharedWindow(50, s)))
	st.joinMany("q", "a", 700)
	expect.Equal(t, st.shares(200, 16, "q")["a"], 200)
	st.joinMany("q", "b", 400)
	st.joinMany("q", "d", 400)
	st.inShares(st.shares(400, 16, "q"), map[string]float64{"a": 1, "b": 1, "d": 2}, st.cost)
	st.joinMany("q", "e", 100)
	st.inShares(st.shares(340, 16, "q"), map[string]float64{"a": 1, "b": 1, "d": 2, "e": 0.25}, st.cost)
	st.shares(200, 16, "q") // d is done
	st.inShares(st.shares(90, 16, "q"), map[string]float64{"a": 1, "b": 1, "e": 0.25}, st.cost)
}

// Where no window binds, handler slots are shared in the same way.
func TestSharesOfSlots(t *testing.T) {
	client := limitertest.RedisClient(t)
	tenantWindow := throttle.Window{Name: "own", Limit: 1e6, Period: s}
	for name, windows := range map[string][]throttle.Window{"own": {tenantWindow}, "shared": {tenantWindow, limitertest.SharedWindow(1e6, s)}} {
		for _, most := range []int{1, 16} {
			st := newStory(t, client, limitertest.Policy(windows...))
			st.joinMany("q", "bulk", 1000)
			for i := range 9 {
				st.joinMany("q", fmt.Sprint("live", i), 20)
			}
			for tenant, n := range st.shares(190, most, "q") { // as if by turns, among ten
				expect.Equal(t, n, 19, name, most, tenant)
			}
			expect.Equal(t, st.shares(100, most, "q")["bulk"], 91, name, most) // each of the others had one left
		}
	}
}

// Weights hold however small a part of a window a ticket takes.
func TestSharesOfAHugeWindow(t *testing.T) {
	weights := map[string]float64{"a": 10, "b": 100, "c": 1000}
	st := newStory(t, limitertest.RedisClient(t), weighted(weights, limitertest.SharedWindow(throttle.MaxLimit, s)))
	for tenant := range weights {
		st.joinMany("q", tenant, 1200)
	}
	st.inShares(st.shares(1110, 16, "q"), weights, st.cost)
}

// A ticket that is put back goes before those that joined later, however its tenant's tag was rounded.
func TestAnEqualTenantDoesNotPassWhatIsPutBack(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(7, s)))
	for i := range 40 {
		st.joins(fmt.Sprint("a", i), fmt.Sprint("b", i))
	}
	for i := range 80 {
		st.at(time.Duration(i) * s)
		ticket := fmt.Sprint([]string{"a", "b"}[i%2], i/2)
		expect.Equal(t, ids(st.take(1)), []string{ticket})
		st.putBack(ticket)
		expect.Equal(t, ids(st.take(1)), []string{ticket}, "again")
	}
}

// Only a taken ticket moves its tenant's tag. So the refund of what Reserve granted moves none back.
func TestARefundOfAReservationEarnsNoTurns(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(40, h)))
	var held []throttle.TakenTicket
	for range 40 {
		held = append(held, throttle.TakenTicket{Ticket: limitertest.Ticket("a"), Decision: st.granted("a")})
	}
	st.joinMany("q", "b", 60)
	st.joinMany("q", "a", 60)
	got := map[string]int{}
	for i := range held {
		expect.Must(t, st.line().Refund(t.Context(), held[i:i+1]))
		for _, ticket := range st.take(5) {
			got[ticket.Decision.Reservation.Tenant]++
		}
	}
	expect.Equal(t, got, map[string]int{"a": 20, "b": 20})
}

// Weights hold in each queue, independently of other queues.
func TestSharesOfQueues(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), weighted(map[string]float64{"b": 3}, limitertest.SharedWindow(40, s)))
	for _, queue := range []string{"q1", "q2"} {
		st.joinMany(queue, "a", 400)
		st.joinMany(queue, "b", 400)
	}
	for i := range 10 {
		queue := []string{"q1", "q2"}[i%2]
		st.inShares(st.shares(80, 8, queue), map[string]float64{"a": 1, "b": 3}, st.cost)
	}
}

// Shares are kept at every moment, whatever tickets cost.
func TestFairAtEveryMoment(t *testing.T) {
	weights := map[string]float64{"a": 1, "b": 3, "c": 0.5, "d": 1}
	st := newStory(t, limitertest.RedisClient(t), weighted(weights, limitertest.SharedWindow(20, s)))
	random := rand.New(rand.NewPCG(5, 6))
	const largest = 6
	left := map[string]int{}
	for i := range 400 {
		st.cost = 1 + random.Int64N(largest)
		tenant := "abcd"[i%4 : i%4+1]
		st.joins(fmt.Sprint(tenant, i))
		left[tenant]++
	}
	got, backlog := map[string]int64{}, true
	for backlog {
		taken := limitertest.Take(t, st.l, 16, "q")
		for _, ticket := range taken.Tickets {
			tenant := ticket.Decision.Tenant
			got[tenant] += ticket.Decision.Reservation.Cost["requests"]
			if left[tenant]--; left[tenant] == 0 {
				backlog = false
				break
			}
			st.inShares(got, weights, largest)
		}
		st.c.US.Add(taken.Next.Microseconds())
	}
}

// A tenant with many users, or in many regions, has one share.
func TestSharesOfATenantWithManyFlows(t *testing.T) {
	client := limitertest.RedisClient(t)
	for name, other := range map[string]throttle.Window{
		"nested":   {Name: "user", Limit: 30, Period: s, Per: []string{"tenant", "user"}},
		"crossing": {Name: "region", Limit: 30, Period: s, Per: []string{"region"}},
	} {
		st := newStory(t, client, limitertest.Policy(throttle.Window{Name: "own", Limit: 1000, Period: s}, other, limitertest.SharedWindow(20, s)))
		for i := range 8 {
			st.attributes = map[string]string{"user": fmt.Sprint("u", i), "region": fmt.Sprint("r", i%4)}
			for n := range 40 {
				st.joins(fmt.Sprintf("a/%d/%d", i, n))
			}
		}
		st.attributes = map[string]string{"user": "bob", "region": "r9"}
		st.joinMany("q", "b", 100)
		t.Log(name)
		st.inShares(st.shares(160, 8, "q"), map[string]float64{"a": 1, "b": 1}, st.cost)
	}
}

// A grant moves the tag of all flows of its tenant. Nevertheless a take gets as many tickets as of one flow, in the
// order in which these came, and the other tenant has its share.
func TestTakesOfATenantWithManyFlows(t *testing.T) {
	client := limitertest.RedisClient(t)
	for _, per := range [][]string{{"tenant", "user"}, {"user"}} {
		st := newStory(t, client, limitertest.Policy(
			throttle.Window{Name: "user", Limit: 100, Period: s, Per: per}, limitertest.SharedWindow(1e6, s)))
		var requests []throttle.Request
		var ofA, ofB, want []string
		for i := range 2048 {
			st.attributes = map[string]string{"user": fmt.Sprint("u", i)}
			ofA = append(ofA, fmt.Sprint("a", i))
			requests = append(requests, st.request(ofA[i]))
		}
		for i := range 32 {
			ofB = append(ofB, fmt.Sprint("b", i))
			requests = append(requests, st.request(ofB[i]))
			want = append(want, ofA[i], ofB[i])
		}
		limitertest.Join(t, st.l, requests...)
		for want = append(want, ofA[32:]...); len(want) > 0; want = want[min(64, len(want)):] {
			wantTaken(t, st.l, 64, strings.Join(want[:min(64, len(want))], " "), "q")
		}
	}
}

// A policy that counts by users for a while leaves nothing behind, and holds nobody up, when only tenants count again.
func TestOtherAttributesCountForAWhile(t *testing.T) {
	shared, tenantWindow := limitertest.SharedWindow(2, 10*s), throttle.Window{Name: "own", Limit: 1000, Period: s}
	byUser := throttle.Window{Name: "user", Limit: 1000, Period: s, Per: []string{"tenant", "user"}}
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(shared))
	st.joins("a1", "a2", "a3", "a4", "a5")
	st.set(limitertest.Policy(tenantWindow, shared))
	st.joins("a6", "a7", "a8", "b1", "b2")
	st.set(limitertest.Policy(byUser, tenantWindow, shared))
	n := len(st.take(1))
	st.leave("a6")
	st.set(limitertest.Policy(tenantWindow, shared))
	for i := range steps(20) {
		n += len(st.at((i + 1) * 10 * s).take(16))
	}
	expect.Equal(t, n, 9)
	limitertest.IsGone(t, st.client)
}

// What a tenant was ahead by when it left is kept until the others have caught up, and no longer.
func TestTagsOfTenantsThatLeft(t *testing.T) {
	client := limitertest.RedisClient(t)
	for name, windows := range map[string][]throttle.Window{
		"one scope":    {limitertest.SharedWindow(10, s)},
		"three scopes": {limitertest.SharedWindow(10, s), {Name: "region", Limit: 100, Period: s, Per: []string{"region"}}},
	} {
		weights := map[string]float64{}
		for i := range 25 {
			weights[fmt.Sprint("visitor", i)] = 0.2 // a visit moves the tag by what five others take
		}
		st := newStory(t, client, weighted(weights, windows...))
		st.attributes = map[string]string{"region": "north"}
		st.joinMany("q", "bulk", 300)
		most := 0
		for i := range 25 {
			st.joinMany("q", fmt.Sprint("visitor", i), 1)
			for _, n := range []int{3, 7} { // the others catch up in between
				st.shares(n, 1, "q")
				for key, set := range limitertest.ReadLine(t, client).Sets {
					if strings.HasPrefix(key, "g:") {
						most = max(most, len(set))
					}
				}
			}
		}
		expect.That(t, most != 0 && most <= 3, name, most, "tags were kept at most")
	}
	// Leaving and coming again is no way to be first.
	st := newStory(t, client, limitertest.Policy(limitertest.SharedWindow(1, s)))
	st.at(h)
	expect.Must(t, client.FlushDB(t.Context()).Err())
	st.joinMany("q", "b", 20)
	got := map[string]int64{}
	for i := range 20 {
		st.joins(fmt.Sprint("a", i))
		for _, ticket := range limitertest.Take(t, st.at(h+time.Duration(i)*s).l, 1, "q").Tickets {
			got[ticket.Decision.Tenant]++
		}
	}
	expect.That(t, got["a"] == 10 && got["b"] == 10, "of 20 starts", got)
}

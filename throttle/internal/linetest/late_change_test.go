package linetest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// taken64 takes for so long, second by second, and returns how many tickets that were.
func (st *story) taken64(d time.Duration) (n int) {
	for range d / s {
		st.pass(s)
		n += len(st.take(64))
		time.Sleep(5 * ms) // what refreshes tickets does so in the background
	}
	return n
}

// A pause that ends by hand ends in lines that policies have left, and for tickets that a client puts in line
// which learns of it later. One that begins holds for these, too.
func TestPausesReachEveryTicket(t *testing.T) {
	policy := limitertest.Policy(throttle.Window{Name: "own", Limit: 5, Period: s})
	sharded, other := policy, policy
	sharded.Shards, other.Name = 4, "other"
	for name, p := range map[string]throttle.Policy{"shards have changed": sharded, "the policy was removed": other} {
		t.Run(name, func(t *testing.T) {
			st := newStory(t, limitertest.RedisClient(t), policy)
			st.joins("a1")
			st.takes("a1")
			st.pauses("a")
			st.joins("a2")
			st.takes()
			expect.Must(t, st.l.SetPolicies([]throttle.Policy{p}))
			st.l.SetInterventions(throttle.Interventions{At: limitertest.At(st.now())})
			expect.Equal(t, st.taken64(m), 1, "taken")
		})
	}
	for name, ends := range map[string]bool{"a client learns of its end later": true, "a client learns of it later": false} {
		t.Run(name, func(t *testing.T) {
			p := limitertest.Policy(limitertest.SharedWindow(2, m))
			st := newStory(t, limitertest.RedisClient(t), p)
			client := limitertest.NewByClock(t, st.client, st.c, p)
			at := limitertest.At(0)
			paused, none := throttle.Interventions{At: at, Pauses: []throttle.Pause{{Policy: "p", Tenant: "a", Author: "anna", Cause: "x", Until: at.Add(h)}}}, throttle.Interventions{At: at}
			steps := map[bool][2]throttle.Interventions{true: {paused, none}, false: {none, paused}}[ends]
			st.joins("x1", "x2", "x3")
			st.take(1)
			for range 2 { // a server refreshes all tickets when it starts, and two seconds later
				time.Sleep(2100 * ms)
				st.take(1)
			}
			time.Sleep(100 * ms)
			client.SetInterventions(steps[0])
			st.l.SetInterventions(steps[0])
			time.Sleep(100 * ms)
			st.l.SetInterventions(steps[1])
			time.Sleep(100 * ms) // it refreshes what waits
			limitertest.Join(t, client, st.request("a1"))
			client.SetInterventions(steps[1])
			time.Sleep(2 * s)
			expect.Equal(t, st.taken64(2*m), map[bool]int{false: 1, true: 2}[ends], "taken")
		})
	}
}

// What is paused is no less free: an exempt tenant's ticket waits for the end of the pause, and for no window.
func TestAPauseChangesNoExemption(t *testing.T) {
	exempt := limitertest.Policy(limitertest.SharedWindow(2, h))
	exempt.Tenants = map[string]throttle.Tenant{"a": {Exempt: true}}
	observes := limitertest.Policy(limitertest.SharedWindow(2, h))
	observes.Observe = true
	for name, p := range map[string]throttle.Policy{"an exempt tenant": exempt, "a policy that observes": observes} {
		t.Run(name, func(t *testing.T) {
			st := newStory(t, limitertest.RedisClient(t), p)
			at := limitertest.At(0)
			st.l.SetInterventions(throttle.Interventions{At: at, Pauses: []throttle.Pause{{Policy: "p", Author: "anna", Cause: "x", Until: at.Add(m)}}})
			st.costs(3).joins("a1", "a2", "a3") // above the limit
			st.takes()
			st.l.SetInterventions(throttle.Interventions{At: at})
			expect.Equal(t, st.taken64(10*s), 3, "taken")
		})
	}
}

// Work goes on when the window that its slot is of gets another name: others have the new one's slots.
func TestARenamedWindowEndsNoWork(t *testing.T) {
	slots := func(name string) throttle.Policy {
		w := limitertest.Slots(1)
		w.Name, w.Lease = name, 5*s // a machine may stop for seconds
		return limitertest.Policy(w)
	}
	l := limitertest.New(t, limitertest.RedisClient(t), slots("old"))
	r := throttle.Request{Policy: "p", Tenant: "a"}
	work := limitertest.Reserve(t, l, r).Reservation.Hold(t.Context())
	expect.Must(t, l.SetPolicies([]throttle.Policy{slots("new")}))
	d := limitertest.Reserve(t, l, r)
	expect.Require(t, d.Granted, d)
	d.Reservation.Hold(t.Context())
	select {
	case <-work.Done():
		t.Error("it was ended:", context.Cause(work))
	case <-time.After(6 * s):
	}
	expect.Must(t, l.SetPolicies([]throttle.Policy{limitertest.Policy(limitertest.SharedWindow(1, s))}))
	expect.Must(t, d.Reservation.Release(t.Context()))
}

// A reservation from before a window counts by another rate or calendar has nothing that counts there.
func TestARefundAfterAChangeOfRateTakesNobodysUnits(t *testing.T) {
	for name, w := range map[string][2]throttle.Window{
		"fixed":    {{Algorithm: throttle.AlgorithmFixed, Limit: 10, Period: 10 * s}, {Algorithm: throttle.AlgorithmFixed, Limit: 10, Period: m}},
		"gcra":     {{Algorithm: throttle.AlgorithmGCRA, Limit: 10, Period: s, Burst: 10}, {Algorithm: throttle.AlgorithmGCRA, Limit: 1, Period: m, Burst: 10}},
		"calendar": {{Algorithm: throttle.AlgorithmCalendar, Limit: 10, Resets: "* * * * *"}, {Algorithm: throttle.AlgorithmCalendar, Limit: 10, Resets: "0 * * * *"}},
	} {
		t.Run(name, func(t *testing.T) {
			was, is := w[0], w[1]
			was.Name, is.Name = "w", "w"
			st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(was))
			first := st.costs(10).granted("a1")
			st.at(map[bool]time.Duration{false: 20 * s, true: m + s}[name == "calendar"]).granted("a2")
			st.set(limitertest.Policy(is))
			limitertest.Cancel(t, st.l, first.Reservation)
			expect.That(t, !limitertest.Reserve(t, st.l, st.costs(5).without("a")).Granted, "the second's units were given back")
		})
	}
}

// Nodes at which tickets wait are counted until their line is empty, whatever scopes the policy has meanwhile.
func TestScopesGoAndComeBack(t *testing.T) {
	tenantWindow := throttle.Window{Name: "own", Limit: 1, Period: 10 * s}
	users := throttle.Window{Name: "users", Limit: 1, Period: 10 * s, Per: []string{"tenant", "user"}}
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(tenantWindow, users))
	st.attributes = map[string]string{"user": "u"}
	st.granted("a0", "b0")
	st.waits("a1", "a2", "a3", "a4", "b1")
	st.takes()
	st.set(limitertest.Policy(tenantWindow))
	st.at(s).takes()
	st.leave("a1", "a2", "a3", "a4")
	st.set(limitertest.Policy(tenantWindow, users))
	st.at(2 * s).takes()
	expect.Equal(st, st.joins("a5").RetryIn, 8*s, "told")
	limitertest.Agrees(st, st.client)
}

// A reset is seen soon, however many others wait at their own limits.
func TestAResetIsSeenAmongManyTenants(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 10 * h}))
	for i := range 1000 {
		var requests []throttle.Request
		for k := range 2 {
			requests = append(requests, throttle.Request{Policy: "p", Tenant: fmt.Sprint("t", i), Ticket: limitertest.Ticket(fmt.Sprint(i, "-", k))})
		}
		limitertest.Join(t, st.l, requests...)
	}
	starts := map[string]time.Duration{}
	st.takesUntil(m, starts)
	expect.Equal(t, len(starts), 1000, "started")
	expect.Must(t, expect.ErrOf(st.l.Reset(t.Context(), "p", "t999")))
	began := st.now()
	for len(st.take(64)) == 0 {
		st.pass(st.next)
	}
	expect.That(t, st.now()-began <= 2*s, "it took", st.now()-began)
}

// A tenant's limit that was lowered soon binds also the tickets of clients that learn of it later.
func TestALowerLimitReachesTicketsOfLateClients(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 5, Period: h}, limitertest.SharedWindow(1, s))
	st := newStory(t, limitertest.RedisClient(t), p)
	client := limitertest.NewByClock(t, st.client, st.c, p)
	p.Tenants = map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}
	expect.Must(t, st.l.SetPolicies([]throttle.Policy{p}))
	st.joins("a0", "b0")
	st.takes("a0")
	time.Sleep(100 * ms) // it refreshes what waits
	limitertest.Join(t, client, st.request("a1"))
	time.Sleep(2 * s)
	st.takes()
	time.Sleep(100 * ms) // it refreshes again
	expect.Equal(t, st.taken64(3*s), 1, "b0 alone is taken")
}

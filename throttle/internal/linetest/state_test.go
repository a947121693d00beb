package linetest

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func state(t *testing.T, l *throttle.Limiter, q inspect.Query) inspect.PolicyState {
	t.Helper()
	q.Policy = "p"
	return expect.Got(inspect.Of(l).State(t.Context(), q))(t)
}

// The state says who waits, since when and until when, and what every window has counted.
func TestStateTellsWhoWaits(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: 10 * s}, limitertest.SharedWindow(5, 20*s))
		p.Tenants = map[string]throttle.Tenant{"b": {Weight: 3}}
		st := newStory(t, client, p)
		st.granted("a1", "a2", "a3", "b1", "c1")
		st.at(s).joins("a4")
		st.at(2 * s).joins("b2")
		st.front = true
		st.joins("a5") // it goes first, and has not waited longest
		st.front, st.class = false, throttle.ClassBatch
		st.joins("a6")
		last := st.joins("a6") // it keeps its place
		before := limitertest.Dump(t, client)
		got := state(t, st.l, inspect.Query{})
		st.plan(inspect.PlanOptions{}, demand("a", 1, ""))
		expect.Must(t, expect.ErrOf(inspect.Of(st.l).Explain(t.Context(), limitertest.Ticket("a4"))))
		expect.Equal(t, fmt.Sprint(limitertest.Dump(t, client)), fmt.Sprint(before), before)
		expect.That(t, got.At.Equal(limitertest.At(2*s)) && got.Waiting == 4 &&
			got.PerSecond == 0.25 && got.Next == "" && got.Pause == nil, got)
		expect.That(t, len(got.Windows) == 1 && got.Windows[0].Name == "shared" &&
			got.Windows[0].Used == 5 && got.Windows[0].ResetsAt.Equal(limitertest.At(20*s)), got.Windows)
		expect.That(t, len(got.Queues) == 2 && got.Queues[0].Waiting == 3 &&
			got.Queues[0].Flows == 2 && got.Queues[0].Served &&
			got.Queues[1].Class == throttle.ClassBatch && got.Queues[1].Waiting == 1, got.Queues)
		expect.Require(t, len(got.Tenants) == 3, got.Tenants)
		a, batch, b := got.Tenants[0], got.Tenants[1], got.Tenants[2]
		expect.That(t, a.Tenant == "a" && a.Class == throttle.ClassLive && a.Queue == "q" && a.Waiting == 2 &&
			a.Oldest.Equal(limitertest.At(s)) && a.Weight == 1 && a.Share == 0.25 && a.PerSecond == 0.3 && a.Cost[throttle.Requests] == 1, a)
		want := limitertest.At(2*s + last.RetryIn)
		expect.That(t, batch.Tenant == "a" && batch.Class == throttle.ClassBatch && batch.Waiting == 1 && batch.Share == 1 &&
			batch.Expected.Equal(want) && batch.Latest.Equal(limitertest.At(2*s+last.Latest)) && last.RetryIn >= 18*s,
			"the last of a is expected at", batch.Expected, "to", batch.Latest, "want", want, last)
		expect.That(t, len(a.Windows) == 1 && a.Windows[0].Name == "own" &&
			a.Windows[0].Used == 3 && a.Windows[0].Limit == 3, a.Windows)
		expect.That(t, b.Tenant == "b" && b.Waiting == 1 && b.Weight == 3 && b.Share == 0.75 &&
			b.Expected.Equal(limitertest.At(20*s)), b)
		one := state(t, st.l, inspect.Query{Tenant: "a"})
		expect.That(t, len(one.Tenants) == 2 && fmt.Sprint(one.Tenants[0]) == fmt.Sprint(a) && fmt.Sprint(one.Tenants[1]) == fmt.Sprint(batch),
			"of a alone", one.Tenants, "want", a, batch)
		idle := state(t, st.l, inspect.Query{Tenant: "c"}).Tenants
		expect.That(t, len(idle) == 1 && idle[0].Waiting == 0 && idle[0].Windows[0].Used == 1, "does not wait", idle)
	})
}

// Pages tell of every tenant once, and a page costs the same however many wait.
func TestAPageOfTheStateCostsTheSame(t *testing.T) {
	client := limitertest.RedisClient(t)
	l := limitertest.New(t, client, limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: h}, limitertest.SharedWindow(1, h)))
	const limit = 40
	waiting, costs := 0, []int{}
	for _, n := range []int{200, 800} {
		var requests []throttle.Request
		for ; waiting < n; waiting++ {
			tenant := fmt.Sprint("tenant ", waiting)
			requests = append(requests, throttle.Request{Policy: "p", Tenant: tenant, Ticket: limitertest.Ticket(tenant)})
		}
		limitertest.Join(t, l, requests...)
		seen, most, after := map[string]bool{}, 0, ""
		for {
			before := calls(t, client)
			got := state(t, l, inspect.Query{After: after, Limit: limit})
			most = max(most, calls(t, client)-before)
			expect.Require(t, len(got.Tenants) <= 2*limit && got.Waiting == int64(n),
				len(got.Tenants), "tenants on a page of", limit, got.Waiting, "waiting")
			for _, tenant := range got.Tenants {
				seen[tenant.Tenant] = true
			}
			if after = got.Next; after == "" {
				break
			}
		}
		expect.Equal(t, len(seen), n)
		costs = append(costs, most)
	}
	expect.That(t, len(state(t, l, inspect.Query{Limit: 5000}).Tenants) < 800, "a page is bounded")
	expect.That(t, costs[1] < costs[0]+limit, "a page of 200 and of 800 took commands, with those inside of scripts:", costs)
}

// calls is how many commands a Redis has run, with those inside of scripts.
func calls(t *testing.T, client *redis.Client) (n int) {
	t.Helper()
	text := expect.Got(client.Info(t.Context(), "commandstats").Result())(t)
	for line := range strings.Lines(text) {
		if _, stats, ok := strings.Cut(line, ":calls="); ok {
			count, _, _ := strings.Cut(stats, ",")
			each, _ := strconv.Atoi(count)
			n += each
		}
	}
	return n
}

// A tenant is told of once for each combination of attributes, and a call that waits in place too.
func TestStateTellsAttributesApart(t *testing.T) {
	client := limitertest.RedisClient(t)
	l := limitertest.New(t, client, limitertest.Policy(throttle.Window{Name: "each", Limit: 1, Period: h, Per: []string{"tenant", "user"}}, limitertest.SharedWindow(100, h)))
	for i, user := range []string{"bob", "bob", "eve", "bob"} {
		r := throttle.Request{Policy: "p", Tenant: "acme", Attributes: map[string]string{"user": user}, Ticket: limitertest.Ticket(fmt.Sprint(i))}
		d := limitertest.Reserve(t, l, r)
		expect.Require(t, d.Granted != (i == 1 || i == 3), i, d)
	}
	waiting, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	eve := throttle.Request{Policy: "p", Tenant: "zeta", Attributes: map[string]string{"user": "eve"}}
	expect.That(t, limitertest.Reserve(t, l, eve).Granted, "eve does not run")
	go func() { _, err := l.Wait(waiting, eve); ended <- err }()
	var got inspect.PolicyState
	limitertest.Until(t, "eve waits", func() bool { got = state(t, l, inspect.Query{}); return got.Waiting == 3 })
	stop()
	<-ended
	var named []string
	for _, tenant := range got.Tenants {
		named = append(named, fmt.Sprint(tenant.Tenant, " ", tenant.Attributes["user"], " ", tenant.Waiting, " ", tenant.Windows[0].Used))
	}
	expect.Equal(t, named, []string{"acme bob 2 1", "zeta eve 1 1"})
	expect.That(t, len(got.Queues) == 2 && got.Queues[0].Queue == "" &&
		got.Queues[0].Waiting == 1 && got.Queues[1].Waiting == 2, got.Queues)
	var others []throttle.Request
	for i := range 600 {
		others = append(others, throttle.Request{Policy: "p", Tenant: fmt.Sprint("t", i), Attributes: map[string]string{"user": "acme"}, Ticket: limitertest.Ticket(fmt.Sprint("t", i))})
	}
	limitertest.Join(t, l, others...)
	acme := state(t, l, inspect.Query{Tenant: "acme", Limit: 1}).Tenants
	expect.That(t, len(acme) == 1 && acme[0].Attributes["user"] == "bob", acme)
}

// With shards, pages go through all of them, also where these are on several primaries of a Cluster.
func TestStateOfShards(t *testing.T) {
	t.Parallel()
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		stateOfShards(t, servers.Cluster(t, 2, 0).Client(t))
	})
	throttletest.Each(t, func(t *testing.T, client *redis.Client) { stateOfShards(t, client) })
}

func stateOfShards(t *testing.T, client redis.UniversalClient) {
	t.Helper()
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: h})
	p.Shards = 12
	l := limitertest.New(t, client, p)
	for i := range 60 {
		tenant := fmt.Sprint("t", i)
		r := throttle.Request{Policy: "p", Tenant: tenant, Ticket: limitertest.Ticket(tenant)}
		expect.Must(t, expect.ErrOf(l.Line(l.LineOf("p", tenant)).Join(t.Context(), []throttle.Request{r})))
	}
	var seen []string
	for after := ""; ; {
		got := state(t, l, inspect.Query{After: after})
		for _, tenant := range got.Tenants {
			seen = append(seen, tenant.Tenant)
		}
		expect.Require(t, got.Waiting == 60 && len(got.Queues) == 1 && got.Queues[0].Waiting == 60, got)
		if after = got.Next; after == "" {
			break
		}
	}
	slices.Sort(seen)
	expect.That(t, len(seen) == 60 && len(slices.Compact(seen)) == 60, seen)
	e, err := inspect.Of(l).Explain(t.Context(), limitertest.Ticket("t7"))
	expect.That(t, err == nil && e.Tenant == "t7" && e.Position == 1, e, err)
	now, then, err := inspect.Of(l).Simulate(t.Context(), p)
	expect.That(t, err == nil && now.Count == 60 && !now.Expected.IsZero() && !then.Expected.IsZero(), now, then, err)
	expect.Must(t, l.Ping(t.Context()))
	one := state(t, l, inspect.Query{Tenant: "t7"})
	expect.That(t, len(one.Tenants) == 1 && one.Tenants[0].Waiting == 1 && one.Next == "", one)
	expect.Must(t, l.SetPolicies(nil))
	page := state(t, l, inspect.Query{})
	for _, tenant := range page.Tenants {
		expect.Must(t, l.Line("p/1of12").Leave(t.Context(), limitertest.Ticket(tenant.Tenant)))
	}
	limitertest.Until(t, "its line has been left", func() bool { return !slices.Contains(l.Lines(), "p/1of12") })
	rest := state(t, l, inspect.Query{After: page.Next})
	expect.That(t, len(rest.Tenants) > 0 && l.LineOf("p", rest.Tenants[0].Tenant) == "p/2of12", "without the first shard of a removed policy:", rest)
	p.Shards = 24
	expect.Must(t, l.SetPolicies([]throttle.Policy{p}))
	expect.That(t, !state(t, l, inspect.Query{}).Removed, "it has other shards now")
}

func TestStateOfAnExemptTenantThatIsPaused(t *testing.T) {
	for _, observe := range []bool{false, true} {
		t.Run(fmt.Sprint("observe ", observe), func(t *testing.T) {
			p := limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: s})
			p.Observe, p.Tenants = observe, map[string]throttle.Tenant{"b": {Exempt: true}}
			st := newStory(t, limitertest.RedisClient(t), p)
			st.pause(st.l.Attach(throttle.Reservation{Request: st.request("b1")}), h)
			b := state(t, st.l, inspect.Query{Tenant: "b"}).Tenants[0]
			expect.That(t, b.Exempt && b.Pause == nil, "the upstream's pause stops it:", b)
			st.pauses("b")
			expect.That(t, state(t, st.l, inspect.Query{Tenant: "b"}).Tenants[0].Exempt, "it is not exempt")
		})
	}
}

func TestStateRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	l := limitertest.New(t, limitertest.NoRedis(t), limitertest.Policy(limitertest.SharedWindow(1, s)))
	for _, q := range []inspect.Query{{Policy: "p", After: "x"}, {Policy: "p", After: "1.0"}} {
		expect.Err(t, expect.ErrOf(inspect.Of(l).State(t.Context(), q)), new(*throttle.RequestError))
	}
	for policy, want := range map[string]error{"q": throttle.ErrUnknownPolicy, "p": throttle.ErrUnavailable} {
		expect.Err(t, expect.ErrOf(inspect.Of(l).State(t.Context(), inspect.Query{Policy: policy})), want)
	}
}

// An explanation says which window denies, and the ticket's position.
func TestExplainSaysWhyATicketWaits(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(throttle.Window{Name: "own", Limit: 3, Period: 60 * s}, limitertest.SharedWindow(4, 20*s)))
	st.granted("a1", "a2", "a3", "b1")
	st.at(s).joins("a4", "b2", "c1")
	decision := st.joins("c2")
	before := limitertest.Dump(t, st.client)
	a4, c2 := st.explain("a4"), st.explain("c2")
	expect.Equal(t, fmt.Sprint(limitertest.Dump(t, st.client)), fmt.Sprint(before), before)
	expect.That(t, a4.Binds == "own" && a4.Expected.Equal(limitertest.At(60*s)) &&
		a4.Position == 1 && a4.Waiting == 1 && a4.Since.Equal(limitertest.At(s)), a4)
	expect.That(t, c2.Expected.Equal(limitertest.At(s+decision.RetryIn)), c2, "joined with", decision)
	expect.That(t, c2.Policy == "p" && c2.Tenant == "c" && c2.Since.Sub(limitertest.At(s)) < ms &&
		c2.Position == 2 && c2.Waiting == 2 && len(c2.Windows) == 2 && !c2.Windows[0].Denied &&
		c2.Windows[1].Used == 4 && c2.Windows[1].RetryIn == 19*s, c2)
	st.at(20 * s)
	fits := st.explain("c1")
	expect.That(t, fits.Binds == "" && fits.Expected.Equal(limitertest.At(20*s)), fits)
	expect.Equal(t, st.explain("x9").Position, 0)
	st.costs(0).joins("c3")
	expect.Equal(t, st.explain("c3").Cost[throttle.Requests], 0, "its own cost, not the average")
}

// As JSON, names are in lower case with underscores, times of RFC 3339, and durations seconds.
func TestStateHasOneFormAsJSON(t *testing.T) {
	t.Parallel()
	st := newStory(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 90 * s}))
	st.granted("a1")
	st.joins("a2", "a3")
	text := expect.Got(json.MarshalIndent(state(t, st.l, inspect.Query{}), "", " "))(t)
	var got struct {
		Tenants []struct {
			Expected time.Time
			Windows  []map[string]any
		}
	}
	err := json.Unmarshal(text, &got)
	expect.Require(t, err == nil && len(got.Tenants) == 1, err, string(text))
	tenant := got.Tenants[0]
	expect.That(t, tenant.Expected.Equal(limitertest.At(3*m)), text)
	w := tenant.Windows[0]
	expect.That(t, w["period_seconds"] == 90.0 && w["retry_in_seconds"] == 180.0 &&
		w["used"] == 1.0 && w["denied"] == true, text)
}

// What binds beside the windows is named where they are shown: what the upstream has left, and a pause.
func TestWhatBindsBesideTheWindowsIsNamed(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(10, 10*s))
	p.UpstreamShared = true
	st := newStory(t, limitertest.RedisClient(t), p)
	d := st.granted("a1")
	st.at(s).remaining(d.Reservation, 2, m)
	st.granted("a2", "a3")
	st.joins("b1")
	left := throttle.Remaining{Unit: throttle.Requests, Until: limitertest.At(m + s)}
	got := state(t, st.l, inspect.Query{})
	expect.That(t, *got.Remaining == left && got.Tenants[0].Remaining != nil, got)
	e := st.explain("b1")
	expect.That(t, *e.Remaining == left && e.Expected.Equal(limitertest.At(m+s)), e)
	st.at(m + 2*s)
	expect.That(t, state(t, st.l, inspect.Query{}).Remaining == nil, "it has started again")
}

// A tenant that waits all the time comes on a page, whichever of its flows leave meanwhile.
func TestPagesLeaveNoTenantOut(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(1, h)))
	const n = 400
	var all []throttle.Request
	for i := range n {
		for _, class := range []throttle.Class{throttle.ClassLive, throttle.ClassBatch} {
			r := requestOf(fmt.Sprint("tenant", i))
			r.Class, r.Ticket = class, limitertest.Ticket(fmt.Sprint(class, i))
			all = append(all, r)
		}
	}
	limitertest.Join(t, st.l, all...)
	seen, q := map[string]bool{}, inspect.Query{Policy: "p"}
	for page := 0; page == 0 || q.After != ""; page++ {
		state := expect.Got(inspect.Of(st.l).State(t.Context(), q))(t)
		for _, tenant := range state.Tenants {
			seen[tenant.Tenant] = true
		}
		q.After = state.Next
		for i := 0; page == 8 && i < n; i++ { // the batch is cancelled: live tickets wait on
			if !seen[fmt.Sprint("tenant", i)] {
				st.leave(fmt.Sprint(throttle.ClassBatch, i))
			}
		}
	}
	expect.Equal(t, len(seen), n, "came")
}

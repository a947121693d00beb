package linetest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// An estimate is the decision about a ticket, and when it was told.
type estimate struct {
	throttle.LineDecision
	at time.Duration
}

var etaPolicies = map[string][]throttle.Window{
	"sliding":    {{Name: "w", Limit: 3, Period: s}},
	"shared":     {limitertest.SharedWindow(3, s)},
	"two":        {{Name: "w", Limit: 3, Period: s}, {Name: "v", Limit: 7, Period: 4 * s}},
	"fixed":      {{Name: "w", Algorithm: throttle.AlgorithmFixed, Limit: 3, Period: s}},
	"gcra":       {{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: 7, Burst: 3, Period: s}},
	"two scopes": {{Name: "w", Limit: 4, Period: s}, limitertest.SharedWindow(11, 5*s)},
	"three scopes": {
		{Name: "u", Limit: 4, Period: s, Per: []string{"tenant", "user"}}, {Name: "w", Limit: 5, Period: 2 * s},
		limitertest.SharedWindow(11, 5*s),
	},
	"with a margin": {{Name: "w", Limit: 3, Period: s, Margin: 30 * ms}},
}

// A tenant alone starts when it is told to. Tickets of one unit do so exactly where one window delays
// them, and before their latest start where several do. Tickets that cost 1 to 12 of 12 leave room that
// nobody can use: none starts more than a period after its expected start, nor after its latest one.
func TestExpectedStartsAreKept(t *testing.T) {
	t.Parallel()
	rows := maps.Clone(etaPolicies)
	rows["whole, sliding"] = []throttle.Window{{Name: "w", Limit: 12, Period: s}}
	rows["whole, fixed"] = []throttle.Window{{Name: "w", Limit: 12, Period: s, Algorithm: throttle.AlgorithmFixed}}
	rows["whole, gcra"] = []throttle.Window{{Name: "w", Limit: 12, Period: s, Algorithm: throttle.AlgorithmGCRA, Burst: 12}}
	limitertest.EachCase(t, rows, func(t *testing.T, client *redis.Client, windows []throttle.Window) {
		whole := windows[0].Limit == 12
		for seed := range uint64(4) {
			random, now := rand.New(rand.NewPCG(seed, 24)), time.Duration(0)
			st := newStory(t, client, limitertest.Policy(windows...))
			st.attributes = map[string]string{"user": "bob"}
			told, starts := map[string]estimate{}, map[string]time.Duration{}
			for i := range 60 {
				ticket := fmt.Sprintf("a%02d", i)
				if whole {
					st.cost = 1 + random.Int64N(12)
				}
				told[ticket] = estimate{st.at(now).joins(ticket), now}
				if seed%2 == 1 && random.IntN(4) == 0 { // else all join at once
					now = st.takesUntil(now+time.Duration(random.IntN(1_000_000))*us, starts)
				}
			}
			st.at(now).takesUntil(h, starts)
			one, rounding := len(windows) == 1, time.Duration(0)
			if windows[0].Algorithm == throttle.AlgorithmGCRA {
				rounding = 60 * us // each start is rounded up
			}
			for ticket, e := range told {
				start, ok := starts[ticket]
				start -= e.at
				kept := start >= e.RetryIn && (!one || e.Latest == e.RetryIn)
				if whole {
					kept = start <= e.RetryIn+windows[0].Period
				}
				expect.That(t, ok && kept && start <= e.Latest+rounding, "seed", seed, ticket, "starts after", start, ok, "and was told", e)
			}
		}
	})
}

// MaxWait refuses by the upper bound, Deadline by the lower, and a refusal changes nothing. Both differ.
func TestTicketsThatWouldStartTooLateAreRefused(t *testing.T) {
	client := limitertest.RedisClient(t)
	st := newStory(t, client, limitertest.Policy(limitertest.SharedWindow(10, s)))
	for i, cost := range []int64{9, 1, 9, 1, 9, 1} {
		st.costs(cost).joins(fmt.Sprint("a", i))
	}
	p := st.joins("a9")
	expect.Require(t, p.RetryIn < p.Latest, "told", p.RetryIn, "to", p.Latest)
	between := (p.RetryIn + p.Latest) / 2
	r := st.request("a10")
	r.MaxWait = between
	before := lineText(t, client)
	expect.Err(t, st.joining(r).Err, new(*throttle.DeniedError), "it may wait for longer than", between)
	expect.Equal(t, lineText(t, client), before, "after a refusal")
	r.MaxWait, r.Deadline = 0, time.Now().Add(between)
	expect.Must(t, st.joining(r).Err)
}

// anyPolicy is one to four windows. Those of many tenants may cross, and tenants have any weights.
func anyPolicy(random *rand.Rand, many bool) throttle.Policy {
	scopes := [][]string{nil, {"tenant"}} // nil is shared by all
	if many && random.IntN(2) == 0 {
		scopes = append(scopes, []string{"tenant", "user"}, []string{"region"}, []string{"tenant", "region"})
	}
	algorithms := []throttle.Algorithm{throttle.AlgorithmSliding, throttle.AlgorithmFixed, throttle.AlgorithmGCRA, throttle.AlgorithmCalendar}
	if many {
		algorithms[3] = throttle.AlgorithmSliding
	}
	var windows []throttle.Window
	for i := range 1 + random.IntN(4) {
		w := throttle.Window{
			Name: fmt.Sprint("w", i), Limit: 3 + random.Int64N(9), Period: time.Duration(1+random.IntN(6)) * s,
			Algorithm: algorithms[random.IntN(4)], Per: scopes[random.IntN(len(scopes))],
			Unit: []string{"requests", "requests", "tokens"}[random.IntN(3)],
		}
		w.Shared = w.Per == nil
		switch w.Algorithm {
		case throttle.AlgorithmCalendar:
			w.Period, w.Resets = 0, "* * * * *"
		case throttle.AlgorithmGCRA:
			w.Burst = 3 + random.Int64N(5)
		}
		if !many && random.IntN(4) == 0 {
			w.Margin = w.Period / 8
		}
		windows = append(windows, w)
	}
	return weighted(map[string]float64{
		"b": []float64{0.01, 0.5, 1, 4}[random.IntN(4)], "c": []float64{0.1, 1, 9}[random.IntN(3)],
	}, windows...)
}

// Whatever the windows, scopes, costs and weights are, nobody starts after the latest start that it was
// told, if nobody else comes who may go first. A tenant alone knows that when it joins. A start that is
// told as exact is, also where tenants tie for the rest of a bucket.
func TestExpectedStartsAreBounds(t *testing.T) {
	client := limitertest.RedisClient(t)
	for _, c := range []struct {
		tenants string
		// Measured by these seeds: bounds may come closer, and not go farther.
		measured float64
	}{{"a", 1.90}, {"aabc", 2.93}} {
		var real, most time.Duration
		exact := 0
		many := len(c.tenants) > 1
		for _, seed := range []uint64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 108, 130, 213, 255, 338, 371} {
			random := rand.New(rand.NewPCG(seed, 77))
			p := anyPolicy(random, many)
			st := newStory(t, client, p)
			tokens := slices.ContainsFunc(p.Windows, func(w throttle.Window) bool { return w.Unit == "tokens" })
			equal := random.IntN(2) == 0
			anyRequest := func(i int) throttle.Request {
				if !equal || i <= 0 {
					st.cost, st.tokens = 1+random.Int64N(3), 0
					if tokens {
						st.tokens = 1 + random.Int64N(3)
					}
				}
				st.attributes = map[string]string{"user": []string{"u", "v"}[random.IntN(2)], "region": []string{"n", "s"}[random.IntN(2)]}
				return st.request(fmt.Sprintf("%c%03d", c.tenants[random.IntN(len(c.tenants))], i))
			}
			now := time.Duration(random.IntN(60_000)) * ms
			for range random.IntN(6) { // of other costs, before anybody waits
				r := anyRequest(-1)
				r.Ticket = throttle.Ticket{}
				limitertest.Reserve(t, st.at(now).l, r)
				now += time.Duration(random.IntN(3_000_000)) * us
			}
			told, starts, requests := map[string]estimate{}, map[string]time.Duration{}, map[string]throttle.Request{}
			for i := range 20 {
				r := anyRequest(i)
				requests[r.Ticket.ID] = r
				told[r.Ticket.ID] = estimate{st.at(now).joining(r), now}
				if random.IntN(3) == 0 {
					now = st.takesUntil(now+time.Duration(random.IntN(3_000_000))*us, starts)
				}
			}
			st.at(now)
			for id, r := range requests {
				if _, gone := starts[id]; many && gone {
					delete(told, id)
				} else if many {
					told[id] = estimate{st.joining(r), now}
				}
			}
			st.takesUntil(24*h, starts)
			for id, e := range told {
				start, ok := starts[id]
				start -= e.at
				real, most = real+start, most+e.Latest
				if e.RetryIn == e.Latest {
					exact++
				}
				const rounding = 20 * us // GCRA rounds each start up
				expect.That(t, e.Err == nil && ok && start <= e.Latest+rounding && (e.RetryIn != e.Latest || start >= e.RetryIn-rounding),
					"seed", seed, id, "starts after", start, ok, "and was told", e, p.Windows)
			}
		}
		expect.That(t, exact != 0, "no start was exact")
		t.Logf("of the tenants %s the latest starts are %.2f times the real ones", c.tenants, most.Seconds()/real.Seconds())
		expect.That(t, float64(most) <= c.measured*float64(real),
			"of the tenants", c.tenants, "the latest starts are", most, "in all, the real ones", real)
	}
}

// A ticket that waits for several resets learns the right one, by the calendar and not by the length of today, and no
// later deadline refuses it. That also holds beyond the ticks that a call gets: where two of these are a weekend
// apart, and behind a long pause.
func TestCalendarPromises(t *testing.T) {
	client := limitertest.RedisClient(t)
	for _, tc := range []struct {
		resets, now, start string
		ahead              int
		paused             []string
	}{
		{"0 0 1 * *", "2027-01-31T00:00:00Z", "2027-02-01T00:00:00Z", 0, nil},
		{"0 0 1 * *", "2027-01-31T00:00:00Z", "2027-05-01T00:00:00Z", 3, nil},
		{"0 9-17 * * 1-5", "2027-03-05T10:05:30Z", "2027-03-08T17:00:00Z", 15, nil},
		{"* * * * *", "2027-03-05T10:05:30Z", "2027-03-05T11:05:30Z", 0, []string{""}},
		{"* * * * *", "2027-03-05T10:05:30Z", "2027-03-05T11:07:00Z", 2, []string{""}},
	} {
		st := newStory(t, client, limitertest.Policy(limitertest.Quota(1, tc.resets, "")))
		st.at(limitertest.Day(t, tc.now)).granted("a")
		st.pauses(tc.paused...)
		st.joinMany("q", "a", tc.ahead)
		r, start := st.request("a99"), limitertest.Day(t, tc.start)
		wait := start - st.now()
		r.Deadline = time.Now().Add(wait + m)
		decision := st.joining(r)
		expect.That(t, decision.Err == nil && decision.RetryIn == wait && decision.Latest == wait, tc, "is told", decision)
		if tc.ahead == 0 {
			st.at(start - us).takes().at(start).pauses()
			st.takes("a99")
		}
	}
}

// Grants that another window holds up until shortly before a reset count on both sides of it.
func TestALatestStartCountsGrantsInAMargin(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(
		throttle.Window{Name: "own", Algorithm: throttle.AlgorithmFixed, Limit: 5, Period: 6 * s, Margin: 600 * ms},
		throttle.Window{Name: "tokens", Limit: 3, Period: 5500 * ms, Unit: "tokens", Shared: true},
	))
	st.tokens = 1
	st.at(48*s+142*ms).granted("b1", "b2", "b3")
	st.at(50*s).costs(2).joins("a1", "a2")
	latest := 50*s + st.joins("a3").Latest
	start := st.starts()["a3"]
	expect.That(t, start == 60600*ms && start <= latest, "it starts at", start, "and was told", latest)
}

// MaxWait accepts exactly the tickets that start within it, even where costs do not fill the window.
func TestMaxWaitOfWholeTickets(t *testing.T) {
	t.Parallel()
	limitertest.EachCase(t, map[string]throttle.Window{
		"sliding": {Limit: 3, Period: 10 * s},
		"fixed":   {Limit: 3, Period: 10 * s, Algorithm: throttle.AlgorithmFixed},
	}, func(t *testing.T, client *redis.Client, w throttle.Window) {
		w.Name = "w"
		st := newStory(t, client, limitertest.Policy(w))
		st.costs(2).granted("a0")
		var joined []string
		for i := range 20 {
			r := st.request(fmt.Sprintf("a%02d", i))
			if r.MaxWait = 100 * s; st.joining(r).Err == nil {
				joined = append(joined, r.Ticket.ID)
			}
		}
		starts := st.starts()
		expect.That(t, len(joined) == 10 && starts["a00"] == 10*s && starts["a09"] == 100*s,
			joined, "joined, and start at", starts)
	})
}

// Without a ticket a request may start once the windows let it, if all who wait leave: only earlier deadlines refuse.
func TestDeadlinesRefuseRequestsWithoutATicket(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(1, s)))
	st.granted("a0")
	st.joins("a1", "b1", "c1")
	r := st.without("d")
	r.Deadline = time.Now().Add(60 * s)
	limitertest.WantDenied(t, limitertest.Reserve(t, st.l, r), 4*s)
	r.Deadline = time.Now().Add(s / 2)
	expect.Err(t, expect.ErrOf(st.l.Reserve(t.Context(), r)), new(*throttle.DeniedError))
}

// Tenants that are delayed by windows of their own make others expect to wait. But no deadline is missed by that.
func TestDeadlineOfTicketsBehindThoseDelayedNarrower(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(
		throttle.Window{Name: "own", Limit: 1, Period: time.Hour}, limitertest.SharedWindow(10, s)))
	for i := range 40 {
		st.joinMany("q", fmt.Sprint("t", i), 2)
	}
	for now := time.Duration(0); now < 4*s; now += s { // each tenant gets one, and its other one waits
		expect.Equal(t, len(st.at(now).take(64)), 10)
	}
	st.at(4 * s)
	for i := range 10 {
		st.joinMany("q", fmt.Sprint("full", i), 1)
	}
	expect.Equal(t, len(st.take(64)), 10, "fill the shared window")
	late, soon := st.request("n1"), st.request("n2")
	late.Deadline, soon.Deadline = time.Now().Add(500*ms), time.Now().Add(1900*ms)
	expect.Err(t, st.joining(late).Err, new(*throttle.DeniedError), "the shared window is full for longer")
	expect.Must(t, st.joining(soon).Err)
	st.at(5 * s).takes("n2")
}

// A rate that is cut is restored meanwhile: what is told goes by the rate of now, and a deadline by that of then.
func TestDeadlineWhileTheRateIsCut(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(100, s)))
	for i := range 20 {
		st.refusedAt(time.Duration(i)*1500*ms, "x1")
	}
	st.at(35*s).joinMany("q", "a", 900)
	r := st.request("a901")
	r.Deadline = time.Now().Add(40 * s)
	p := st.joining(r)
	expect.That(t, p.Err == nil && p.RetryIn > 45*s, p)
}

// What goes first, and costs nothing of a unit, holds up nobody there.
func TestDeadlineBehindOtherUnits(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(
		throttle.Window{Name: "tokens", Limit: 500, Period: 10 * s, Unit: "tokens"}, limitertest.SharedWindow(100, s)))
	st.tokens = 100
	st.granted("a0")
	st.tokens = 500
	st.joins("a1", "a2")
	st.front, st.tokens = true, 0
	st.joins("a3")
	st.tokens = 200
	r := st.request("a4")
	r.Deadline = time.Now().Add(s)
	expect.Must(t, st.joining(r).Err)
}

// Where slots delay tickets, and not limits, they are expected at the rate of the takes.
func TestExpectedStartsWhereSlotsBind(t *testing.T) {
	st := newStory(t, limitertest.RedisClient(t), limitertest.Policy(limitertest.SharedWindow(1_000_000, s)))
	st.joinMany("q", "a", 200)
	for now := time.Duration(0); now <= 2*s; now += 100 * ms {
		expect.Equal(t, len(st.at(now).take(5)), 5, now)
	}
	bySlots := func(ticket string, expected time.Duration) {
		t.Helper()
		p := st.joins(ticket)
		expect.That(t, p.RetryIn == expected && (p.Binds == throttle.BySlots) == (expected > 0) &&
			(expected <= 0 || p.Latest == 0), ticket, p, "want", expected, "by slots")
	}
	bySlots("a900", 1900*ms) // behind 95, of which 50 go a second
	bySlots("a900", 1900*ms)
	bySlots("b900", 0) // the first of another tenant
	// Half of what goes is the other tenant's.
	st.joins("b901", "b902", "b903", "b904", "b905", "b906", "b907", "b908")
	bySlots("b909", 360*ms)
	st.take(throttle.MaxTake)
	st.take(throttle.MaxTake)
	bySlots("a901", 0) // slots are free
}

// While a tenant waits, the others take their shares by weight, and a ticket more.
func TestExpectedStartsCountTheSharesOfOthers(t *testing.T) {
	client := limitertest.RedisClient(t)
	st := newStory(t, client, weighted(map[string]float64{"c": 2}, limitertest.SharedWindow(2, 10*s)))
	st.granted("a1", "a2")
	st.joinMany("q", "a", 40)
	st.joins("b1", "b2", "b3")
	st.expects("b4", 40*s)
	st.joins("c1", "c2", "c3", "c4")
	st.expects("c5", 50*s) // behind four, as many of the others, and one more

	weights := map[string]float64{"c": 3, "d": 11, "e": 13}
	st = newStory(t, client, weighted(weights, limitertest.SharedWindow(1, 10*s)))
	st.granted("a1")
	st.joinMany("q", "d", 20)
	st.joinMany("two", "e", 20)
	st.expects("c1", 90*s) // behind eight, though 14/3 * 27/14 - 1 is more by two bits
}

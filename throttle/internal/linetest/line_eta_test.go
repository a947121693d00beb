package linetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

var etaPolicies = map[string][]throttle.Window{
	"sliding":       {{Name: "w", Limit: 3, Period: s}},
	"shared":        {limitertest.SharedWindow(3, s)},
	"two":           {{Name: "w", Limit: 3, Period: s}, {Name: "v", Limit: 7, Period: 4 * s}},
	"fixed":         {{Name: "w", Algorithm: throttle.AlgorithmFixed, Limit: 3, Period: s}},
	"gcra":          {{Name: "w", Algorithm: throttle.AlgorithmGCRA, Limit: 7, Burst: 3, Period: s}},
	"two scopes":    {{Name: "w", Limit: 4, Period: s}, limitertest.SharedWindow(11, 5*s)},
	"three scopes":  {{Name: "u", Limit: 4, Period: s, Scope: throttle.Per("tenant", "user")}, {Name: "w", Limit: 5, Period: 2 * s}, limitertest.SharedWindow(11, 5*s)},
	"with a margin": {{Name: "w", Limit: 3, Period: s, Margin: 30 * ms}},
}

// With one tenant and costs of one, every ticket starts exactly at its expected start where one window
// holds it up, and between that and its latest start where several do.
func TestExpectedStartsAreKept(t *testing.T) {
	t.Parallel()
	limitertest.EachOf(t, etaPolicies, func(t *testing.T, client *redis.Client, windows []throttle.Window) {
		st := newStory(t, client, limitertest.Policy(windows...))
		st.with = map[string]string{"user": "bob"}
		random := rand.New(rand.NewPCG(3, 4))
		told, now := map[string]throttle.Place{}, time.Duration(0)
		const tickets = 24 // all within 0.1 s: the windows hold at most 11 of them
		for i := range tickets {
			ticket := fmt.Sprintf("a%02d", i)
			now += time.Duration(random.IntN(4_000)) * us
			st.at(now)
			p := st.joins(ticket)
			if len(windows) == 1 && p.Latest != p.Expected {
				t.Errorf("%s is told %v to %v", ticket, p.Expected, p.Latest)
			}
			p.Expected, p.Latest = now+p.Expected, now+p.Latest
			told[ticket] = p
			for _, taken := range limitertest.Take(t, st.l, throttle.MaxTake, "q").Tickets {
				if p := told[taken.ID]; now < p.Expected || now > p.Latest {
					t.Errorf("%s starts at %v, it was told %v to %v", taken.ID, now, p.Expected, p.Latest)
				}
				delete(told, taken.ID)
			}
		}
		waiting := len(told)
		for ticket, at := range st.starts() {
			if p := told[ticket]; at < p.Expected || at > p.Latest {
				t.Errorf("%s starts at %v, it was told %v to %v", ticket, at, p.Expected, p.Latest)
			}
			delete(told, ticket)
		}
		if len(told) > 0 || waiting < tickets-11 {
			t.Errorf("%d of %d wait for ever", len(told), waiting)
		}
	})
}

// MaxWait refuses by the upper bound, Deadline by the lower, and a refusal changes nothing.
func TestTicketsThatWouldStartTooLateAreRefused(t *testing.T) {
	client := limitertest.Redis(t)
	st := newStory(t, client, limitertest.Policy(limitertest.SharedWindow(10, s)))
	joined := 0
	for i := range 100 {
		id := fmt.Sprintf("a%02d", i)
		before := lineText(t, client)
		r := st.of(id)
		r.MaxWait = 4 * s
		places, err := st.line().Join(t.Context(), []throttle.Request{r})
		limitertest.Must(t, err)
		var refused *throttle.TooLateError
		switch err := places[0].Err; {
		case err == nil:
			joined++
		case !errors.As(err, &refused) || refused.Decision.RetryIn != 5*s:
			t.Fatal(err)
		case lineText(t, client) != before:
			t.Error("a refusal changed the line")
		}
	}
	limitertest.Equal(t, joined, 50)
	for ticket, at := range st.starts() {
		if at > 4*s {
			t.Errorf("%s starts at %v", ticket, at)
		}
	}
	// Where the two bounds differ: behind costs of 1 to 9, ten tickets.
	st = newStory(t, client, limitertest.Policy(limitertest.SharedWindow(10, s)))
	st.at(h)
	for i, cost := range []int64{9, 1, 9, 1, 9, 1} {
		st.cost = cost
		st.joins(fmt.Sprint("a", i))
	}
	p := st.joins("a9")
	if p.Expected >= p.Latest {
		t.Fatalf("told %v to %v", p.Expected, p.Latest)
	}
	join := func(id string, maxWait time.Duration, deadline time.Time) error {
		r := st.of(id)
		r.Deadline, r.MaxWait = deadline, maxWait
		places, err := st.line().Join(t.Context(), []throttle.Request{r})
		limitertest.Must(t, err)
		return places[0].Err
	}
	between := (p.Expected + p.Latest) / 2
	limitertest.WantErr(t, join("a10", between, time.Time{}), new(*throttle.TooLateError))
	if err := join("a11", 0, time.Now().Add(between)); err != nil {
		t.Errorf("it may start within %v: %v", between, err)
	}
}

// A start that is told as exact is, also where tenants tie for the rest of a bucket. Else it is a bound.
func TestAnExactStartIsExactWhereTenantsTie(t *testing.T) {
	client := limitertest.Redis(t)
	exact := 0
	for seed := range uint64(12) {
		random := rand.New(rand.NewPCG(seed, 5))
		st := newStory(t, client, limitertest.Policy(throttle.Window{
			Name: "w", Algorithm: []throttle.Algorithm{throttle.AlgorithmFixed, throttle.AlgorithmSliding}[random.IntN(2)],
			Limit: 3 + random.Int64N(5), Period: 10 * s, Scope: throttle.ScopeShared,
		}))
		st.cost = 1 + random.Int64N(3)
		var tickets []string
		for i := range 14 {
			tickets = append(tickets, fmt.Sprintf("%c%02d", "abcd"[random.IntN(1+int(seed%4))], i))
		}
		st.at(time.Duration(random.IntN(9_000)) * ms)
		first := st.told(tickets...) // later ones may change a bound
		for _, ticket := range tickets {
			st.joins(ticket)
		}
		now := time.Duration(st.c.US.Load()-limitertest.Midnight) * us
		told := map[string]throttle.Place{}
		for ticket := range first {
			told[ticket] = limitertest.Join(t, st.l, st.of(ticket))
		}
		for ticket, at := range st.starts() {
			p, start := told[ticket], at-now
			if start > p.Latest || p.Expected == p.Latest && start != p.Expected {
				t.Errorf("seed %d: %s starts after %v, it was told %v to %v", seed, ticket, start, p.Expected, p.Latest)
			}
			if p.Expected == p.Latest {
				exact++
			}
		}
		limitertest.IsGone(t, client)
	}
	if exact == 0 {
		t.Error("no start was exact")
	}
}

package linetest

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// anyWindows is one to three windows of any algorithms.
func anyWindows(random *rand.Rand) []throttle.Window {
	var windows []throttle.Window
	for i := range 1 + random.IntN(3) {
		w := throttle.Window{
			Name: fmt.Sprint("w", i), Limit: 3 + random.Int64N(9), Period: time.Duration(1+random.IntN(20)) * s,
			Algorithm: []throttle.Algorithm{throttle.AlgorithmSliding, throttle.AlgorithmFixed, throttle.AlgorithmGCRA, throttle.AlgorithmCalendar}[random.IntN(4)],
			Scope:     []throttle.Scope{throttle.ScopeShared, {}}[random.IntN(2)],
			Unit:      []string{"requests", "requests", "tokens"}[random.IntN(3)],
		}
		switch {
		case w.Algorithm == throttle.AlgorithmCalendar:
			w.Period, w.Resets = 0, "* * * * *"
		case w.Algorithm == throttle.AlgorithmGCRA:
			w.Burst = 3 + random.Int64N(5)
		case w.Algorithm == throttle.AlgorithmFixed && random.IntN(2) == 0:
			w.Anchor = throttle.AnchorFirstUse
		}
		if w.Algorithm != throttle.AlgorithmCalendar && random.IntN(4) == 0 {
			w.Margin = w.Period / 8
		}
		windows = append(windows, w)
	}
	return windows
}

// With any windows and costs of one tenant, no ticket starts after its latest start.
func TestExpectedStartsOfAnyWindowsAreBounds(t *testing.T) {
	client := limitertest.Redis(t)
	var real, most time.Duration
	for seed := uint64(80); seed < 92; seed++ {
		random := rand.New(rand.NewPCG(seed, 12))
		windows := anyWindows(random)
		st := newStory(t, client, limitertest.Policy(windows...))
		equal := random.IntN(2) == 0
		draw := func() {
			st.cost = 1 + random.Int64N(3)
			st.tokens = 0
			for _, w := range windows {
				if w.Unit == "tokens" {
					st.tokens = 1 + random.Int64N(3)
				}
			}
		}
		now := time.Duration(random.IntN(60_000)) * ms
		for range random.IntN(6) { // of other costs, before anybody waits
			draw()
			st.at(now)
			r := st.of("a")
			r.Ticket = throttle.Ticket{}
			limitertest.Reserve(t, st.l, r)
			now += time.Duration(random.IntN(3_000_000)) * us
		}
		draw()
		told, at := map[string]throttle.Place{}, map[string]time.Duration{}
		starts := map[string]time.Duration{}
		for i := range 12 {
			if !equal {
				draw()
			}
			ticket := fmt.Sprintf("a%02d", i)
			st.at(now)
			told[ticket], at[ticket] = st.joins(ticket), now
			if random.IntN(2) == 0 {
				now = st.takesUntil(now+time.Duration(random.IntN(3_000_000))*us, starts)
			}
		}
		st.at(now)
		for ticket, start := range st.starts() {
			starts[ticket] = start
		}
		for ticket, p := range told {
			start, ok := starts[ticket]
			start -= at[ticket]
			real, most = real+start, most+p.Latest
			if !ok || start > p.Latest+12*us { // GCRA rounds each start up
				t.Errorf("seed %d: %s starts after %v (%v), it was told %v to %v: %+v", seed, ticket, start, ok, p.Expected, p.Latest, windows)
			}
		}
	}
	// Measured by these seeds: bounds may come closer, and not go farther.
	const measured = 1.50
	t.Logf("latest starts are %.2f times the real ones", most.Seconds()/real.Seconds())
	if float64(most) > measured*float64(real) {
		t.Errorf("the latest starts are %v in all, the starts %v", most, real)
	}
}

// Where tickets of one tenant cost 1 to 12 of 12, they leave room that nobody can use. Their expected
// start counts it: none starts more than a period after it, nor after its latest start.
func TestExpectedStartsCountWhatWholeTicketsWaste(t *testing.T) {
	limitertest.EachOf(t, map[string]throttle.Window{
		"sliding":   {Limit: 12, Period: s},
		"fixed":     {Limit: 12, Period: s, Algorithm: throttle.AlgorithmFixed},
		"first use": {Limit: 12, Period: s, Algorithm: throttle.AlgorithmFixed, Anchor: throttle.AnchorFirstUse},
		"gcra":      {Limit: 12, Period: s, Algorithm: throttle.AlgorithmGCRA, Burst: 12},
	}, func(t *testing.T, client *redis.Client, w throttle.Window) {
		w.Name = "w"
		var real, expected, latest, early, late time.Duration
		for seed := range uint64(10) {
			random := rand.New(rand.NewPCG(seed, 24))
			st := newStory(t, client, limitertest.Policy(w))
			told, at, starts := map[string]throttle.Place{}, map[string]time.Duration{}, map[string]time.Duration{}
			now := time.Duration(0)
			for i := range 60 {
				ticket := fmt.Sprintf("a%02d", i)
				st.cost = 1 + random.Int64N(12)
				st.at(now)
				told[ticket], at[ticket] = st.joins(ticket), now
				if seed%2 == 1 && random.IntN(4) == 0 { // else all join at once
					now = st.takesUntil(now+time.Duration(random.IntN(1_000_000))*us, starts)
				}
			}
			st.at(now)
			for ticket, start := range st.starts() {
				starts[ticket] = start
			}
			for ticket, p := range told {
				start, ok := starts[ticket]
				start -= at[ticket]
				real, expected, latest = real+start, expected+p.Expected, latest+p.Latest
				early, late = max(early, start-p.Expected), max(late, p.Expected-start)
				if !ok || start > p.Expected+w.Period || start > p.Latest+60*us { // GCRA rounds each start up
					t.Errorf("seed %d: %s starts after %v (%v), it was told %v to %v", seed, ticket, start, ok, p.Expected, p.Latest)
				}
			}
		}
		t.Logf("expected starts are %.2f times the real ones, at most %v early and %v late; the latest ones %.2f times",
			expected.Seconds()/real.Seconds(), early, late, latest.Seconds()/real.Seconds())
	})
}

// MaxWait accepts exactly the tickets that start within it, even where costs do not fill the
// window.
func TestMaxWaitOfWholeTickets(t *testing.T) {
	limitertest.EachOf(t, map[string]throttle.Window{
		"sliding":   {Limit: 3, Period: 10 * s},
		"fixed":     {Limit: 3, Period: 10 * s, Algorithm: throttle.AlgorithmFixed},
		"first use": {Limit: 3, Period: 10 * s, Algorithm: throttle.AlgorithmFixed, Anchor: throttle.AnchorFirstUse},
	}, func(t *testing.T, client *redis.Client, w throttle.Window) {
		w.Name = "w"
		st := newStory(t, client, limitertest.Policy(w))
		st.cost = 2
		st.joins("a0")
		st.takes("a0")
		var joined []string
		for i := range 20 {
			id := fmt.Sprintf("a%02d", i)
			r := st.of(id)
			r.MaxWait = 100 * s
			places, err := st.line().Join(t.Context(), []throttle.Request{r})
			limitertest.Must(t, err)
			if places[0].Err == nil {
				joined = append(joined, id)
			}
		}
		starts := st.starts()
		if len(joined) != 10 || starts["a00"] != 10*s || starts["a09"] != 100*s {
			t.Errorf("%q joined, and start at %v", joined, starts)
		}
	})
}

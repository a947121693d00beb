package linetest

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A policy that observes grants everything, and tells what a queue at its rate would do.
func TestAPolicyThatObservesDeniesNothing(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(
			throttle.Window{Name: "own", Limit: 2, Period: 10 * s},
			throttle.Window{Name: "all", Limit: 4, Period: 4 * s, Scope: throttle.ScopeShared, Algorithm: throttle.AlgorithmFixed},
			throttle.Window{Name: "month", Limit: 100, Algorithm: throttle.AlgorithmCalendar, Resets: "@monthly", Scope: throttle.ScopeShared, Unit: "tokens"},
		)
		p.Mode = throttle.ModeObserve
		st := newStory(t, client, p)
		for _, step := range []struct {
			at     time.Duration
			ticket string
			cost   int64
			would  string
		}{
			{0, "a1", 1, ""},
			{0, "a2", 1, ""},
			{0, "a3", 1, "own 5s"}, // one each 5 s, behind what came before
			{0, "a4", 1, "own 10s"},
			{0, "b1", 1, "all 1s"}, // what ran is what all share: one each second
			{0, "b2", 1, "all 2s"},
			{0, "c1", 3, "own never"},
			{5 * s, "c2", 1, "own 5s"},
			{10 * s, "a5", 1, "own 5s"}, // due at 15 s
			{40 * s, "a6", 2, ""},
		} {
			st.cost = step.cost
			d := limitertest.Reserve(t, st.at(step.at).l, st.of(step.ticket))
			would := ""
			if o := d.Observed; o != nil && o.NeverFits {
				would = o.By + " never"
			} else if o != nil {
				would = fmt.Sprint(o.By, " ", o.Wait)
			}
			limitertest.That(t, d.Granted && !d.Queued && !d.Exempt && would == step.would,
				step.ticket, "at", step.at, "would be denied by", would, "want", step.would, d)
		}
		st.cost = 1
		limitertest.That(t, st.joins("a7").Exempt, "a ticket has joined")
		got := st.l.Policies()[0]
		limitertest.That(t, got.Windows[0].Algorithm == throttle.AlgorithmSliding &&
			got.Mode == throttle.ModeObserve, "the policy is", got)
		st.takes().asks(-1)
		// A reservation can be given back.
		d := limitertest.Reserve(t, st.at(h).l, st.of("a8"))
		limitertest.Equal(t, limitertest.Cancel(t, st.l, d.Reservation).Windows[0].Used, 0)
	})
}

// What waits when a policy begins to observe starts at once, and what comes when it ends is denied.
func TestAPolicyBeginsToObserve(t *testing.T) {
	enforces := limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: h}, limitertest.Slots(2))
	observes := enforces
	observes.Mode = throttle.ModeObserve
	st := newStory(t, limitertest.Redis(t), enforces)
	st.granted("a0", "b0")
	st.waits("a1", "a2", "b1")
	st.at(s).takes()
	st.set(observes)
	st.refresh()
	st.at(2*s).takes("a1", "a2", "b1").asks(-1)
	for _, ticket := range []string{"a1", "a2", "b1"} {
		d, err := st.line().ReserveAgain(t.Context(), st.took[ticket], st.of(ticket))
		limitertest.That(t, err == nil && d.Granted, ticket, d, err)
	}
	if d := limitertest.Reserve(t, st.l, st.of("a3")); !d.Granted || d.Observed == nil {
		t.Errorf("%+v", d)
	}
	st.set(enforces)
	st.at(m).granted("c0")
	st.waits("c1")
}

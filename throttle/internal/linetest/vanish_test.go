package linetest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// Redis loses a line, its windows or both, by a restart without persistence or by hand. All waiting
// tickets are taken all the same, from the line or after forward has let them join again. No limit
// is exceeded by what is still counted, and nothing is left behind.
func TestKeysOfALineVanish(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 2, Period: 7 * s}, limitertest.SharedWindow(3, 10*s))
	client := limitertest.Redis(t)
	for seed := range uint64(9) {
		random := rand.New(rand.NewPCG(seed, 7))
		st := newStory(t, client, p)
		logs := map[string][]limitertest.Grant{}
		note := func(d throttle.Decision) {
			for i, w := range d.Windows {
				name := fmt.Sprint(i, w.Scope)
				logs[name] = append(logs[name], limitertest.Grant{At: d.At.UnixMicro(), Units: 1})
			}
		}
		var waiting []string
		for i := range 15 {
			ticket := fmt.Sprint(string("abc"[random.IntN(3)]), i)
			if d := limitertest.Reserve(t, st.at(steps(i)*400*ms).l, st.of(ticket)); d.Granted {
				note(d)
			} else {
				waiting = append(waiting, ticket)
			}
		}
		lost := []string{"everything", "the line", "some windows"}[seed%3]
		for _, key := range client.Keys(t.Context(), "*").Val() {
			window, coin := strings.HasPrefix(key, "sluice:{p}:w:"), random.IntN(2) == 0
			if lost == "everything" || lost == "the line" && !window || lost == "some windows" && window && coin {
				client.Del(t.Context(), key)
			}
		}
		if lost != "the line" {
			clear(logs) // what was counted before is forgotten
		}
		for now := 6 * s; len(waiting) > 0; now += s {
			limitertest.Require(t, now <= 10*m, "seed", seed, "without", lost, waiting, "wait")
			if st.at(now); now%m == 0 { // forward
				st.joins(waiting...)
			}
			for _, ticket := range st.take(throttle.MaxTake) {
				i := slices.Index(waiting, ticket.ID)
				limitertest.Require(t, i >= 0, "seed", seed, "without", lost, ticket.ID, "was taken twice")
				waiting = slices.Delete(waiting, i, i+1)
				note(ticket.Decision)
			}
		}
		for name, log := range logs {
			over := limitertest.MostOver(p.Windows[name[0]-'0'].WithDefaults(), log)
			limitertest.Equal(t, max(0, over), 0, seed, "without", lost, "over of", name)
		}
		st.at(20 * m).take(1)
		for _, key := range client.Keys(t.Context(), "*").Val() {
			limitertest.Equal(t, client.Type(t.Context(), key).Val(), "string", seed, "without", lost, key, "is left")
		}
	}
}

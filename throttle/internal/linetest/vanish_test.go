package linetest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

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
		client.FlushDB(t.Context())
		l, c := limitertest.NewHanded(t, client, p)
		request := func(ticket string) throttle.Request {
			return throttle.Request{Policy: "p", Tenant: ticket[:1], Ticket: limitertest.Ticket(ticket)}
		}
		logs := map[string][]limitertest.Grant{}
		note := func(d throttle.Decision) {
			for _, w := range d.Windows {
				logs[w.Name+w.Scope.String()] = append(logs[w.Name+w.Scope.String()], limitertest.Grant{At: d.At.UnixMicro(), Units: 1})
			}
		}
		var waiting []string
		for i := range 15 {
			c.Set(time.Duration(i) * 400 * ms)
			ticket := fmt.Sprint(string("abc"[random.IntN(3)]), i)
			if d := limitertest.Reserve(t, l, request(ticket)); d.Granted {
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
			if now > 10*m {
				t.Fatalf("seed %d, without %s: %q wait", seed, lost, waiting)
			}
			c.Set(now)
			if now%m == 0 { // forward
				var requests []throttle.Request
				for _, ticket := range waiting {
					requests = append(requests, request(ticket))
				}
				if places, err := l.Line("p").Join(t.Context(), requests); err != nil {
					t.Fatalf("seed %d, without %s: %+v, %v", seed, lost, places, err)
				}
			}
			taken, err := l.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: throttle.MaxTake})
			if err != nil {
				t.Fatalf("seed %d, without %s: %v", seed, lost, err)
			}
			for _, ticket := range taken.Tickets {
				i := slices.Index(waiting, ticket.ID)
				if i < 0 {
					t.Fatalf("seed %d, without %s: %s was taken twice", seed, lost, ticket.ID)
				}
				waiting = slices.Delete(waiting, i, i+1)
				note(ticket.Decision)
			}
		}
		for name, log := range logs {
			i := slices.IndexFunc(p.Windows, func(w throttle.Window) bool { return strings.HasPrefix(name, w.Name) })
			if over := limitertest.MostOver(p.Windows[i].WithDefaults(), log); over > 0 {
				t.Errorf("seed %d, without %s: %s is over by %d", seed, lost, name, over)
			}
		}
		c.Set(20 * m)
		if _, err := l.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 1}); err != nil {
			t.Fatal(err)
		}
		for _, key := range client.Keys(t.Context(), "*").Val() {
			limitertest.Equal(t, client.Type(t.Context(), key).Val(), "string", seed, lost, key)
		}
	}
}

package throttle_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Redis loses a line, its windows or both, by a restart without persistence or by a person: whoever
// waits is granted once all the same, called or by the fallback, nothing that is still counted goes
// over, and nothing is left behind.
func TestKeysOfALineVanish(t *testing.T) {
	p := policy(throttle.Window{Name: "own", Limit: 2, Period: 7 * s}, sharedWindow(3, 10*s))
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for seed := range uint64(12) {
			random := rand.New(rand.NewPCG(seed, 7))
			client.FlushDB(t.Context())
			l, c := newHanded(t, client, p)
			var calls []string
			end := l.OnLine(func(line throttle.Line) { calls = append(calls, line.Calls...) })
			logs := map[string][]grant{}
			var waiting []string
			come := func(ticket string) {
				t.Helper()
				d, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: ticket[:1], Ticket: ticket})
				if err != nil {
					t.Fatalf("seed %d: %s: %v", seed, ticket, err)
				}
				i := slices.Index(waiting, ticket)
				switch {
				case d.Granted:
					for _, w := range d.Windows {
						logs[w.Name+w.Scope.String()] = append(logs[w.Name+w.Scope.String()], grant{d.At.UnixMicro(), 1})
					}
					if i >= 0 {
						waiting = slices.Delete(waiting, i, i+1)
					}
				case i < 0:
					waiting = append(waiting, ticket)
				}
			}
			for i := range 15 {
				c.set(time.Duration(i) * 400 * ms)
				come(fmt.Sprint(string("abc"[random.IntN(3)]), i))
			}
			lost := []string{"everything", "the line", "some windows"}[seed%3]
			for _, key := range client.Keys(t.Context(), "*").Val() {
				window := strings.HasPrefix(key, "sluice:{p}:w:")
				if lost == "everything" || lost == "the line" && !window || lost == "some windows" && window && random.IntN(2) == 0 {
					client.Del(t.Context(), key)
				}
			}
			if lost != "the line" {
				clear(logs) // what was counted before is forgotten
			}
			for now := 6 * s; len(waiting) > 0; now += 500 * ms {
				if now > 10*m {
					t.Fatalf("seed %d, without %s: %q wait", seed, lost, waiting)
				}
				c.set(now)
				if err := l.Pump(t.Context(), "p", "a"); err != nil {
					t.Fatalf("seed %d, without %s: %v", seed, lost, err)
				}
				if now%m == 0 {
					calls = append(calls, waiting...) // the fallback
				}
				for _, ticket := range calls {
					if slices.Contains(waiting, ticket) {
						come(ticket)
					}
				}
				calls = nil
			}
			for name, log := range logs {
				i := slices.IndexFunc(p.Windows, func(w throttle.Window) bool { return strings.HasPrefix(name, w.Name) })
				if over := mostOver(p.Windows[i].WithDefaults(), log); over > 0 {
					t.Errorf("seed %d, without %s: %s is over by %d", seed, lost, name, over)
				}
			}
			c.set(20 * m)
			for _, key := range client.Keys(t.Context(), "*").Val() {
				if kind := client.Type(t.Context(), key).Val(); kind != "string" {
					t.Errorf("seed %d, without %s: the %s %q is left", seed, lost, kind, key)
				}
			}
			end()
		}
	})
}

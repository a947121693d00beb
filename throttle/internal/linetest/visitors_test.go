package linetest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// 3,000 tenants visit a line that never empties, as one tenant waits for its own window. 60 s after
// the last of them has gone, nothing in the line names one.
func TestVisitorsLeaveNothing(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		for name, windows := range map[string][]throttle.Window{
			"tenants only": nil,
			"more scopes":  {{Name: "region", Limit: 2000, Period: s, Scope: throttle.Per("region")}},
		} {
			sc := newScene(t, client, limitertest.Policy(append(windows, limitertest.SharedWindow(1000, s), throttle.Window{Name: "own", Limit: 5, Period: 10 * s})...))
			sc.with = map[string]string{"region": "north"}
			sc.joinMany("q", "bulk", 600)
			for batch := range 10 {
				var requests []throttle.Request
				for i := range 300 {
					r := sc.of("v")
					r.Tenant = fmt.Sprintf("visitor%d", 300*batch+i)
					r.Ticket = limitertest.Ticket(r.Tenant)
					requests = append(requests, r)
				}
				limitertest.Join(t, sc.l, requests...)
				for visited := 0; visited < 300; {
					taken := limitertest.Take(t, sc.l, throttle.MaxTake, "q")
					for _, ticket := range taken.Tickets {
						if ticket.Decision.Tenant != "bulk" {
							visited++
						}
					}
					sc.c.US.Add(taken.Next.Microseconds())
				}
			}
			for range 60 {
				sc.c.US.Add(s.Microseconds())
				limitertest.Take(t, sc.l, throttle.MaxTake, "q")
			}
			st := limitertest.ReadLine(t, client)
			for key, set := range st.Sets {
				for member := range set {
					if strings.Contains(key+member, "visitor") {
						t.Fatalf("%s: %d members of %s, such as %s", name, len(set), key, member)
					}
				}
			}
			if left := fmt.Sprint(st.Hashes, st.Values); strings.Contains(left, "visitor") || !strings.Contains(left, "bulk") {
				t.Errorf("%s: left: %.300s", name, left)
			}
			limitertest.Agrees(t, client)
		}
	})
}

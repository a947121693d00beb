package linetest

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// Every ticket that fits is taken: a second look at every node finds no ticket that the first has missed. Of any two
// scopes one contains the other. Where two cross, as [tenant] and [region] do, a grant may move the obstacle of a
// first ticket to another node. Tickets behind it wait until the node is due (docs/explanation/line.md).
func TestEveryTicketThatFitsIsTaken(t *testing.T) {
	client := limitertest.RedisClient(t)
	rapid.Check(t, func(t *rapid.T) {
		ctx := t.Context()
		expect.Must(t, client.FlushDB(ctx).Err())
		slotsOrPeriod := func(i int) throttle.Window {
			w := throttle.Window{
				Name:   fmt.Sprint("w", i),
				Limit:  rapid.Int64Range(2, 4).Draw(t, "limit"),
				Shared: rapid.Bool().Draw(t, "shared"),
				Unit:   rapid.SampledFrom([]string{"requests", "requests", "tokens"}).Draw(t, "unit"),
			}
			if rapid.Bool().Draw(t, "slots") {
				w.Algorithm, w.Lease = throttle.AlgorithmConcurrency, rapid.SampledFrom([]time.Duration{s, 2 * s, 4 * s}).Draw(t, "lease")
			} else {
				w.Period = rapid.SampledFrom([]time.Duration{s, 3 * s}).Draw(t, "period")
			}
			return w
		}
		p := limitertest.Policy(throttle.Window{Name: "all", Algorithm: throttle.AlgorithmConcurrency, Limit: 3, Lease: 3 * s, Shared: true})
		p.UpstreamShared = rapid.Bool().Draw(t, "upstream shared")
		for i := range rapid.IntRange(1, 3).Draw(t, "windows") {
			p.Windows = append(p.Windows, slotsOrPeriod(i))
		}
		tokens := slices.ContainsFunc(p.Windows, func(w throttle.Window) bool { return w.Unit == "tokens" })
		l, c := limitertest.NewWithClock(t, client, p)
		waits := map[string]throttle.Request{}
		var runs []throttle.Reservation
		next := time.Duration(-1)
		seq := 0
		come := func(r throttle.Request) {
			d := limitertest.Reserve(t, l, r)
			if d.Granted {
				delete(waits, r.Ticket.ID)
				runs = append(runs, d.Reservation)
			} else {
				waits[r.Ticket.ID] = r
			}
		}
		take := func() (ids []string) {
			for n := 0; ; n++ {
				taken := expect.Got(l.Line("p").Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: throttle.MaxTake}))(t)
				for _, ticket := range taken.Tickets {
					_, waiting := waits[ticket.ID]
					expect.Require(t, waiting && !ticket.NeverFits, "took", ticket, "which does not wait")
					delete(waits, ticket.ID)
					ids = append(ids, ticket.ID)
					runs = append(runs, ticket.Decision.Reservation)
				}
				if next = taken.Next; next != 0 {
					return ids
				}
				expect.Require(t, n <= 100, "takes without end")
			}
		}
		// look looks at everything again.
		look := func(after string) {
			take()
			expect.Require(t, (next < 0) == (len(waits) == 0), "after", after, len(waits), "wait, the line is asked again after", next)
			if len(waits) == 0 {
				return
			}
			expect.Must(t, client.Set(ctx, "sluice:{p}:l", "0 other", time.Hour).Err())
			ids := take()
			expect.Require(t, len(ids) == 0, "after", after, "nobody had seen that", ids, "fit")
		}
		anyRequest := func(t *rapid.T) throttle.Request {
			seq++
			r := throttle.Request{
				Policy: "p", Tenant: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "tenant"), Ticket: limitertest.Ticket(fmt.Sprint("t", seq)),
				Attributes: map[string]string{"region": rapid.SampledFrom([]string{"north", "south"}).Draw(t, "region")},
				Cost:       map[string]int64{"requests": rapid.SampledFrom([]int64{1, 1, 2}).Draw(t, "cost")},
			}
			if tokens {
				r.Cost["tokens"] = rapid.Int64Range(0, 2).Draw(t, "tokens")
			}
			return r
		}
		run := func(t *rapid.T) throttle.Reservation {
			if len(runs) == 0 {
				t.Skip("nothing runs")
			}
			return runs[rapid.IntRange(max(0, len(runs)-6), len(runs)-1).Draw(t, "run")]
		}
		check := func(err error) {
			expect.Must(t, err)
		}
		did := ""
		t.Repeat(map[string]func(*rapid.T){
			"come": func(t *rapid.T) { did = "come"; come(anyRequest(t)) },
			"come many": func(t *rapid.T) {
				did = "come many"
				for range 5 {
					come(anyRequest(t))
				}
			},
			"come again": func(t *rapid.T) {
				did = "come again"
				if len(waits) > 0 {
					come(waits[slices.Min(slices.Collect(maps.Keys(waits)))])
				}
			},
			"leave": func(t *rapid.T) {
				did = "leave"
				if len(waits) > 0 {
					ticket := slices.Min(slices.Collect(maps.Keys(waits)))
					check(l.Line("p").Leave(ctx, limitertest.Ticket(ticket)))
					delete(waits, ticket)
				}
			},
			"release": func(t *rapid.T) { did = "release"; check(run(t).Release(ctx)) },
			"cancel":  func(t *rapid.T) { did = "cancel"; _, err := run(t).Cancel(ctx); check(err) },
			"settle": func(t *rapid.T) {
				did = "settle"
				unit := "requests"
				if tokens {
					unit = "tokens"
				}
				_, err := run(t).Settle(ctx, map[string]int64{unit: rapid.Int64Range(0, 3).Draw(t, "actual")})
				check(err)
			},
			"pause": func(t *rapid.T) {
				did = "pause"
				_, err := run(t).Pause(ctx, rapid.SampledFrom([]time.Duration{s, 5 * s}).Draw(t, "pause"), "")
				check(err)
			},
			"resume": func(t *rapid.T) { did = "resume"; check(l.Resume(ctx, run(t).Request)) },
			"remaining": func(t *rapid.T) {
				did = "remaining"
				check(run(t).ReportRemaining(ctx, throttle.Requests,
					rapid.Int64Range(0, 5).Draw(t, "left"), rapid.SampledFrom([]time.Duration{s, 5 * s}).Draw(t, "reset")))
			},
			"pass": func(t *rapid.T) {
				did = "pass"
				c.US.Add(rapid.SampledFrom([]time.Duration{us, 100 * ms, s, 4 * s}).Draw(t, "time").Microseconds())
			},
			"pass until due": func(t *rapid.T) {
				did = "pass until due"
				c.US.Add(max(0, next.Microseconds()))
			},
			"": func(t *rapid.T) { look(did) },
		})
		for turn := 0; len(waits) > 0; turn++ {
			expect.Require(t, turn <= 3000, len(waits), "wait for ever")
			c.US.Add(max(next.Microseconds(), 1))
			look("nothing")
		}
	})
}

package modeltest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A historyStep is what one caller asked for.
type historyStep struct {
	what string
	r    throttle.Reservation // or only its request
	now  int64
}

// spec answers one call after the other, as the model does.
func spec(windows []throttle.Window) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return newModel("exempt", windows) },
		Step: func(state, input, output any) (bool, any) {
			m, in := state.(*model).clone(), input.(historyStep)
			var want throttle.Decision
			switch in.what {
			case "reserve":
				want = m.reserve(in.r.Request, in.now)
			case "peek":
				want = m.peek(in.r.Request, in.now)
			case "cancel":
				want = m.cancel(in.r, in.now)
			}
			return output.(string) == describe(want), m
		},
		Equal:             func(a, b any) bool { return a.(*model).text() == b.(*model).text() },
		DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v -> %s", in, out) },
	}
}

func (m *model) clone() *model {
	same := map[*event]*event{}
	c := &model{exempt: m.exempt, asked: maps.Clone(m.asked), granted: maps.Clone(m.granted), last: maps.Clone(m.last), logs: map[string]*grantLog{}, windows: m.windows}
	copied := func(e *event) *event {
		if e == nil {
			return nil
		}
		if same[e] == nil {
			d := *e
			same[e] = &d
		}
		return same[e]
	}
	for name, log := range m.logs {
		l := &grantLog{until: log.until}
		for _, e := range log.events {
			d := copied(e)
			d.of = copied(e.of)
			l.events = append(l.events, d)
		}
		c.logs[name] = l
	}
	return c
}

// text tells models apart that may answer differently. In which order grants of one time came does
// not matter.
func (m *model) text() string {
	var lines []string
	for key, at := range m.granted {
		lines = append(lines, fmt.Sprint(key, " ", at))
	}
	for name, log := range m.logs {
		for _, e := range log.events {
			lines = append(lines, fmt.Sprint(name, " ", e.at, e.cancelled, e.key, e.units, e.of != nil))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// Concurrent calls of several limiters are linearizable: there is an order of them in which each
// gets the model's answer, and no call comes before one that was answered before it was made.
func TestConcurrentCallsAreLinearizable(t *testing.T) {
	windows := []throttle.Window{
		{Name: "sliding", Limit: 5, Period: 10 * s},
		{Name: "shared", Algorithm: throttle.AlgorithmFixed, Limit: 7, Period: 15 * s, Scope: throttle.ScopeShared},
		{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 4, Burst: 6, Period: 7 * s},
	}
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		for seed := range uint64(3) {
			limitertest.Must(t, client.FlushDB(t.Context()).Err())
			c := limitertest.NewClock()
			var limiters []*throttle.Limiter
			for range 2 {
				limiters = append(limiters, limitertest.NewBy(t, client, c, limitertest.Policy(windows...)))
			}
			var mu sync.Mutex
			var history []porcupine.Operation
			var made []throttle.Reservation
			begin := time.Now()
			// The clock stands still while they call, and goes on between rounds: so everybody
			// knows what it said.
			for round := range 4 {
				var callers sync.WaitGroup
				for i := range 6 {
					callers.Go(func() {
						random := rand.New(rand.NewPCG(seed, uint64(round*100+i)))
						l := limiters[i%len(limiters)]
						for j := range 4 {
							in := historyStep{now: c.US.Load()}
							in.r.Request = limitertest.Acme(1 + random.Int64N(2))
							in.r.Tenant = string("ab"[random.IntN(2)])
							in.r.IdempotencyKey = fmt.Sprint(seed, round, i, j)
							in.what = []string{"reserve", "reserve", "cancel", "peek"}[random.IntN(4)]
							mu.Lock()
							if n := len(made); in.what == "cancel" && n > 0 {
								in.r = made[n-1-random.IntN(min(n, 4))]
							} else if n > 0 && random.IntN(6) == 0 {
								in.what, in.r = "reserve", throttle.Reservation{Request: made[random.IntN(n)].Request}
							} else if in.what == "cancel" {
								in.what = "reserve"
							}
							mu.Unlock()
							var d throttle.Decision
							var err error
							call := time.Since(begin)
							switch in.what {
							case "reserve":
								d, err = l.Reserve(t.Context(), in.r.Request)
							case "peek":
								d, err = l.Peek(t.Context(), in.r.Request)
							case "cancel":
								d, err = limitertest.TryCancel(t.Context(), l, in.r)
							}
							returned := time.Since(begin)
							if err != nil {
								t.Error(err)
								return
							}
							mu.Lock()
							history = append(history, porcupine.Operation{ClientId: i, Input: in, Call: int64(call), Output: describe(d), Return: int64(returned)})
							if in.what == "reserve" && d.Granted {
								made = append(made, d.Reservation)
							}
							mu.Unlock()
						}
					})
				}
				callers.Wait()
				c.US.Add(rand.New(rand.NewPCG(seed, uint64(round))).Int64N(4e6))
			}
			model := spec(windows)
			switch porcupine.CheckOperationsTimeout(model, history, 20*time.Second) {
			case porcupine.Illegal:
				for _, op := range history {
					t.Logf("%d: %d to %d: %s", op.ClientId, op.Call, op.Return, model.DescribeOperation(op.Input, op.Output))
				}
				t.Fatalf("seed %d: no order of the %d calls explains the answers", seed, len(history))
			case porcupine.Unknown:
				t.Logf("seed %d: not decided in time", seed)
			}
		}
	})
}

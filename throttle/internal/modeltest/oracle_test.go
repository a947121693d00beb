package modeltest

import (
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// anyWindow draws a window whose numbers collide often.
func anyWindow(t *rapid.T, i int) throttle.Window {
	w := throttle.Window{
		Algorithm: rapid.SampledFrom([]throttle.Algorithm{throttle.AlgorithmSliding, throttle.AlgorithmFixed, throttle.AlgorithmGCRA}).Draw(t, "algorithm"),
		Limit:     rapid.Int64Range(1, 6).Draw(t, "limit"),
		Name:      fmt.Sprint("w", i),
		Per:       rapid.SampledFrom([][]string{{"tenant"}, nil, {"tenant", "user"}, {"user"}}).Draw(t, "per"),
		Period:    rapid.SampledFrom([]time.Duration{s, 1900 * ms, 7 * s, 10 * s, m, 24 * h}).Draw(t, "period"),
		Unit:      rapid.SampledFrom([]string{"requests", "requests", "tokens"}).Draw(t, "unit"),
	}
	w.Shared = w.Per == nil
	if w.Algorithm == throttle.AlgorithmGCRA {
		w.Burst = rapid.Int64Range(1, 8).Draw(t, "burst")
		w.Limit = rapid.SampledFrom([]int64{w.Limit, w.Limit, 999_999_937}).Draw(t, "gcra limit")
		w.Period = rapid.SampledFrom([]time.Duration{s, 1900 * ms, 3 * s, 366*24*h - us}).Draw(t, "gcra period")
	}
	if rapid.Bool().Draw(t, "margin") {
		w.Margin = (w.Period / 20).Truncate(us)
	}
	return w
}

// The scripts answer random sequences of calls as the model does: granted, used, remaining, when to
// retry and when all resets, for every window. A denial, a Peek and an error change no byte in Redis.
func TestScriptsAnswerAsTheModel(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		histories := 1
		if strings.HasSuffix(t.Name(), "/redis") {
			histories = 6 // it is the one that counts, and the fast one
		}
		rapid.Check(t, func(t *rapid.T) {
			for range histories {
				var windows []throttle.Window
				tokens, gcra := false, false
				for i := range rapid.IntRange(1, 5).Draw(t, "windows") {
					windows = append(windows, anyWindow(t, i))
					tokens = tokens || windows[i].Unit == "tokens"
					gcra = gcra || windows[i].Algorithm == throttle.AlgorithmGCRA
				}
				changing := rapid.Bool().Draw(t, "limits change")
				withExempt := func() throttle.Policy {
					p := limitertest.Policy(windows...)
					p.Tenants = map[string]throttle.Tenant{"exempt": {Exempt: true}}
					return p
				}
				expect.Must(t, client.FlushDB(t.Context()).Err())
				c := limitertest.NewClock()
				hooked := limitertest.NewEdited(t, client, c, []func(string) string{limitertest.WithoutExpiry}, withExempt())
				l := hooked.Limiter
				m := newModel("exempt", windows)
				var made []throttle.Reservation
				var retryIn time.Duration // of the last denial

				anyRequest := func(t *rapid.T) throttle.Request {
					r := throttle.Request{
						Attributes: map[string]string{"user": rapid.SampledFrom([]string{"bob", "eve"}).Draw(t, "user")},
						Cost:       map[string]int64{},
						Policy:     "p",
						Tenant:     rapid.SampledFrom([]string{"acme", "acme", "initech", "exempt"}).Draw(t, "tenant"),
					}
					if cost := rapid.Int64Range(-1, 4).Draw(t, "cost"); cost >= 0 {
						r.Cost["requests"] = cost
					}
					if tokens {
						r.Cost["tokens"] = rapid.Int64Range(0, 5).Draw(t, "tokens")
					}
					return r
				}
				same := func(t *rapid.T, verb string, got, want throttle.Decision) {
					t.Helper()
					got.Reservation = throttle.Reservation{}
					at := c.US.Load() - limitertest.Midnight
					expect.Require(t, reflect.DeepEqual(got, want), verb, at, describe(got), "\nthe model says\n", describe(want))
				}
				tryReserve := func(t *rapid.T, r throttle.Request) {
					real := c.US.Load()
					before := limitertest.Dump(t, client)
					d, err := l.Reserve(t.Context(), r)
					expect.Require(t, d.Granted || maps.Equal(before, limitertest.Dump(t, client)), "a denial changed Redis", d, err)
					if m.neverFits(r) {
						expect.Err(t, err, new(*throttle.RequestError), "a cost that never fits")
						return
					}
					expect.Must(t, err)
					same(t, "Reserve", d, m.reserve(r, d.Reservation.ID, real))
					if d.Granted {
						made = append(made, d.Reservation)
						return
					}
					retryIn = d.RetryIn
					if changing {
						return // a window whose rate was cut may be forgotten sooner than it drains
					}
					// The truth to the microsecond, if nobody comes between.
					for early, granted := range []bool{true, false} {
						c.US.Store(real + d.RetryIn.Microseconds() - int64(early))
						expect.Require(t, limitertest.Peek(t, l, r).Granted == granted, early, "us before", retryIn)
					}
					c.US.Store(real)
				}

				actions := map[string]func(*rapid.T){
					"reserve": func(t *rapid.T) { tryReserve(t, anyRequest(t)) },
					"reserve more": func(t *rapid.T) {
						r := anyRequest(t)
						for range rapid.IntRange(2, 6).Draw(t, "times") {
							tryReserve(t, r)
						}
					},
					"peek": func(t *rapid.T) {
						if r := anyRequest(t); !m.neverFits(r) {
							before := limitertest.Dump(t, client)
							same(t, "Peek", limitertest.Peek(t, l, r), m.peek(r, c.US.Load()))
							expect.Require(t, maps.Equal(before, limitertest.Dump(t, client)), "Peek changed Redis")
						}
					},
					"cancel": func(t *rapid.T) {
						if len(made) == 0 {
							t.Skip("nothing was granted yet")
						}
						r := rapid.SampledFrom(made).Draw(t, "reservation")
						if m.outlived(r, c.US.Load()) {
							t.Skip("a window has forgotten it")
						}
						same(t, "Cancel", limitertest.Cancel(t, l, r), m.cancel(r, c.US.Load()))
					},
					// One call to Redis answers as so many calls do, one after the other.
					"batch": func(t *rapid.T) {
						real := c.US.Load()
						// A scope that is empty forgets how far the clock is behind it: between two calls, but not within one.
						fair := func(r throttle.Request) bool { return !m.neverFits(r) && m.look(r, real).behind == 0 }
						var calls []limitertest.Call
						for range rapid.IntRange(2, 6).Draw(t, "calls") {
							switch rapid.SampledFrom([]string{"reserve", "reserve", "cancel", "cancel", "peek"}).Draw(t, "call") {
							case "reserve":
								if r := anyRequest(t); fair(r) {
									calls = append(calls, limitertest.Call{Request: r})
								}
							case "peek":
								if r := anyRequest(t); fair(r) {
									calls = append(calls, limitertest.Call{Request: r, Peek: true})
								}
							case "cancel":
								if len(made) > 0 {
									if r := rapid.SampledFrom(made).Draw(t, "reservation"); fair(r.Request) && !m.outlived(r, real) {
										calls = append(calls, limitertest.Call{Cancel: &r})
									}
								}
							}
						}
						if len(calls) == 0 {
							t.Skip("nothing to call")
						}
						decisions, errs := hooked.TryTogether(t, calls...)
						for i, d := range decisions {
							var want throttle.Decision
							c := calls[i]
							expect.Must(t, errs[i])
							switch {
							case c.Cancel != nil:
								want = m.cancel(*c.Cancel, real)
							case c.Peek:
								want = m.peek(c.Request, real)
							default:
								want = m.reserve(c.Request, d.Reservation.ID, real)
								if d.Granted {
									made = append(made, d.Reservation)
								}
							}
							same(t, fmt.Sprintf("call %d of the batch %+v", i, calls[i]), d, want)
						}
					},
					"time": func(t *rapid.T) {
						var step int64
						switch rapid.SampledFrom([]string{"tiny", "retry", "retry", "short", "long", "day", "back"}).Draw(t, "step") {
						case "tiny":
							step = rapid.Int64Range(1, 3).Draw(t, "us")
						case "retry":
							step = retryIn.Microseconds() + rapid.Int64Range(-1, 1).Draw(t, "beside")
						case "short":
							step = rapid.Int64Range(0, 2e6).Draw(t, "us")
						case "long":
							step = rapid.Int64Range(0, 120).Draw(t, "s") * 1e6
						case "day":
							step = rapid.Int64Range(0, 25).Draw(t, "h") * 3600e6
						case "back":
							if changing && gcra {
								// A bucket that drains more slowly now is forgotten when it would have been
								// empty, by the time of its scope; the model goes by the latest of all scopes.
								t.Skip("a rate was changed")
							}
							step = -rapid.Int64Range(0, 100e6).Draw(t, "us")
						}
						if c.US.Load()+step > 1<<52 {
							t.Skip("the year is 2112: in 2255 doubles do not hold every microsecond")
						}
						c.US.Add(step)
					},
				}
				if changing {
					actions["limits"] = func(t *rapid.T) {
						i := rapid.IntRange(0, len(windows)-1).Draw(t, "window")
						windows[i].Limit = rapid.Int64Range(1, 6).Draw(t, "limit")
						if windows[i].Algorithm == throttle.AlgorithmGCRA {
							windows[i].Burst = rapid.Int64Range(1, 8).Draw(t, "burst")
						}
						expect.Must(t, l.SetPolicies([]throttle.Policy{withExempt()}))
						m.setWindows(windows)
					}
				}
				t.Repeat(actions)
			}
		})
	})
}

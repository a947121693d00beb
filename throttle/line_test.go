package throttle_test

import (
	"errors"
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

// A scene is a line by hand: every step is one call, and every call to wake is written down.
type scene struct {
	t      *testing.T
	client *redis.Client
	l      *throttle.Limiter
	c      *clock
	calls  []string
	due    time.Duration
	cost   int64
	front  bool
	tokens int64
	with   map[string]string // attributes
}

func newScene(t *testing.T, client *redis.Client, p throttle.Policy) *scene {
	t.Helper()
	sc := &scene{t: t, client: client, cost: 1}
	sc.l, sc.c = newHanded(t, client, p)
	t.Cleanup(sc.l.OnLine(func(line throttle.Line) {
		sc.calls, sc.due = append(sc.calls, line.Calls...), line.Due
	}))
	return sc
}

func (sc *scene) at(d time.Duration) *scene { sc.c.set(d); return sc }

// of is the request of a ticket, whose tenant is its first letter.
func (sc *scene) of(ticket string) throttle.Request {
	r := throttle.Request{Policy: "p", Tenant: ticket[:1], Ticket: ticket, Cost: map[string]int64{"requests": sc.cost}, Front: sc.front, Attributes: sc.with}
	if sc.tokens > 0 {
		r.Cost["tokens"] = sc.tokens
	}
	return r
}

// granted reserves for the tickets and fails if one is denied.
func (sc *scene) granted(tickets ...string) (last throttle.Decision) {
	sc.t.Helper()
	for _, ticket := range tickets {
		if last = reserve(sc.t, sc.l, sc.of(ticket)); !last.Granted {
			sc.t.Fatalf("%s is denied for %v, want granted", ticket, last.RetryIn)
		}
	}
	return last
}

// denied reserves and fails if the ticket is granted, or denied for another time.
func (sc *scene) denied(ticket string, retryIn time.Duration) {
	sc.t.Helper()
	if d := reserve(sc.t, sc.l, sc.of(ticket)); d.Granted || d.RetryIn != retryIn {
		sc.t.Fatalf("%s: granted %v, denied for %v, want denied for %v", ticket, d.Granted, d.RetryIn, retryIn)
	}
	if d := peek(sc.t, sc.l, sc.of(ticket)); d.Granted || d.RetryIn != retryIn {
		sc.t.Fatalf("%s: Peek says granted %v, denied for %v, want denied for %v", ticket, d.Granted, d.RetryIn, retryIn)
	}
}

func (sc *scene) waits(tickets ...string) {
	sc.t.Helper()
	for _, ticket := range tickets {
		if d := reserve(sc.t, sc.l, sc.of(ticket)); d.Granted {
			sc.t.Fatalf("%s is granted, want denied", ticket)
		}
	}
}

func (sc *scene) pump() *scene {
	sc.t.Helper()
	if err := sc.l.Pump(sc.t.Context(), "p", "a"); err != nil {
		sc.t.Fatal(err)
	}
	return sc
}

func (sc *scene) leave(ticket string) *scene {
	sc.t.Helper()
	if err := sc.l.Leave(sc.t.Context(), "p", ticket[:1], ticket); err != nil {
		sc.t.Fatal(err)
	}
	return sc
}

func (sc *scene) set(p throttle.Policy) {
	sc.t.Helper()
	if err := sc.l.SetPolicies([]throttle.Policy{p}); err != nil {
		sc.t.Fatal(err)
	}
}

// called fails unless exactly these were called since the last time, in this order.
func (sc *scene) called(tickets ...string) {
	sc.t.Helper()
	if !slices.Equal(sc.calls, tickets) {
		sc.t.Fatalf("called %q, want %q", sc.calls, tickets)
	}
	sc.calls = nil
}

// dueIn fails unless somebody must look again after that time; negative is never.
func (sc *scene) dueIn(d time.Duration) {
	sc.t.Helper()
	if d < 0 && sc.due >= 0 || d >= 0 && sc.due != d {
		sc.t.Fatalf("due in %v, want %v", sc.due, d)
	}
}

func TestLineScenes(t *testing.T) {
	two := sharedWindow(2, 10*s)
	own := throttle.Window{Name: "own", Limit: 2, Period: 10 * s}
	for name, scene := range map[string]struct {
		p    throttle.Policy
		play func(sc *scene)
	}{
		"the walk through time of docs/line.md": {policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.at(1*s).denied("a3", 9*s)
			sc.at(2*s).denied("a4", 8*s)
			sc.at(3*s).denied("b1", 7*s)
			sc.called()
			sc.at(10*s - us).pump().called()
			sc.dueIn(us)
			sc.at(10*s).pump().called("a3", "b1")
			sc.dueIn(2 * s) // by then they have come
			sc.at(10*s+10*ms).granted("a3", "b1")
			sc.called()
			sc.dueIn(10*s - 10*ms) // as if they had come when they were called
			sc.at(20 * s).pump().called()
			sc.dueIn(10 * ms)
			sc.at(20*s + 10*ms).pump().called("a4")
			sc.at(20*s + 20*ms).granted("a4")
			sc.dueIn(-1)
		}},
		"nobody is let in before those who wait": {policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.at(1 * s).waits("a3")
			sc.at(10 * s).granted("b1") // there is room for two
			sc.called("a3")             // whoever looks first calls
			sc.waits("c1")
			sc.granted("a3")
			sc.at(20 * s).pump().called("c1")
		}},
		"what is held for one is nobody else's": {policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4")
			sc.at(10*s).pump().called("a3", "a4")
			sc.at(11 * s).waits("b1")
			r := sc.of("x")
			r.Ticket = ""
			if d := reserve(sc.t, sc.l, r); d.Granted {
				sc.t.Error("one without a ticket took what was held")
			}
			sc.granted("a4", "a3")
		}},
		"Peek says what is promised": {policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.denied("a3", 10*s)
			sc.denied("a4", 10*s)
			sc.denied("a5", 20*s)
			sc.at(4*s).denied("a5", 16*s)
			sc.at(10*s).pump().called("a3", "a4")
			if d := peek(sc.t, sc.l, sc.of("a3")); !d.Granted {
				sc.t.Errorf("Peek denies one who was called for %v", d.RetryIn)
			}
			if d := peek(sc.t, sc.l, sc.of("a9")); d.Granted || d.RetryIn != 10*s {
				sc.t.Errorf("Peek of one who is not in line: granted %v, %v", d.Granted, d.RetryIn)
			}
		}},
		"a hold runs out": {policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4", "a5")
			sc.at(10*s).pump().called("a3", "a4")
			sc.granted("a4")
			sc.at(12 * s).pump().called("a3") // once more, and not a5
			sc.at(14 * s).pump().called("a5") // a3 is skipped
			sc.granted("a5")
			sc.at(20 * s).pump().called()
			sc.dueIn(54 * s)
			sc.at(74 * s).pump().called("a3")
			sc.granted("a3")
			sc.dueIn(-1)
		}},
		"one who was skipped comes": {policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4")
			for i := range 2 {
				sc.at(10*s+time.Duration(i)*2*s).pump().called("a3", "a4")
			}
			sc.at(14 * s).pump()
			sc.at(20*s).granted("a3", "a4")
			sc.dueIn(-1)
		}},
		"a called one comes after its hold": {policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3")
			sc.at(10 * s).pump().called("a3")
			sc.at(13 * s).granted("a3")
			sc.dueIn(-1)
		}},
		"Leave gives the place to the next": {policy(two), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4", "b1")
			sc.leave("a3").leave("nobody")
			sc.at(10*s).pump().called("a4", "b1")
			sc.waits("c1")
			sc.at(10*s + ms).leave("a4").called("c1") // what was held for it
			sc.granted("b1", "c1")
			sc.dueIn(-1)
		}},
		"a tenant does not pay for those who left": {policy(sharedWindow(1, s)), func(sc *scene) {
			sc.granted("b0")
			sc.waits("a1", "a2", "a3", "a4", "b1", "b2")
			sc.at(1 * s).pump().called("a1")
			sc.leave("a1").called("a2")
			sc.leave("a2").called("a3")
			sc.granted("a3")
			sc.at(2 * s).pump().called("b1")
			sc.granted("b1")
			sc.at(3 * s).pump().called("a4")
		}},
		"Cancel gives to whoever waits": {policy(two), func(sc *scene) {
			d := sc.granted("a1")
			sc.granted("a2")
			sc.waits("a3")
			sc.at(1 * s)
			cancel(sc.t, sc.l, d.Reservation)
			sc.called("a3")
			cancel(sc.t, sc.l, d.Reservation) // once
			sc.granted("a3")
			sc.dueIn(-1)
		}},
		"in front": {policy(own), func(sc *scene) {
			sc.granted("a1", "a2")
			sc.waits("a3", "a4")
			sc.front = true
			sc.denied("a5", 10*s)
			sc.front = false
			sc.at(10*s).pump().called("a5", "a3")
		}},
		"in front of its own tenant only": {policy(sharedWindow(1, s)), func(sc *scene) {
			sc.granted("c1")
			sc.waits("a1", "b1", "b2")
			sc.front = true
			sc.waits("b3")
			sc.front = false
			for i, ticket := range []string{"b3", "a1", "b1", "b2"} {
				sc.at(time.Duration(i+1) * s).pump()
				sc.granted(ticket)
				sc.called(ticket)
			}
		}},
		"planned": {policy(two), func(sc *scene) {
			for i, want := range []time.Duration{0, 0, 10 * s, 10 * s, 20 * s} {
				d, err := sc.l.Plan(sc.t.Context(), sc.of(fmt.Sprint("a", i)), 0, 0)
				if err != nil || !d.Planned || d.Known || d.Granted || d.RetryIn != want && i < 2 || i >= 2 && d.RetryIn < want {
					sc.t.Errorf("%d: planned %v, known %v, in %v, want %v; %v", i, d.Planned, d.Known, d.RetryIn, want, err)
				}
			}
			sc.called() // of the first two the caller knows
			sc.granted("a0", "a1")
			d, err := sc.l.Plan(sc.t.Context(), sc.of("a2"), 0, 0)
			if err != nil || !d.Planned || !d.Known {
				sc.t.Errorf("planned again: %+v, %v", d, err)
			}
			sc.at(10*s).pump().called("a2", "a3") // it kept its place
		}},
		"plans are refused": {policy(own), func(sc *scene) {
			sc.granted("a1", "a2")
			refused := func(maxWait time.Duration, backlog int) (e *throttle.RefusedError) {
				before := readLineState(sc.t, sc.client, "sluice:{p:a}:")
				_, err := sc.l.Plan(sc.t.Context(), sc.of("a9"), maxWait, backlog)
				if err != nil && !errors.As(err, &e) {
					sc.t.Fatal(err)
				}
				if after := readLineState(sc.t, sc.client, "sluice:{p:a}:"); e != nil && fmt.Sprintf("%+v", after) != fmt.Sprintf("%+v", before) {
					sc.t.Errorf("a refusal wrote %+v", after)
				}
				return e
			}
			if e := refused(10*s-us, 0); e == nil || e.MaxWait != 10*s-us || e.Backlog != 0 || e.Decision.RetryIn != 10*s {
				sc.t.Errorf("refused %+v", e)
			}
			sc.waits("a3", "a4")
			if e := refused(0, 2); e == nil || e.Backlog != 2 {
				sc.t.Errorf("refused %+v", e)
			}
			if e := refused(20*s, 3); e != nil {
				sc.t.Errorf("refused %+v", e)
			}
		}},
		"exempt": {
			throttle.Policy{Name: "p", Windows: []throttle.Window{two}, Tenants: map[string]throttle.Tenant{"x": {Exempt: true}}},
			func(sc *scene) {
				sc.granted("a1", "a2")
				sc.waits("a3")
				if d := sc.granted("x1"); d.Windows[0].Used != 3 {
					sc.t.Errorf("%d used", d.Windows[0].Used)
				}
				if d, err := sc.l.Plan(sc.t.Context(), sc.of("x2"), 0, 0); err != nil || !d.Planned || d.RetryIn != 0 {
					sc.t.Errorf("planned %+v, %v", d, err)
				}
				p := policy(two)
				p.Tenants = map[string]throttle.Tenant{"a": {Exempt: true}}
				sc.set(p)
				sc.granted("a3") // its place is given back
				sc.dueIn(-1)
			},
		},
		"without a ticket, behind all that wait": {policy(sharedWindow(10, 10*s)), func(sc *scene) {
			sc.granted("a1", "a2", "a3")
			sc.cost = 9
			sc.waits("b1")
			sc.cost = 1
			r := sc.of("x")
			r.Ticket = ""
			if d := reserve(sc.t, sc.l, r); d.Granted || d.RetryIn < 10*s {
				sc.t.Errorf("granted %v, denied for %v", d.Granted, d.RetryIn)
			}
			sc.waits("c1") // nor with one
			sc.at(10*s).pump().called("b1", "c1")
		}},
		"a large one is not starved by those of another window": {
			throttle.Policy{Name: "p", Windows: []throttle.Window{sharedWindow(4, 10*s), {Name: "own", Limit: 4, Period: 10 * s}},
				Tenants: map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}},
			func(sc *scene) {
				sc.granted("a1")
				sc.at(1 * s).granted("b1")
				sc.at(2 * s).granted("b2")
				sc.cost = 3
				sc.denied("x1", 9*s)
				sc.cost = 1
				sc.waits("a2")                // in its own window
				sc.at(10 * s).pump().called() // there is room for a2, but x1 was here first
				sc.at(11 * s).pump().called("x1")
				sc.waits("y1")
				sc.cost = 3
				sc.granted("x1")
				sc.at(12 * s).pump().called("a2")
			},
		},
		"it costs less when it comes": {policy(sharedWindow(4, 10*s)), func(sc *scene) {
			sc.granted("a1", "a2", "a3", "a4")
			sc.cost = 4
			sc.waits("b1")
			sc.cost = 1
			sc.waits("c1")
			sc.at(10 * s).pump().called("b1")
			sc.granted("b1") // the rest is free
			sc.called("c1")
			sc.granted("c1")
		}},
		"it costs more when it comes": {policy(sharedWindow(4, 10*s)), func(sc *scene) {
			sc.granted("a1", "a2", "a3")
			sc.at(5 * s).granted("a4")
			sc.waits("b1", "b2")
			sc.cost = 4
			sc.at(10*s).pump().called("b1", "b2")
			sc.denied("b1", 10*s) // when b2 has gone too; it keeps its place
			sc.cost = 1
			sc.waits("c1")
			sc.granted("b2")
		}},
		"a tenant may be empty where nothing is counted by it": {policy(sharedWindow(1, s)), func(sc *scene) {
			r := throttle.Request{Policy: "p", Ticket: "q/1"}
			reserve(sc.t, sc.l, r)
			r.Ticket = "q/2"
			reserve(sc.t, sc.l, r)
			sc.at(s).pump().called("q/2")
			if d := reserve(sc.t, sc.l, r); !d.Granted {
				sc.t.Errorf("denied for %v", d.RetryIn)
			}
			sc.dueIn(-1)
		}},
		"a limit that was cut since the call": {policy(sharedWindow(2, 10*s)), func(sc *scene) {
			sc.granted("a1")
			sc.at(5 * s).granted("a2")
			sc.waits("a3", "a4")
			sc.at(10 * s).pump().called("a3")
			sc.set(policy(sharedWindow(1, 10*s)))
			sc.denied("a3", 5*s)
			sc.at(15 * s).pump().called("a3") // at its old rank
			sc.granted("a3")
		}},
		"room that is not taken goes to another at once": {
			policy(throttle.Window{Name: "own", Limit: 3, Period: h}, sharedWindow(2, 10*s)),
			func(sc *scene) {
				sc.granted("a1", "a2")
				sc.waits("a3", "b1")
				sc.at(5 * s)
				sc.at(10*s).pump().called("a3", "b1")
				sc.waits("c1")
				sc.set(policy(throttle.Window{Name: "own", Limit: 2, Period: h}, sharedWindow(2, 10*s)))
				sc.denied("a3", h-10*s)
				sc.called("c1") // not when the hour is over
			},
		},
		"a window that closed since the call": {
			policy(sharedWindow(1, 4*s), throttle.Window{Name: "day", Algorithm: throttle.Fixed, Limit: 5, Period: 10 * s, Margin: s, Unit: "tokens"}),
			func(sc *scene) {
				sc.at(4500 * ms).granted("b1")
				sc.tokens = 1
				sc.waits("a1")
				sc.tokens = 0
				sc.waits("c1")
				sc.at(8500 * ms).pump().called("a1")
				sc.tokens = 1
				sc.at(9100*ms).denied("a1", 900*ms)
				sc.called("c1") // what was held is free at once
				sc.tokens = 0
				sc.granted("c1")
			},
		},
		"a scope is added while they wait": {policy(two, own), func(sc *scene) {
			sc.with = map[string]string{"user": "bob"}
			sc.granted("a1", "a2")
			sc.waits("a3", "a4", "b1")
			sc.set(policy(two, own, throttle.Window{Name: "user", Limit: 1, Period: 10 * s, Per: []string{"tenant", "user"}}))
			sc.waits("a3")
			sc.at(10 * s).pump()
			sc.granted("a3")
			sc.waits("a4")
			sc.granted("b1")
			sc.at(20 * s).granted("a4")
			sc.dueIn(-1)
		}},
		"a scope is taken away while they wait": {
			policy(two, throttle.Window{Name: "region", Limit: 1, Period: h, Per: []string{"region"}}, own),
			func(sc *scene) {
				sc.with = map[string]string{"region": "north"}
				sc.granted("a1")
				sc.waits("a2", "a3", "b1")
				sc.set(policy(two, own))
				sc.granted("a2")
				sc.waits("a3", "b1")
				sc.at(10 * s).pump()
				sc.granted("a3", "b1")
				sc.dueIn(-1)
			},
		},
		"of two tenants the one with other limits": {
			throttle.Policy{Name: "p", Windows: []throttle.Window{own, sharedWindow(9, s)}, Tenants: map[string]throttle.Tenant{
				"b": {Windows: map[string]throttle.Override{"own": {Limit: 4}}},
			}},
			func(sc *scene) {
				sc.granted("a1", "a2", "b1", "b2", "b3", "b4")
				sc.denied("a3", 10*s)
				sc.denied("b5", 10*s)
				sc.waits("b6", "b7", "b8", "b9", "a4", "a5")
				sc.at(10*s).pump().called("a3", "a4", "b5", "b6", "b7", "b8")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			throttletest.Each(t, func(t *testing.T, client *redis.Client) {
				sc := newScene(t, client, scene.p)
				scene.play(sc)
				for _, prefix := range []string{"sluice:{p}:", "sluice:{p:a}:"} {
					// After a change of scopes what is held may be left for two seconds.
					st := readLineState(t, client, prefix)
					if faults := st.faults(sc.c.us.Load(), nil); len(faults) > 0 {
						t.Errorf("the line does not agree:\n%s", strings.Join(faults, "\n"))
					}
				}
				if sc.due < 0 {
					mustBeGone(t, client)
				}
			})
		})
	}
}

// Waiting units are counted exactly where they are more than a double holds.
func TestLineCountsManyUnits(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, throttle.Policy{Name: "p", Windows: []throttle.Window{{Name: "own", Limit: 9, Period: time.Hour}}})
		sc.cost = 9
		sc.granted("a1")
		sc.waits("a2")
		units := func() (now []string) {
			for _, v := range client.HMGet(t.Context(), "sluice:{p:a}:u", "f a requests", "n w:tenant:a requests").Val() {
				now = append(now, fmt.Sprint(v))
			}
			return now
		}
		const most = 1 << 53
		client.HSet(t.Context(), "sluice:{p:a}:u", "f a requests", most+1, "n w:tenant:a requests", most-1)
		sc.cost = 2
		sc.waits("a3")
		if got, want := units(), []string{fmt.Sprint(most + 3), fmt.Sprint(most + 1)}; !slices.Equal(got, want) {
			t.Errorf("with two more there are %q, want %q", got, want)
		}
		sc.leave("a3")
		if got, want := units(), []string{fmt.Sprint(most + 1), fmt.Sprint(most - 1)}; !slices.Equal(got, want) {
			t.Errorf("without them there are %q, want %q", got, want)
		}
	})
}

// With one tenant, costs of one and nobody late, everybody goes at exactly the time that it was
// told, whatever the windows are: a slow and plain model says the same.
func TestLinePromisesAreKept(t *testing.T) {
	for name, windows := range map[string][]throttle.Window{
		"sliding":       {{Name: "w", Limit: 3, Period: s}},
		"shared":        {sharedWindow(3, s)},
		"two":           {{Name: "w", Limit: 3, Period: s}, {Name: "v", Limit: 7, Period: 4 * s}},
		"fixed":         {{Name: "w", Algorithm: throttle.Fixed, Limit: 3, Period: s}},
		"gcra":          {{Name: "w", Algorithm: throttle.GCRA, Limit: 7, Burst: 3, Period: s}},
		"two scopes":    {{Name: "w", Limit: 4, Period: s}, sharedWindow(11, 5*s)},
		"with a margin": {{Name: "w", Limit: 3, Period: s, Margin: 30 * ms}},
	} {
		t.Run(name, func(t *testing.T) {
			throttletest.Each(t, func(t *testing.T, client *redis.Client) {
				sc := newScene(t, client, policy(windows...))
				random := rand.New(rand.NewPCG(3, 4))
				promised := map[string]time.Duration{}
				now := time.Duration(0)
				for i := range 40 {
					ticket := fmt.Sprintf("a%02d", i)
					now += time.Duration(random.IntN(4_000)) * us
					sc.at(now)
					promised[ticket] = now
					if d := reserve(t, sc.l, sc.of(ticket)); !d.Granted {
						promised[ticket] += d.RetryIn
					} else {
						delete(promised, ticket)
					}
					if len(sc.calls) > 0 {
						t.Fatal("the first of them are called while others still arrive")
					}
				}
				waiting := len(promised)
				for now < m && len(promised) > 0 {
					sc.calls = nil
					now += max(us, sc.due)
					sc.at(now).pump()
					for _, ticket := range slices.Clone(sc.calls) {
						d := sc.granted(ticket)
						if got := time.Duration(d.At.UnixMicro()-midnight) * us; got != promised[ticket] {
							t.Errorf("%s goes at %v, its promise was %v", ticket, got, promised[ticket])
						}
						delete(promised, ticket)
					}
				}
				if len(promised) > 0 || waiting < 20 {
					t.Errorf("%d of %d wait for ever", len(promised), waiting)
				}
			})
		})
	}
}

// With several tenants nobody goes later than promised, unless others came after that.
func TestLinePromisesBetweenTenantsAreBounds(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for _, last := range []string{"a", "b", "c"} {
			if err := client.FlushDB(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			p := policy(sharedWindow(4, s))
			p.Tenants = map[string]throttle.Tenant{"b": {Weight: 2.5}, "c": {Weight: 0.5}}
			sc := newScene(t, client, p)
			sc.granted("a", "b", "c", "d")
			promised := map[string]time.Duration{}
			for i := range 40 {
				if tenant := "abc"[i%3 : i%3+1]; tenant != last {
					sc.waits(fmt.Sprintf("%s%02d", tenant, i))
				}
			}
			for i := range 20 {
				ticket := fmt.Sprintf("%s%02d", last, i)
				promised[ticket] = reserve(t, sc.l, sc.of(ticket)).RetryIn
			}
			now, early, n := time.Duration(0), time.Duration(0), 0
			for ; now < m && sc.due >= 0; now += max(us, sc.due) {
				sc.calls = nil
				sc.at(now).pump()
				for _, ticket := range slices.Clone(sc.calls) {
					sc.granted(ticket)
					n++
					if p, ok := promised[ticket]; ok && now > p {
						t.Errorf("%s goes at %v, its promise was %v", ticket, now, p)
					} else if ok {
						early = max(early, p-now)
					}
				}
			}
			if n < 46 || early > 3*s {
				t.Errorf("last %s: %d went, up to %v before their promise", last, n, early)
			}
		}
	})
}

// The lines of a policy are shared out: one worker leads each, until it gives it back or its lease
// ends.
func TestLead(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := newHanded(t, client, policy(sharedWindow(1, s)))
		lead := func(leads throttle.Leads, want ...string) {
			t.Helper()
			got, err := l.Lead(t.Context(), "p", 3*s, leads)
			if err != nil {
				t.Fatal(err)
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Fatalf("%+v: leads %q, want %q", leads, got, want)
			}
		}
		line := func(names ...string) []string { return names }
		lead(throttle.Leads{Ask: line("a", "", "\n}:%")}, "", "\n}:%", "a")
		lead(throttle.Leads{Ask: line("a"), Take: 9})      // another worker
		lead(throttle.Leads{Keep: line("")})               // the empty name too is a line
		c.set(2 * s)                                       // the first one goes on with a,
		lead(throttle.Leads{Keep: line("\n}:%")})          // and with a line that nobody asked for;
		lead(throttle.Leads{Keep: line("a")}, "a")         // of a it hears that others know more
		lead(throttle.Leads{Keep: line("a")})              // once
		c.set(3*s - us)                                    //
		lead(throttle.Leads{Take: 9})                      //
		c.set(3 * s)                                       // but not with the third
		lead(throttle.Leads{Take: 9}, "")                  //
		lead(throttle.Leads{Release: line("a"), Ask: nil}) //
		lead(throttle.Leads{Take: 1}, "a")                 // taken over at once
		c.set(20 * s)                                      // all leases are over
		lead(throttle.Leads{Take: 2}, "", "\n}:%")         // not more than it says
		lead(throttle.Leads{Empty: line("a"), Take: 9})    // nobody has to look at a any more
		lead(throttle.Leads{Tell: line("b")})              // somebody should
		lead(throttle.Leads{Take: 9}, "b")                 // and does
	})
}

// A worker that does not know the format of a line leaves it and its windows alone: another one does.
func TestLineOfAnotherFormat(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, policy(sharedWindow(2, 10*s)))
		first := sc.granted("a1", "a2")
		sc.waits("a3")
		if err := client.IncrBy(t.Context(), "sluice:{p}:q", 1_000_000_000_000).Err(); err != nil {
			t.Fatal(err)
		}
		sc.at(10 * s)
		keys := func() int64 { return client.DBSize(t.Context()).Val() }
		before := keys()
		for _, ticket := range []string{"a3", "b1", ""} {
			r := sc.of("a3")
			r.Ticket = ticket
			if d, err := sc.l.Reserve(t.Context(), r); !errors.Is(err, throttle.ErrState) || d.Granted {
				t.Errorf("%q: granted %v, %v", ticket, d.Granted, err)
			}
		}
		if err := sc.l.Pump(t.Context(), "p", "a"); !errors.Is(err, throttle.ErrState) {
			t.Errorf("Pump: %v", err)
		}
		if after := keys(); after != before {
			t.Errorf("%d keys, and %d before", after, before)
		}
		cancel(t, sc.l, first.Reservation) // is no matter of the line
		sc.called()
		if err := client.IncrBy(t.Context(), "sluice:{p}:q", -1_000_000_000_000).Err(); err != nil {
			t.Fatal(err)
		}
		sc.pump().called("a3")
	})
}

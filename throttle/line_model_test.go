package throttle_test

import (
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A ledger is what the called side notes of all grants, kept outside of Redis.
type ledger struct{ entries []ledgerEntry }

type ledgerEntry struct {
	at      int64 // us
	request throttle.Request
}

func (l *ledger) strike(r throttle.Reservation) {
	l.entries = slices.DeleteFunc(l.entries, func(e ledgerEntry) bool { return e.request.Nonce == r.Nonce && e.at == r.At.UnixMicro() })
}

// note adds a grant and tells by brute force by how many units it made the policy's windows go
// over, as their limits are now.
func (l *ledger) note(p throttle.Policy, r throttle.Reservation) (worst int64) {
	l.entries = append(l.entries, ledgerEntry{r.At.UnixMicro(), r.Request})
	now := r.At.UnixMicro()
	for _, w := range p.WithDefaults().Windows {
		period := (w.Period + w.Margin).Microseconds()
		var units int64
		for i := len(l.entries) - 1; i >= 0; i-- {
			e := l.entries[i]
			if lineScope(w, e.request) != lineScope(w, r.Request) || lineCost(w, e.request) == 0 {
				continue
			}
			switch w.Algorithm {
			case throttle.Sliding:
				if e.at > now-period {
					units += lineCost(w, e.request)
				}
				worst = max(worst, units-w.Limit)
			case throttle.Fixed: // by the clock
				if e.at/period == now/period {
					units += lineCost(w, e.request)
				}
				worst = max(worst, units-w.Limit)
			case throttle.GCRA:
				units += lineCost(w, e.request)
				drained := new(big.Int).Mul(big.NewInt(now-e.at), big.NewInt(w.Limit))
				worst = max(worst, units-w.Burst-drained.Quo(drained, big.NewInt(period)).Int64())
			}
		}
	}
	return worst
}

func lineScope(w throttle.Window, r throttle.Request) string {
	var values []string
	for _, a := range w.Per {
		if a == throttle.TenantAttribute {
			values = append(values, r.Tenant)
		} else {
			values = append(values, r.Attributes[a])
		}
	}
	return strings.Join(values, "\n")
}

func lineCost(w throttle.Window, r throttle.Request) int64 {
	if cost, ok := r.Cost[w.Unit]; ok || w.Unit != throttle.Requests {
		return cost
	}
	return 1
}

// A crowd is the model of what stands in line: who came in which order, who was called and who
// does not come though called. It says what the limiter must never do.
type crowd struct {
	t       *rapid.T
	client  *redis.Client
	c       *clock
	l       *throttle.Limiter
	p       throttle.Policy
	ledger  ledger
	all     []*waiter // in the order of joining
	arrive  []*waiter // called and on their way
	coming  *waiter   // asks just now
	passed  *waiter   // was called by that although it came later
	deaf    bool      // calls are lost
	stepped bool      // the clock was set back
	changed bool      // a limit was changed: what is refused now may have been promised
	made    []throttle.Reservation
	seq     int
	due     int64
	empty   bool
	exempt  bool
}

type waiter struct {
	request throttle.Request
	done    bool // granted or left
	gone    bool // its job was deleted, and nobody told the line
	late    bool // a call of it was lost once, or it stood in front: order is not promised
	called  bool
}

func (w *waiter) flow() string {
	return w.request.Tenant + "/" + w.request.Attributes["user"] + "/" + w.request.Attributes["region"]
}

func (cr *crowd) find(ticket string) *waiter {
	for _, w := range cr.all {
		if w.request.Ticket == ticket {
			return w
		}
	}
	cr.t.Fatalf("%q was called and never came", ticket)
	return nil
}

func (cr *crowd) listen(line throttle.Line) {
	cr.due, cr.empty = cr.c.us.Load()+line.Due.Microseconds(), line.Due < 0
	for _, ticket := range line.Calls {
		w := cr.find(ticket)
		if w.done {
			cr.t.Fatalf("%s was called after it was granted or left", ticket)
		}
		cr.turn(w)
		w.called = true
		switch {
		case cr.deaf:
			w.late, w.called = true, false
		case w.gone:
			w.late = true
			cr.arrive = append(cr.arrive, w) // to be told
		default:
			cr.arrive = append(cr.arrive, w)
		}
	}
}

// turn fails if somebody of the same flow who came before w still waits to be called.
func (cr *crowd) turn(w *waiter) {
	if w.late {
		return
	}
	for _, before := range cr.all {
		if before == w {
			return
		}
		if before.flow() == w.flow() && !before.done && !before.called && !before.late && !before.gone {
			if before == cr.coming {
				cr.passed = w // right, if it is granted in the same call
				continue
			}
			cr.t.Fatalf("%s goes before %s", w.request.Ticket, before.request.Ticket)
		}
	}
}

func (cr *crowd) come(w *waiter) throttle.Decision {
	cr.t.Helper()
	cr.seq++
	r := w.request
	r.Nonce = fmt.Sprint("n", cr.seq)
	cr.coming, cr.passed = w, nil
	d := reserve(cr.t, cr.l, r)
	cr.coming = nil
	if cr.passed != nil && !d.Granted {
		cr.t.Fatalf("%s goes before %s", cr.passed.request.Ticket, r.Ticket)
	}
	if d.Granted {
		if !w.called {
			cr.turn(w)
		}
		w.done = true
		cr.granted(d)
	} else {
		if d.RetryIn <= 0 {
			cr.t.Fatalf("%s is denied for %v", r.Ticket, d.RetryIn)
		}
		if w.called && !cr.changed {
			cr.t.Fatalf("%s was called, came, and is denied for %v", r.Ticket, d.RetryIn)
		}
		w.called = false
	}
	return d
}

func (cr *crowd) granted(d throttle.Decision) {
	if d.Exempt {
		cr.exempt = true
	}
	over := cr.ledger.note(cr.p, d.Reservation)
	if over > 0 && !d.Exempt && !cr.changed && !cr.exempt {
		cr.t.Fatalf("%d units over at %d", over, d.At.UnixMicro()-midnight)
	}
	cr.made = append(cr.made, d.Reservation)
}

// arrivals lets everybody come who was called; of jobs that are gone the worker tells.
func (cr *crowd) arrivals(n int) {
	for ; len(cr.arrive) > 0 && n > 0; n-- {
		w := cr.arrive[0]
		cr.arrive = cr.arrive[1:]
		switch {
		case w.done:
		case w.gone:
			cr.leave(w)
		default:
			cr.come(w)
		}
	}
}

func (cr *crowd) leave(w *waiter) {
	w.done = true
	if err := cr.l.Leave(cr.t.Context(), "p", w.request.Tenant, w.request.Ticket); err != nil {
		cr.t.Fatal(err)
	}
}

func (cr *crowd) pump() {
	tenants := []string{""}
	if !cr.shared() {
		tenants = []string{"a", "b", "c"}
	}
	var due int64
	for _, tenant := range tenants {
		if err := cr.l.Pump(cr.t.Context(), "p", tenant); err != nil {
			cr.t.Fatal(err)
		}
		if !cr.empty && (due == 0 || cr.due < due) {
			due = cr.due
		}
	}
	cr.due, cr.empty = due, due == 0
}

func (cr *crowd) shared() bool {
	return slices.ContainsFunc(cr.p.Windows, func(w throttle.Window) bool {
		return w.Per != nil && !slices.Contains(w.Per, throttle.TenantAttribute)
	})
}

func (cr *crowd) prefixes() []string {
	if !cr.shared() {
		return []string{"sluice:{p:a}:", "sluice:{p:b}:", "sluice:{p:c}:"}
	}
	return []string{"sluice:{p}:"}
}

// state is all that is kept, as text.
func (cr *crowd) state() string {
	var all []lineState
	for _, prefix := range cr.prefixes() {
		all = append(all, readLineState(cr.t, cr.client, prefix))
	}
	return fmt.Sprintf("%+v", all)
}

func (cr *crowd) agree() {
	cr.t.Helper()
	for _, prefix := range cr.prefixes() {
		st := readLineState(cr.t, cr.client, prefix)
		windows := cr.p.Windows
		if cr.stepped {
			windows = nil // holds go by the time of the windows, which is ahead
		}
		if faults := st.faults(cr.c.us.Load(), windows); len(faults) > 0 {
			cr.t.Fatalf("%s does not agree:\n%s", prefix, strings.Join(faults, "\n"))
		}
	}
}

// pass lets time go by. Whoever was called comes before the hold ends.
func (cr *crowd) pass(d time.Duration) {
	if d >= time.Second {
		cr.arrivals(1000)
	}
	cr.c.us.Add(d.Microseconds())
}

// drain lets everybody through: no call is lost any more, and every minute all that wait come by
// themselves. What does not end is a place that was lost.
func (cr *crowd) drain() {
	cr.deaf = false
	left := func() (n int) {
		for _, w := range cr.all {
			if !w.done {
				n++
			}
		}
		return n
	}
	fallback := cr.c.us.Load() + time.Minute.Microseconds()
	for turn := 0; left() > 0; turn++ {
		if turn > 2000 {
			cr.t.Fatalf("%d still wait after %v", left(), time.Duration(cr.c.us.Load()-midnight)*us)
		}
		cr.pump()
		for len(cr.arrive) > 0 {
			cr.arrivals(1000)
		}
		now := cr.c.us.Load()
		if now >= fallback {
			for _, w := range cr.all {
				switch {
				case w.done:
				case w.gone:
					w.late = true
				default:
					cr.come(w)
				}
			}
			fallback = now + time.Minute.Microseconds()
			cr.agree()
			continue
		}
		next := fallback
		if !cr.empty {
			next = min(next, max(cr.due, now+1))
		}
		cr.c.us.Store(next)
	}
	cr.agree()
	for _, key := range cr.client.Keys(cr.t.Context(), "sluice:*").Val() {
		name := key[strings.Index(key, "}:")+2:]
		if !strings.HasPrefix(name, "w:") && !strings.HasPrefix(name, "n:n") && name != "lines" {
			cr.t.Fatalf("nobody waits, and %s is left", key)
		}
		if strings.HasPrefix(name, "w:") {
			if held := heldUnits(cr.client.Get(cr.t.Context(), key).Val(), cr.c.us.Load()); len(held) > 0 {
				cr.t.Fatalf("nobody waits, and %v are held at %s", held, name)
			}
		}
	}
}

func anyLineWindow(t *rapid.T, i int, per [][]string) throttle.Window {
	w := throttle.Window{
		Algorithm: rapid.SampledFrom([]throttle.Algorithm{throttle.Sliding, throttle.Sliding, throttle.Fixed, throttle.GCRA}).Draw(t, "algorithm"),
		Limit:     rapid.Int64Range(3, 8).Draw(t, "limit"),
		Name:      fmt.Sprint("w", i),
		Per:       rapid.SampledFrom(per).Draw(t, "per"),
		Period:    rapid.SampledFrom([]time.Duration{100 * ms, s, 3 * s, 10 * s}).Draw(t, "period"),
		Unit:      rapid.SampledFrom([]string{"requests", "requests", "tokens"}).Draw(t, "unit"),
	}
	if w.Algorithm == throttle.GCRA {
		w.Burst = rapid.Int64Range(3, 5).Draw(t, "burst")
	}
	return w
}

func crowdSequence(t *rapid.T, client *redis.Client) {
	if err := client.FlushDB(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	per := [][]string{{"tenant"}, {"tenant", "user"}, {}, {"region"}, {"tenant", "region"}}
	if rapid.IntRange(0, 5).Draw(t, "kind") == 0 {
		per = [][]string{{"tenant"}, {"tenant", "user"}}
	}
	p := throttle.Policy{Name: "p", Tenants: map[string]throttle.Tenant{}}
	tokens := false
	for i := range rapid.IntRange(1, 4).Draw(t, "windows") {
		p.Windows = append(p.Windows, anyLineWindow(t, i, per))
		tokens = tokens || p.Windows[i].Unit == "tokens"
	}
	l, c := newHanded(t, client, p)
	cr := &crowd{t: t, client: client, c: c, l: l, p: p}
	defer l.OnLine(cr.listen)()

	anyRequest := func(t *rapid.T) throttle.Request {
		cr.seq++
		r := throttle.Request{
			Attributes: map[string]string{
				"user":   rapid.SampledFrom([]string{"bob", "eve"}).Draw(t, "user"),
				"region": rapid.SampledFrom([]string{"north", "south"}).Draw(t, "region"),
			},
			Cost:   map[string]int64{"requests": rapid.SampledFrom([]int64{1, 1, 1, 2, 3, 0}).Draw(t, "cost")},
			Policy: "p",
			Tenant: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "tenant"),
			Ticket: fmt.Sprintf("t%03d", cr.seq),
		}
		if tokens {
			r.Cost["tokens"] = rapid.Int64Range(0, 3).Draw(t, "tokens")
		}
		return r
	}
	waiting := func(t *rapid.T) *waiter {
		var all []*waiter
		for _, w := range cr.all {
			if !w.done && !w.gone {
				all = append(all, w)
			}
		}
		if len(all) == 0 {
			t.Skip("nobody waits")
		}
		return rapid.SampledFrom(all).Draw(t, "waiter")
	}
	set := func(t *rapid.T) {
		cr.changed = true
		if err := l.SetPolicies([]throttle.Policy{cr.p}); err != nil {
			t.Fatal(err)
		}
	}
	join := func(t *rapid.T, r throttle.Request) *waiter {
		w := &waiter{request: r, late: r.Front}
		cr.all = append(cr.all, w)
		return w
	}
	actions := map[string]func(*rapid.T){
		"join": func(t *rapid.T) { cr.come(join(t, anyRequest(t))) },
		"join many": func(t *rapid.T) {
			r := anyRequest(t)
			for range rapid.IntRange(2, 8).Draw(t, "times") {
				cr.seq++
				r.Ticket = fmt.Sprintf("t%03d", cr.seq)
				cr.come(join(t, r))
			}
		},
		"join in front": func(t *rapid.T) {
			r := anyRequest(t)
			r.Front = true
			cr.come(join(t, r))
		},
		"plan": func(t *rapid.T) {
			w := join(t, anyRequest(t))
			maxWait := rapid.SampledFrom([]time.Duration{0, 0, 2 * s}).Draw(t, "max wait")
			backlog := rapid.SampledFrom([]int{0, 0, 3}).Draw(t, "backlog")
			before := cr.state()
			d, err := l.Plan(t.Context(), w.request, maxWait, backlog)
			if errors.As(err, new(*throttle.RefusedError)) {
				w.done = true
				if after := cr.state(); after != before {
					t.Fatalf("a refusal made\n%s\nof\n%s", after, before)
				}
				return
			}
			if err != nil || !d.Planned {
				t.Fatalf("planned %v, %v", d.Planned, err)
			}
			if d.RetryIn == 0 {
				cr.turn(w)
				w.called = true
				cr.arrive = append(cr.arrive, w)
			}
		},
		"come uncalled": func(t *rapid.T) { cr.come(waiting(t)) },
		"other costs": func(t *rapid.T) {
			w := waiting(t)
			w.request.Cost = anyRequest(t).Cost
			w.called, w.late = false, true // what is kept free for it is something else
			cr.come(w)
		},
		"other user": func(t *rapid.T) {
			w := waiting(t)
			w.request.Attributes = anyRequest(t).Attributes
			w.called, w.late = false, true
			cr.come(w)
		},
		"vanish": func(t *rapid.T) { waiting(t).gone = true },
		"leave":  func(t *rapid.T) { cr.leave(waiting(t)) },
		"without ticket": func(t *rapid.T) {
			r := anyRequest(t)
			r.Ticket, r.Nonce = "", fmt.Sprint("n", cr.seq)
			if d := reserve(t, l, r); d.Granted {
				cr.granted(d)
			}
		},
		"peek": func(t *rapid.T) {
			before := cr.state()
			peek(t, l, anyRequest(t))
			if after := cr.state(); after != before {
				t.Fatalf("Peek made\n%s\nof\n%s", after, before)
			}
		},
		"cancel": func(t *rapid.T) {
			if len(cr.made) == 0 {
				t.Skip("nothing was granted yet")
			}
			i := rapid.IntRange(0, len(cr.made)-1).Draw(t, "reservation")
			cr.ledger.strike(cr.made[i])
			cancel(t, l, cr.made[i])
			cr.made = slices.Delete(cr.made, i, i+1)
		},
		"repeat": func(t *rapid.T) {
			if len(cr.made) == 0 {
				t.Skip("nothing was granted yet")
			}
			made := rapid.SampledFrom(cr.made).Draw(t, "reservation")
			d, err := l.Reserve(t.Context(), made.Request)
			if errors.As(err, new(*throttle.NeverFitsError)) {
				return // by the limits as they are now
			}
			if err != nil || !d.Granted || !d.At.Equal(made.At) {
				t.Fatalf("a call repeated: %+v, %v", d, err)
			}
		},
		"pump":   func(t *rapid.T) { cr.pump() },
		"arrive": func(t *rapid.T) { cr.arrivals(rapid.IntRange(1, 5).Draw(t, "arrivals")) },
		"skip": func(t *rapid.T) {
			if len(cr.arrive) == 0 {
				t.Skip("nobody was called")
			}
			w := cr.arrive[0]
			cr.arrive = cr.arrive[1:]
			w.called, w.late = false, true
			if err := l.Skip(t.Context(), "p", w.request.Tenant, w.request.Ticket); err != nil {
				t.Fatal(err)
			}
		},
		"step back": func(t *rapid.T) {
			cr.arrivals(1000)
			if rapid.IntRange(0, 3).Draw(t, "whether") == 0 {
				cr.stepped = true
				cr.c.us.Add(-rapid.SampledFrom([]time.Duration{ms, s, 5 * s}).Draw(t, "back").Microseconds())
			}
		},
		"lose calls": func(t *rapid.T) {
			cr.arrivals(1000)
			cr.deaf = true
			cr.pump()
			cr.deaf = false
		},
		"pass": func(t *rapid.T) {
			cr.pass(rapid.SampledFrom([]time.Duration{us, 10 * ms, 100 * ms, 500 * ms, s, 3 * s, 12 * s, 70 * s}).Draw(t, "time"))
		},
		"pass until due": func(t *rapid.T) {
			cr.arrivals(1000)
			if wait := cr.due - cr.c.us.Load(); !cr.empty && wait > 0 {
				cr.pass(time.Duration(wait) * us)
			}
			cr.pump()
		},
		"change a limit": func(t *rapid.T) {
			i := rapid.IntRange(0, len(cr.p.Windows)-1).Draw(t, "window")
			cr.p.Windows = slices.Clone(cr.p.Windows)
			cr.p.Windows[i].Limit = rapid.Int64Range(3, 8).Draw(t, "limit")
			set(t)
		},
		"change a weight": func(t *rapid.T) {
			cr.p.Tenants = map[string]throttle.Tenant{"b": {Weight: rapid.Float64Range(0.5, 4).Draw(t, "weight")}}
			if err := l.SetPolicies([]throttle.Policy{cr.p}); err != nil {
				t.Fatal(err)
			}
		},
		"exempt": func(t *rapid.T) {
			w := waiting(t)
			tenant := w.request.Tenant
			w.late = true // it may overtake
			cr.p.Tenants = map[string]throttle.Tenant{tenant: {Exempt: true}}
			set(t)
			if d := cr.come(w); !d.Granted {
				t.Fatal("an exempt tenant is denied")
			}
			cr.p.Tenants = nil
			set(t)
		},
		"": func(t *rapid.T) { cr.agree() },
	}
	t.Repeat(actions)
	cr.arrivals(1000)
	cr.drain()
}

// Whatever comes, goes, is lost and is changed in whatever order: nothing is over, nobody is
// lost or overtaken in its flow, the keys agree after every step, and nothing is left in the end.
func TestLineHoldsWhateverHappens(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		rapid.Check(t, func(t *rapid.T) { crowdSequence(t, client) })
	})
}

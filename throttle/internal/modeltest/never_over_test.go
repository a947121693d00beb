package modeltest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Merged grants are later than they were, by a 96th of the period at most (here a quarter): never
// over, and never denied for longer than that.
func TestMergedGrantsAreOnlyALittleStricter(t *testing.T) {
	w := limitertest.Policy(throttle.Window{Name: "w", Limit: 60, Period: 10 * s}).WithDefaults().Windows[0]
	const tick = 10e6 / 4 // us
	client := limitertest.Redis(t)
	c := limitertest.NewClock()
	l := limitertest.NewEdited(t, client, c, []func(string) string{limitertest.WithoutExpiry, limitertest.MergeFrom("8")}, limitertest.Policy(w))
	onlyStricter(t, l.Limiter, c, w, tick, 300, 3, 40*ms)
}

// The same with the scripts as they are: hundreds of grants in little more than 1 kB.
func TestHundredsOfGrantsAreMerged(t *testing.T) {
	w := limitertest.Policy(throttle.Window{Name: "w", Limit: 600, Period: 1024 * s}).WithDefaults().Windows[0]
	client := limitertest.Redis(t)
	l, c := limitertest.NewWithClock(t, client, limitertest.Policy(w))
	onlyStricter(t, l, c, w, w.Period.Microseconds()/96, 700, 1, s)
	bytes := client.StrLen(t.Context(), "sluice:{p}:w:tenant:acme").Val()
	if bytes > 192*8 || bytes < 96*8 { // 96 entries are exact, and as many are merged at most
		t.Errorf("600 grants take %d bytes", bytes)
	}
	// Costs that need wide entries.
	c.Set(2048 * s)
	w.Limit = 1e9
	limitertest.SetPolicy(t, l, w)
	limitertest.Reserve(t, l, limitertest.Acme(1e8))
	d := limitertest.Reserve(t, l, limitertest.Acme(8e8))
	expect.That(t, d.Granted && d.Windows[0].Used >= 9e8, d)
}

func onlyStricter(t *testing.T, l *throttle.Limiter, c *limitertest.Clock, w throttle.Window, tick int64, calls int, maxCost int64, maxStep time.Duration) {
	t.Helper()
	random := rand.New(rand.NewPCG(1, 2))
	var log []*event
	var made []throttle.Decision
	var whole []limitertest.Grant
	at, denials := time.Duration(0), 0
	for i := range calls {
		c.Set(at)
		now := c.US.Load()
		log = slices.DeleteFunc(log, func(e *event) bool { return e.at <= now-w.Period.Microseconds() })
		cost := 1 + random.Int64N(maxCost)
		exactly, used := fitsFrom(w, log, now, cost), ceil(level(w, log, now))
		d := limitertest.Reserve(t, l, limitertest.Acme(cost))
		counted := d.Windows[0].Used
		if d.Granted {
			counted -= cost
			e := &event{at: now, units: cost, window: w, key: d.Reservation.ID}
			log, made = append(log, e), append(made, d)
		} else {
			denials++
		}
		fits := now + d.RetryIn.Microseconds()
		expect.Require(t, counted >= used && (!d.Granted || exactly <= now) && fits >= exactly &&
			fits <= exactly+tick,
			"call", i, "at", at, "granted", d.Granted, counted, "counted, fits at", fits-limitertest.Midnight, "exactly", used, exactly-limitertest.Midnight)
		switch {
		case !d.Granted:
			at += d.RetryIn
		case random.IntN(8) == 0:
			j := random.IntN(len(made))
			limitertest.Cancel(t, l, made[j].Reservation)
			for _, e := range log {
				e.cancelled = e.cancelled || e.key == made[j].Reservation.ID
			}
			made = slices.Delete(made, j, j+1)
		default:
			at += time.Duration(random.Int64N(int64(maxStep))) / us * us
		}
	}
	for _, d := range made {
		whole = append(whole, limitertest.Grant{At: d.At.UnixMicro(), Units: d.Reservation.Cost["requests"]})
	}
	over := limitertest.MostOver(w, whole)
	expect.That(t, over <= 0 && denials != 0, over, "units over", denials, "denials")
}

// Many callers, several limiters and the clock of Redis: windows so short that keys come and go.
func TestConcurrentGrantsAreNeverOver(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a second or two")
	}
	t.Parallel()
	addr := throttletest.Redis(t)
	windows := []throttle.Window{
		{Name: "sliding", Limit: 50, Period: 170 * ms},
		{Name: "shared", Limit: 70, Period: 230 * ms, Margin: 7 * ms, Scope: throttle.ScopeShared},
		{Name: "fixed", Algorithm: throttle.AlgorithmFixed, Limit: 45, Period: 130 * ms},
		{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 300, Burst: 20, Period: s},
	}
	first := throttle.Policy{Name: "first", Windows: []throttle.Window{
		{Name: "first", Algorithm: throttle.AlgorithmFixed, Anchor: throttle.AnchorFirstUse, Limit: 25, Period: 90 * ms},
	}}
	var mu sync.Mutex
	logs := map[string][]limitertest.Grant{}
	granted := 0
	note := func(d throttle.Decision) bool {
		mu.Lock()
		defer mu.Unlock()
		entry := limitertest.Grant{At: d.At.UnixMicro(), Units: d.Reservation.Cost["requests"]}
		for _, w := range d.Windows {
			logs[w.Name+"/"+w.Scope.String()] = append(logs[w.Name+"/"+w.Scope.String()], entry)
		}
		granted++
		return granted < 1000
	}
	var group sync.WaitGroup
	for i := range 8 {
		l := limitertest.New(t, throttletest.Client(t, addr), limitertest.Policy(windows...), first)
		for j := range 8 {
			group.Go(func() {
				random := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				for more := true; more; {
					r := limitertest.Acme(1 + random.Int64N(3))
					r.Tenant = fmt.Sprint("tenant", random.IntN(2))
					if j == 0 {
						r.Policy = "first"
					}
					d, err := l.Reserve(t.Context(), r)
					if err != nil {
						t.Error(err)
						return
					}
					switch {
					case !d.Granted:
						time.Sleep(d.RetryIn / time.Duration(1+random.IntN(20)))
						mu.Lock()
						more = granted < 1000
						mu.Unlock()
					case r.Policy == "p" && random.IntN(8) == 0:
						if _, err := d.Reservation.Cancel(t.Context()); err != nil {
							t.Error(err)
							return
						}
					default:
						more = note(d)
					}
				}
			})
		}
	}
	group.Wait()
	expect.Equal(t, len(logs), 9)
	for _, w := range append(windows, first.Windows...) {
		for name, log := range logs {
			if name[:len(w.Name)+1] == w.Name+"/" {
				over := limitertest.MostOver(w, log)
				expect.That(t, over <= 0, name, over, "units over in", len(log), "grants")
			}
		}
	}
}

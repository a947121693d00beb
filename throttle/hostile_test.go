package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

var hostileNames = []string{
	"acme", "{acme}", "acme}:q", "a:b", "a,b", "%61", "a\x00b", "a\nb", "\xff\xfe", " ", "w x;y 1 2 3 4;", "0.5", "-",
	strings.Repeat("\n", throttle.MaxValueBytes), strings.Repeat("}", throttle.MaxValueBytes),
}

// Tenants, attributes and tickets are data in the line too: each waits, is called by its own name
// and leaves, beside all others, and nothing stays.
func TestHostileNamesInALine(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for _, shared := range []bool{true, false} {
			p := policy(
				throttle.Window{Name: "user", Limit: 1, Period: 10 * s, Per: []string{"tenant", "user"}},
				throttle.Window{Name: "own", Limit: 100, Period: 10 * s},
			)
			if shared {
				p.Windows = append(p.Windows, throttle.Window{Name: "all", Limit: 1000, Period: 10 * s, Per: []string{}})
			}
			client.FlushDB(t.Context())
			sc := newScene(t, client, p)
			request := func(tenant, user, ticket string) throttle.Request {
				return throttle.Request{Policy: "p", Tenant: tenant, Attributes: map[string]string{"user": user}, Ticket: ticket}
			}
			var tickets []string
			for i, tenant := range hostileNames {
				user, ticket := hostileNames[(i+3)%len(hostileNames)], "default/"+tenant
				if d := reserve(t, sc.l, request(tenant, user, ticket)); !d.Granted {
					t.Fatalf("%q is denied", tenant)
				}
				before := dumpAll(t, client)
				if d := reserve(t, sc.l, request(tenant, user, ticket)); d.Granted || d.RetryIn != 10*s {
					t.Fatalf("%q: granted %v in %v", tenant, d.Granted, d.RetryIn)
				}
				if d, err := sc.l.Plan(t.Context(), request(tenant, user, "plan/"+tenant), 0, 0); err != nil || d.RetryIn != 20*s {
					t.Fatalf("%q: planned for %v, %v", tenant, d.RetryIn, err)
				}
				for key, value := range before {
					if after := client.Exists(t.Context(), key).Val(); after != 1 {
						t.Errorf("%q took the key %q away, which was %q", tenant, key, value)
					}
				}
				tickets = append(tickets, ticket)
			}
			if err := sc.l.Retune(t.Context(), "p", hostileNames[0]); err != nil {
				t.Error(err)
			}
			sc.at(10 * s)
			for _, tenant := range hostileNames {
				if err := sc.l.Pump(t.Context(), "p", tenant); err != nil {
					t.Fatal(err)
				}
			}
			if called := slices.Sorted(slices.Values(sc.calls)); !slices.Equal(called, slices.Sorted(slices.Values(tickets))) {
				t.Errorf("called %q, want %q", called, tickets)
			}
			for i, tenant := range hostileNames {
				user := hostileNames[(i+3)%len(hostileNames)]
				if d := reserve(t, sc.l, request(tenant, user, "default/"+tenant)); !d.Granted || d.Windows[0].Used != 1 || d.Windows[1].Used != 1 {
					t.Errorf("%q: %+v", tenant, d)
				}
				if err := sc.l.Leave(t.Context(), "p", tenant, "plan/"+tenant); err != nil {
					t.Error(err)
				}
			}
			for _, key := range client.Keys(t.Context(), "*").Val() {
				if kind := client.Type(t.Context(), key).Val(); kind != "string" || strings.HasSuffix(key, ":q") {
					t.Errorf("the line has left the %s %q", kind, key)
				}
			}
			// Who leads which line is told by name as well.
			led, err := sc.l.Lead(t.Context(), "p", time.Second, throttle.Leads{Ask: hostileNames})
			if err != nil || !slices.Equal(led, hostileNames) {
				t.Errorf("leads %q, %v", led, err)
			}
		}
	})
}

// dumpAll returns a text for every key, whatever it holds.
func dumpAll(t tb, client *redis.Client) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, key := range client.Keys(t.Context(), "*").Val() {
		all[key] = client.Type(t.Context(), key).Val()
	}
	return all
}

// As many windows as a policy may have, each of a unit and a scope of its own, with a line. (On
// miniredis so many would take 10 s.)
func TestManyWindowsWithALine(t *testing.T) {
	t.Run("as many as may be", func(t *testing.T) {
		onRedis(t, func(t *testing.T, client *redis.Client) { manyWindowsWithALine(t, client, throttle.MaxWindows) })
	})
	throttletest.Each(t, func(t *testing.T, client *redis.Client) { manyWindowsWithALine(t, client, 20) })
}

func manyWindowsWithALine(t *testing.T, client *redis.Client, n int) {
	var p throttle.Policy
	p.Name = "p"
	r := throttle.Request{Policy: "p", Tenant: "a", Cost: map[string]int64{}, Attributes: map[string]string{}}
	for i := range n {
		attribute, unit := fmt.Sprint("attribute", i), fmt.Sprint("unit", i)
		p.Windows = append(p.Windows, throttle.Window{
			Name: fmt.Sprint("w", i), Limit: 3, Period: 10 * s, Unit: unit, Per: []string{attribute, "tenant"}[:1+i%2],
			Algorithm: []throttle.Algorithm{throttle.Sliding, throttle.Fixed, throttle.GCRA}[i%3],
		})
		r.Cost[unit], r.Attributes[attribute] = 3, "\xff\n"
	}
	sc := newScene(t, client, p)
	ticket := func(name string) throttle.Request {
		r := r
		r.Ticket = name
		return r
	}
	if d := reserve(t, sc.l, ticket("a1")); !d.Granted {
		t.Fatal("denied")
	}
	for i, name := range []string{"a2", "a3"} {
		if d := reserve(t, sc.l, ticket(name)); d.Granted || d.RetryIn != time.Duration(i+1)*10*s {
			t.Fatalf("%s: granted %v in %v", name, d.Granted, d.RetryIn)
		}
	}
	if d := peek(t, sc.l, r); d.Granted || d.RetryIn != 30*s {
		t.Errorf("who waits for nothing: granted %v in %v", d.Granted, d.RetryIn)
	}
	sc.at(10 * s).pump().called("a2")
	if d := reserve(t, sc.l, ticket("a2")); !d.Granted {
		t.Fatalf("a2 is denied for %v", d.RetryIn)
	} else if d = cancel(t, sc.l, d.Reservation); slices.Max(used(d)) != 0 {
		t.Errorf("used %v", used(d))
	}
	sc.called("a3")
	if d := reserve(t, sc.l, ticket("a3")); !d.Granted {
		t.Fatalf("a3 is denied for %v", d.RetryIn)
	}
	if n := client.Exists(t.Context(), "sluice:{p}:q").Val(); n != 0 {
		t.Error("the line is not empty")
	}
}

// The largest numbers there may be, side by side, in windows and in a line.
func TestLargestNumbers(t *testing.T) {
	const most = throttle.MaxLimit
	for _, algorithm := range []throttle.Algorithm{throttle.Sliding, throttle.Fixed, throttle.GCRA} {
		t.Run(string(algorithm), func(t *testing.T) {
			throttletest.Each(t, func(t *testing.T, client *redis.Client) {
				p := policy(throttle.Window{Name: "w", Limit: most, Period: throttle.MaxPeriod, Algorithm: algorithm, Per: []string{}})
				if algorithm == throttle.GCRA {
					p.Windows[0].Period = 10 * 24 * h // a bucket of that size may not be slower
				}
				p.Tenants = map[string]throttle.Tenant{"a": {Weight: 1e6}, "b": {Weight: 1e-9}, "x": {Exempt: true}}
				sc := newScene(t, client, p)
				sc.cost = most
				sc.granted("a1")
				for range 20 {
					sc.granted("x1") // an exempt tenant counts on and on
				}
				var last time.Duration
				for _, name := range []string{"a2", "a3", "b1", "c1"} {
					d := reserve(t, sc.l, sc.of(name))
					if d.Granted || d.RetryIn <= 0 || d.Windows[0].Used < most || d.Windows[0].Remaining != 0 {
						t.Errorf("%s: %+v", name, d)
					}
					last = max(last, d.RetryIn)
				}
				sc.at(last).pump()
				if len(sc.calls) == 0 && sc.due < 0 {
					t.Errorf("nobody is called after %v, and nobody is to look again", last)
				}
				if faults := readLineState(t, client, "sluice:{p}:").faults(midnight+last.Microseconds(), nil); len(faults) > 0 {
					t.Errorf("%q", faults)
				}
			})
		})
	}
}

// What no policy and no task may say is an error that tells so, also where a user's own function
// says it, and Redis stays as it is.
func TestNumbersThatAreNone(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		tenant := throttle.Tenant{}
		l, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{policy(throttle.Window{Name: "w", Limit: 5, Period: m})},
			Tenants: func(context.Context, string, string) (throttle.Tenant, bool, error) { return tenant, true, nil }})
		if err != nil {
			t.Fatal(err)
		}
		reserve(t, l, acme(1))
		before := dump(t, client)
		for _, weight := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 1e7, -math.SmallestNonzeroFloat64} {
			tenant = throttle.Tenant{Weight: weight}
			var bad *throttle.PolicyError
			if _, err := l.Reserve(t.Context(), acme(1)); !errors.As(err, &bad) || bad.Field != "weight" {
				t.Errorf("weight %v: %v", weight, err)
			}
		}
		for _, limit := range []int64{-1, math.MinInt64, math.MaxInt64, throttle.MaxLimit + 1} {
			tenant = throttle.Tenant{Windows: map[string]throttle.Override{"w": {Limit: limit}}}
			var bad *throttle.PolicyError
			if _, err := l.Reserve(t.Context(), acme(1)); !errors.As(err, &bad) || bad.Field != "limit" {
				t.Errorf("limit %v: %v", limit, err)
			}
		}
		tenant = throttle.Tenant{}
		for _, cost := range []int64{-1, math.MinInt64, math.MaxInt64, throttle.MaxLimit + 1} {
			var bad *throttle.RequestError
			if _, err := l.Reserve(t.Context(), acme(cost)); !errors.As(err, &bad) || bad.Field != "cost requests" {
				t.Errorf("cost %v: %v", cost, err)
			}
		}
		if after := dump(t, client); !maps.Equal(before, after) {
			t.Errorf("Redis was changed:\n%q\n%q", before, after)
		}
		if d := reserve(t, l, acme(0)); !d.Granted || d.Windows[0].Used != 1 {
			t.Errorf("cost 0: %+v", d)
		}
	})
}

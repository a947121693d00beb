package limitertest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// mixed has every algorithm and several scopes; each window denies at times.
func mixed() throttle.Policy {
	return Policy(
		throttle.Window{Name: "sliding", Limit: 4, Period: 10 * s},
		throttle.Window{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 60, Burst: 5, Period: m},
		throttle.Window{Name: "fixed", Algorithm: throttle.AlgorithmFixed, Limit: 9, Period: 20 * s, Scope: throttle.ScopeShared},
		throttle.Window{Name: "first", Algorithm: throttle.AlgorithmFixed, Anchor: throttle.AnchorFirstUse, Limit: 6, Period: 15 * s, Scope: throttle.Per("user")},
	)
}

func TestDenialAndPeekChangeNothing(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := NewHanded(t, client, mixed())
		random := rand.New(rand.NewPCG(1, 2))
		denied := map[string]int{}
		for i := range 300 {
			c.Set(time.Duration(i) * 400 * ms)
			r := Acme(1 + random.Int64N(4))
			r.Tenant = []string{"acme", "initech"}[random.IntN(2)]
			r.Attributes = map[string]string{"user": []string{"bob", "eve"}[random.IntN(2)]}
			before := Dump(t, client)
			peeked := Peek(t, l, r)
			if after := Dump(t, client); !maps.Equal(before, after) {
				t.Fatalf("Peek changed Redis:\n%q\n%q", before, after)
			}
			d := Reserve(t, l, r)
			after := Dump(t, client)
			if d.Granted {
				if maps.Equal(before, after) {
					t.Fatal("a grant changed nothing")
				}
				if !peeked.Granted {
					t.Fatal("Peek said no, Reserve yes")
				}
				continue
			}
			if !maps.Equal(before, after) {
				t.Fatalf("a denial changed Redis:\n%q\n%q", before, after)
			}
			if !reflect.DeepEqual(peeked, d) {
				t.Fatalf("Peek says\n%+v, Reserve\n%+v", peeked, d)
			}
			for _, w := range d.Windows {
				if w.Denied {
					denied[w.Name]++
				}
			}
		}
		if len(denied) != 4 {
			t.Errorf("only these windows denied: %v", denied)
		}
	})
}

func TestReplyOfEveryWindow(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, c := NewHanded(t, client, mixed())
		r := Acme(4)
		r.Attributes = map[string]string{"user": "bob"}
		c.Set(1 * s)
		d := Reserve(t, l, r)
		tenant := throttle.ScopeValue{Attributes: []string{"tenant"}, Values: []string{"acme"}}
		shared := throttle.ScopeValue{Attributes: []string{}, Values: []string{}}
		user := throttle.ScopeValue{Attributes: []string{"user"}, Values: []string{"bob"}}
		want := []throttle.WindowState{
			{Algorithm: throttle.AlgorithmSliding, Name: "sliding", Burst: 4, Limit: 4, Period: 10 * s, Remaining: 0, ResetsAt: At(11 * s), Scope: tenant, Unit: "requests", Used: 4},
			{Algorithm: throttle.AlgorithmGCRA, Name: "gcra", Burst: 5, Limit: 60, Period: m, Remaining: 1, ResetsAt: At(5 * s), Scope: tenant, Unit: "requests", Used: 4},
			{Algorithm: throttle.AlgorithmFixed, Name: "fixed", Burst: 9, Limit: 9, Period: 20 * s, Remaining: 5, ResetsAt: At(20 * s), Scope: shared, Unit: "requests", Used: 4},
			{Algorithm: throttle.AlgorithmFixed, Name: "first", Burst: 6, Limit: 6, Period: 15 * s, Remaining: 2, ResetsAt: At(16 * s), Scope: user, Unit: "requests", Used: 4},
		}
		if !reflect.DeepEqual(d.Windows, want) {
			t.Errorf("granted:\ngot  %+v\nwant %+v", d.Windows, want)
		}
		if d.Policy != "p" || d.Tenant != "acme" || !d.At.Equal(At(1*s)) || d.RetryIn != 0 || d.Reason() != "" || d.EarliestReset() != 0 {
			t.Errorf("got %+v", d)
		}
		if len(d.Reservation.ID) != 16 || !d.Reservation.At.Equal(d.At) || d.Reservation.Tenant != "acme" {
			t.Errorf("reservation %+v", d.Reservation)
		}

		c.Set(1*s + 500*ms)
		d = Reserve(t, l, r)
		want[0].Denied, want[0].RetryIn = true, 9500*ms
		want[1].Denied, want[1].RetryIn = true, 2500*ms // level 3.5, 4 more than 5
		want[3].Denied, want[3].RetryIn = true, 14500*ms
		if !reflect.DeepEqual(d.Windows, want) {
			t.Errorf("denied:\ngot  %+v\nwant %+v", d.Windows, want)
		}
		if d.Granted || d.RetryIn != 14500*ms || d.EarliestReset() != 2500*ms || d.Reason() != "throttled: p/first, tenant acme, 15s" {
			t.Errorf("retry in %v, earliest reset %v, %q", d.RetryIn, d.EarliestReset(), d.Reason())
		}
		if !reflect.DeepEqual(d.Reservation, throttle.Reservation{}) {
			t.Errorf("a denial carries a reservation: %+v", d.Reservation)
		}
	})
}

// Windows of many scopes and kinds, as many as a policy may have.
func TestAPolicyMayHaveManyWindows(t *testing.T) {
	var windows []throttle.Window
	for i := range throttle.MaxWindows {
		w := throttle.Window{Name: fmt.Sprint("w", i), Limit: int64(1 + i%7), Period: time.Duration(i+1) * m}
		w.Algorithm = []throttle.Algorithm{throttle.AlgorithmSliding, throttle.AlgorithmFixed, throttle.AlgorithmGCRA}[i%3]
		w.Scope = []throttle.Scope{throttle.ScopeShared, {}, throttle.Per("tenant", "a"), throttle.Per("a", "b")}[i%4]
		windows = append(windows, w)
	}
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, _ := NewHanded(t, client, Policy(windows...))
		r := Acme(1)
		r.Attributes = map[string]string{"a": "1", "b": "2"}
		if d := Reserve(t, l, r); !d.Granted || len(d.Windows) != throttle.MaxWindows {
			t.Fatalf("granted %v, %d windows", d.Granted, len(d.Windows))
		}
		d := Reserve(t, l, r)
		var denied []int64
		for i, w := range d.Windows {
			if w.Name != windows[i].Name || w.Used != 1 {
				t.Errorf("window %d: %+v", i, w)
			}
			if w.Denied {
				denied = append(denied, w.Limit)
			}
		}
		if d.Granted || len(denied) != 5 || slices.Max(denied) != 1 {
			t.Errorf("granted %v, denied by windows of the limits %v", d.Granted, denied)
		}
	})
}

package limitertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestTenantsHaveLimitsOfTheirOwn(t *testing.T) {
	p := Policy(
		throttle.Window{Name: "w", Limit: 2, Period: m},
		throttle.Window{Name: "g", Algorithm: throttle.AlgorithmGCRA, Limit: 2, Period: m},
		throttle.Window{Name: "b", Algorithm: throttle.AlgorithmGCRA, Limit: 60, Burst: 30, Period: m},
	)
	p.Tenants = map[string]throttle.Tenant{"acme": {Windows: map[string]throttle.Override{"w": {Limit: 5}, "g": {Limit: 4}, "b": {Burst: 7}}}}
	plans := map[string]throttle.Tenant{
		"startup": {Windows: map[string]throttle.Override{"w": {Limit: 1}}},
		"acme":    {Windows: map[string]throttle.Override{"w": {Limit: 9}}},
		"ours":    {Exempt: true},
		"broken":  {Windows: map[string]throttle.Override{"w": {Limit: -1}}},
	}
	offline := errors.New("no database")
	find := func(_ context.Context, policy, tenant string) (throttle.Tenant, bool, error) {
		if policy != "p" {
			t.Errorf("asked for policy %q", policy)
		}
		if tenant == "offline" {
			return throttle.Tenant{}, false, offline
		}
		plan, found := plans[tenant]
		return plan, found, nil
	}
	type limits struct{ w, g, burst, b int64 }
	type row struct {
		tenants throttle.TenantFunc
		want    map[string]limits
	}
	EachOf(t, map[string]row{
		"policy":   {nil, map[string]limits{"acme": {5, 4, 4, 7}, "startup": {2, 2, 2, 30}}},
		"function": {find, map[string]limits{"acme": {9, 2, 2, 30}, "startup": {1, 2, 2, 30}, "other": {2, 2, 2, 30}}},
	}, func(t *testing.T, client *redis.Client, tc row) {
		l, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}, Tenants: tc.tenants})
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]limits{}
		for tenant := range tc.want {
			d := Reserve(t, l, throttle.Request{Policy: "p", Tenant: tenant})
			got[tenant] = limits{d.Windows[0].Limit, d.Windows[1].Limit, d.Windows[1].Burst, d.Windows[2].Burst}
			if d.Windows[0].Remaining != d.Windows[0].Limit-1 {
				t.Errorf("%s: %+v", tenant, d.Windows[0])
			}
		}
		if !maps.Equal(got, tc.want) {
			t.Errorf("limits %v, want %v", got, tc.want)
		}
		if tc.tenants == nil {
			return
		}
		if d := Reserve(t, l, throttle.Request{Policy: "p", Tenant: "ours"}); !d.Exempt {
			t.Error("not exempt")
		}
		if _, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "offline"}); !errors.Is(err, offline) {
			t.Errorf("got %v", err)
		}
		var bad *throttle.PolicyError
		want := throttle.PolicyError{Policy: "p", Window: "w", Tenant: "broken", Field: "limit", Value: int64(-1), Hint: "must be 1 to 1000000000000"}
		if _, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "broken"}); !errors.As(err, &bad) || !reflect.DeepEqual(*bad, want) {
			t.Errorf("got %v", err)
		}
	})
}

// Tenants are data: no name reaches what is another's.
func TestHostileTenantNames(t *testing.T) {
	names := []string{
		"acme", "ACME", "{acme}", "acme}:w:tenant:initech", "initech", "a:b", "a,b", "a", "b", "%61", "%2561", "a\x00b", "a\nb",
		"\xff\xfe", "é", " ", "*", strings.Repeat("x", throttle.MaxValueBytes), strings.Repeat("\xff", throttle.MaxValueBytes),
	}
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l, _ := NewHanded(t, client,
			Policy(throttle.Window{Name: "w", Limit: 2, Period: m}),
			throttle.Policy{Name: "q", Windows: []throttle.Window{
				{Name: "w", Limit: 2, Period: m, Scope: throttle.Per("tenant", "user")},
				{Name: "all", Limit: 1e6, Period: m, Scope: throttle.ScopeShared},
			}},
		)
		for round := range int64(2) {
			for _, name := range names {
				before := Dump(t, client)
				r := throttle.Request{Policy: "p", Tenant: name, IdempotencyKey: name + fmt.Sprint(round)}
				r.IdempotencyKey = r.IdempotencyKey[max(0, len(r.IdempotencyKey)-throttle.MaxValueBytes):]
				if d := Reserve(t, l, r); !d.Granted || d.Windows[0].Used != round+1 || d.Windows[0].Scope.Values[0] != name {
					t.Errorf("%q: %+v", name, d)
				}
				after := Dump(t, client)
				changed := 0
				for key, value := range after {
					if before[key] != value {
						changed++
					}
				}
				if changed != 3 { // its windows, its idempotency key and what the process did last
					t.Errorf("%q changed %d keys", name, changed)
				}
				for _, user := range []string{"bob", name, "x," + name} {
					if len(user) > throttle.MaxValueBytes {
						continue
					}
					r := throttle.Request{Policy: "q", Tenant: name, Attributes: map[string]string{"user": user}}
					if d := Reserve(t, l, r); !d.Granted || d.Windows[0].Used != round+1 {
						t.Errorf("%q, user %q: %+v", name, user, d)
					}
				}
			}
		}
		for _, name := range names {
			d := Reserve(t, l, throttle.Request{Policy: "p", Tenant: name})
			if d.Granted {
				t.Errorf("%q: granted three times", name)
			}
			if reason := d.Reason(); breaksLine(reason) {
				t.Errorf("the reason breaks its line: %q", reason)
			}
			if scope := d.Windows[0].Scope.String(); breaksLine(scope) {
				t.Errorf("the scope breaks its line: %q", scope)
			}
		}
	})
}

func breaksLine(s string) bool {
	return !utf8.ValidString(s) || strings.ContainsAny(s, "\n\x00")
}

package limitertest

import (
	"context"
	"errors"
	"reflect"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
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
		Equal(t, policy, "p")
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
	EachCase(t, map[string]row{
		"policy":   {nil, map[string]limits{"acme": {5, 4, 4, 7}, "startup": {2, 2, 2, 30}}},
		"function": {find, map[string]limits{"acme": {9, 2, 2, 30}, "startup": {1, 2, 2, 30}, "other": {2, 2, 2, 30}}},
	}, func(t *testing.T, client *redis.Client, tc row) {
		l, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}, Tenants: tc.tenants})
		Must(t, err)
		got := map[string]limits{}
		for tenant := range tc.want {
			d := Reserve(t, l, throttle.Request{Policy: "p", Tenant: tenant})
			got[tenant] = limits{d.Windows[0].Limit, d.Windows[1].Limit, d.Windows[1].Burst, d.Windows[2].Burst}
			Equal(t, d.Windows[0].Remaining, d.Windows[0].Limit-1, tenant, d.Windows[0])
		}
		Equal(t, got, tc.want)
		if tc.tenants == nil {
			return
		}
		That(t, Reserve(t, l, throttle.Request{Policy: "p", Tenant: "ours"}).Exempt, "not exempt")
		WantErr(t, Err(l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "offline"})), offline)
		var bad *throttle.PolicyError
		want := throttle.PolicyError{Policy: "p", Window: "w", Tenant: "broken", Field: "limit", Value: int64(-1), Hint: "must be 1 to 1000000000000"}
		if _, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "broken"}); !errors.As(err, &bad) || !reflect.DeepEqual(*bad, want) {
			t.Errorf("got %v", err)
		}
	})
}

package limitertest

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

func TestPolicyForATaskType(t *testing.T) {
	window := []throttle.Window{{Name: "w", Limit: 1, Period: m}}
	l := New(t, NoRedis(t),
		throttle.Policy{Name: "http", Match: []string{"http:*", "rpc:?"}, Windows: window},
		throttle.Policy{Name: "mail", Match: []string{"mail:send"}, Windows: window},
		throttle.Policy{Name: "by-name-only", Windows: window},
	)
	matched := func(taskType string) string { p, _ := l.Match(taskType, false); return p.Name }
	for taskType, want := range map[string]string{"http:call": "http", "rpc:x": "http", "rpc:xy": "", "mail:send": "mail", "mail:sent": "", "": "", "by-name-only": ""} {
		p, ok := l.Match(taskType, false)
		expect.Equal(t, p.Name, want, taskType)
		expect.Equal(t, ok, want != "", taskType)
	}
	expect.Must(t, l.SetPolicies([]throttle.Policy{{Name: "all", Match: []string{"*"}, Windows: window}}))
	expect.Equal(t, matched("mail:sent"), "all")
	replaced, ok := l.Lookup("http")
	expect.That(t, ok && replaced.Name == "http" && len(l.Policies()) == 1, "a policy that was replaced", replaced, ok)

	err := l.SetPolicies([]throttle.Policy{{Name: "a", Match: []string{"x", "http:*"}, Windows: window}, {Name: "b", Match: []string{"*:call"}, Windows: window}})
	want := `throttle: policy "b": match "*:call": must not match a task type that policy "a" matches too, by "http:*"`
	expect.That(t, errors.As(err, new(*throttle.PolicyError)) && err.Error() == want, err, "want", want)
	expect.Equal(t, matched("mail:sent"), "all", "policies that were refused hold")
}

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
		expect.Equal(t, policy, "p")
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
		l := NewFrom(t, throttle.Config{Client: client, Policies: []throttle.Policy{p}, Tenants: tc.tenants})
		got := map[string]limits{}
		for tenant := range tc.want {
			d := Reserve(t, l, throttle.Request{Policy: "p", Tenant: tenant})
			got[tenant] = limits{d.Windows[0].Limit, d.Windows[1].Limit, d.Windows[1].Burst, d.Windows[2].Burst}
			expect.Equal(t, d.Windows[0].Remaining, d.Windows[0].Limit-1, tenant, d.Windows[0])
		}
		expect.Equal(t, got, tc.want)
		if tc.tenants == nil {
			return
		}
		expect.That(t, Reserve(t, l, throttle.Request{Policy: "p", Tenant: "ours"}).Exempt, "not exempt")
		expect.Err(t, expect.ErrOf(l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "offline"})), offline)
		var bad *throttle.PolicyError
		want := throttle.PolicyError{Policy: "p", Window: "w", Tenant: "broken", Field: "limit", Value: int64(-1), Hint: "must be 1 to 1000000000000"}
		_, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "broken"})
		expect.That(t, errors.As(err, &bad) && reflect.DeepEqual(*bad, want), "got", err)
	})
}

// SetPolicies logs the policies, and nothing if they are what they were.
func TestReplacedPoliciesAreLogged(t *testing.T) {
	var log bytes.Buffer
	named := func(name string, limit int64) throttle.Policy {
		return throttle.Policy{Name: name, Match: []string{name}, Windows: []throttle.Window{{Name: "w", Limit: limit, Period: time.Second}}}
	}
	l := NewFrom(t, throttle.Config{
		Client: NoRedis(t), Logger: slog.New(slog.NewTextHandler(&log, nil)), Policies: []throttle.Policy{named("a", 1), named("b", 1), named("c", 1)},
	})
	for _, row := range []struct {
		policies []throttle.Policy
		want     string
	}{
		{[]throttle.Policy{named("a", 1), named("b", 1), named("c", 1)}, ""},
		{[]throttle.Policy{named("d", 1), named("b", 2), named("c", 1)}, `"throttle: the policies were replaced" policies="[d b c]"`},
		{[]throttle.Policy{named("bad name", 1)}, ""},
	} {
		log.Reset()
		_ = l.SetPolicies(row.policies)
		_, logged, _ := strings.Cut(strings.TrimSpace(log.String()), "msg=")
		expect.Equal(t, logged, row.want)
	}
}

package throttle_test

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestPoliciesAreValidated(t *testing.T) {
	const nameHint = "must be 1 to 64 of the characters A-Z a-z 0-9 _ . -"
	change := func(change func(w *throttle.Window)) func(*throttle.Policy) {
		return func(p *throttle.Policy) { change(&p.Windows[0]) }
	}
	tenant := func(name string, tenant throttle.Tenant) func(*throttle.Policy) {
		return func(p *throttle.Policy) { p.Tenants = map[string]throttle.Tenant{name: tenant} }
	}
	override := func(window string, o throttle.Override) func(*throttle.Policy) {
		return tenant("acme", throttle.Tenant{Windows: map[string]throttle.Override{window: o}})
	}
	type window = throttle.Window
	calendar := func(w window) func(*throttle.Policy) {
		w.Algorithm, w.Limit, w.Name = throttle.AlgorithmCalendar, 20, "a"
		return func(p *throttle.Policy) { p.Windows[0] = w }
	}
	for _, tc := range []struct {
		change func(*throttle.Policy)
		want   string // after `throttle: policy "p"`; "" if valid
	}{
		{func(p *throttle.Policy) {}, ``},
		{func(p *throttle.Policy) { p.Name = "" }, `throttle: policy "": name "": ` + nameHint},
		{func(p *throttle.Policy) { p.Name = "a:b" }, `throttle: policy "a:b": name "a:b": ` + nameHint},
		{func(p *throttle.Policy) { p.Name = "{p}" }, `throttle: policy "{p}": name "{p}": ` + nameHint},
		{func(p *throttle.Policy) { p.Name = "p\n" }, `throttle: policy "p\n": name "p\n": ` + nameHint},
		{func(p *throttle.Policy) { p.Name = strings.Repeat("x", 64) }, ``},
		{func(p *throttle.Policy) { p.Name = strings.Repeat("x", 65) },
			`throttle: policy "` + strings.Repeat("x", 65) + `": name "` + strings.Repeat("x", 64) + `...": ` + nameHint},
		{func(p *throttle.Policy) { p.Match = []string{"a", ""} }, `: match[1] "": must be a task type or a glob such as "http:*"`},
		{func(p *throttle.Policy) { p.Match = []string{strings.Repeat("a", 1024)} }, ``},
		{func(p *throttle.Policy) { p.Match = []string{strings.Repeat("a", 1025)} },
			`: match[0] "` + strings.Repeat("a", 64) + `...": must be at most 1024 bytes`},
		{func(p *throttle.Policy) { p.Match = []string{"^b$"} }, `: match[0] "^b$": must be a glob such as "http:*", not a regular expression`},
		{func(p *throttle.Policy) { p.BatchShare, p.Windows[1].Limit = 0.9, 0 }, `: batch_share 0.9: must be 0.001 to 0.5` +
			"\n" + `throttle: policy "p", window "all": limit 0: must be 1 to 1000000000000`},
		{func(p *throttle.Policy) { p.Windows = nil }, `: windows 0: must be 1 to 32 windows`},
		{func(p *throttle.Policy) { p.Windows = make([]window, 33) }, `: windows 33: must be 1 to 32 windows`},
		{func(p *throttle.Policy) { p.Windows[1].Name = "a" }, `, window "a": name "a": is taken: windows of one policy have different names`},

		{change(func(w *window) { w.Name = "a b" }), `, window "a b": name "a b": ` + nameHint},
		{change(func(w *window) { w.Algorithm = "slidng" }), `, window "a": algorithm "slidng": must be one of "calendar", "concurrency", "fixed", "gcra", "sliding"; a token bucket is "gcra"`},
		{change(func(w *window) { w.Limit = 0 }), `, window "a": limit 0: must be 1 to 1000000000000`},
		{change(func(w *window) { w.Limit = -5 }), `, window "a": limit -5: must be 1 to 1000000000000`},
		{change(func(w *window) { w.Limit = throttle.MaxLimit }), ``},
		{change(func(w *window) { w.Limit = throttle.MaxLimit + 1 }), `, window "a": limit 1000000000001: must be 1 to 1000000000000`},
		{change(func(w *window) { w.Period = 0 }), `, window "a": period 0s: must be 1ms to 8784h0m0s, in whole microseconds`},
		{change(func(w *window) { w.Period = ms - us }), `, window "a": period 999µs: must be 1ms to 8784h0m0s, in whole microseconds`},
		{change(func(w *window) { w.Period = ms }), ``},
		{change(func(w *window) { w.Period = throttle.MaxPeriod }), ``},
		{change(func(w *window) { w.Period = throttle.MaxPeriod + us }), `, window "a": period 8784h0m0.000001s: must be 1ms to 8784h0m0s, in whole microseconds`},
		{change(func(w *window) { w.Period = s + 1 }), `, window "a": period 1.000000001s: must be 1ms to 8784h0m0s, in whole microseconds`},
		{change(func(w *window) { w.Margin = -us }), `, window "a": margin -1µs: must be 0s to 1m0s, in whole microseconds`},
		{change(func(w *window) { w.Margin = m }), ``},
		{change(func(w *window) { w.Margin = m + us }), `, window "a": margin 1m0.000001s: must be 0s to 1m0s, in whole microseconds`},
		{change(func(w *window) { w.Margin = 1 }), `, window "a": margin 1ns: must be 0s to 1m0s, in whole microseconds`},
		{change(func(w *window) { w.Unit = "to kens" }), `, window "a": unit "to kens": ` + nameHint},
		{change(func(w *window) { w.Per = strings.Split("abcdefgh", "") }), ``},
		{change(func(w *window) { w.Per = strings.Split("abcdefghi", "") }), `, window "a": per [a b c d e f g h i]: must be at most 8 attributes`},
		{change(func(w *window) { w.Per = []string{"a:b"} }), `, window "a": per "a:b": ` + nameHint},
		{change(func(w *window) { w.Per = []string{"Tenant"} }), `, window "a": per "Tenant": must be "tenant", or an attribute that is called otherwise`},
		{change(func(w *window) { w.Per = []string{""} }), `, window "a": per "": ` + nameHint},
		{change(func(w *window) { w.Per, w.Shared = []string{"user"}, true }), `, window "a": per [user]: must be left out: the window is shared`},
		{change(func(w *window) { w.Per = []string{"user", "ip", "user"} }), `, window "a": per [ip user user]: must name every attribute once`},
		{change(func(w *window) { w.Burst = 3 }), `, window "a": burst 3: is for windows with "algorithm: gcra"`},

		{change(func(w *window) { w.Algorithm, w.Margin = throttle.AlgorithmFixed, 30*s }), `, window "a": margin 30s: must be less than half the period of a fixed window`},
		{change(func(w *window) { w.Algorithm, w.Margin = throttle.AlgorithmFixed, 30*s-us }), ``},
		{change(func(w *window) { w.Algorithm, w.Burst = throttle.AlgorithmGCRA, -1 }), `, window "a": burst -1: must be 1 to 1000000000000`},
		{change(func(w *window) { w.Algorithm, w.Burst = throttle.AlgorithmGCRA, throttle.MaxLimit+1 }), `, window "a": burst 1000000000001: must be 1 to 1000000000000`},
		{change(func(w *window) { w.Algorithm, w.Burst, w.Limit, w.Period = throttle.AlgorithmGCRA, 1e12, 1, m }), ``},

		{change(func(w *window) { w.Algorithm = throttle.AlgorithmConcurrency }), `, window "a": period 1m0s: is for windows with "algorithm: fixed, gcra, sliding"`},
		{change(func(w *window) { w.Algorithm, w.Period = throttle.AlgorithmConcurrency, 0 }), ``},
		{change(func(w *window) { w.Algorithm, w.Period, w.Margin = throttle.AlgorithmConcurrency, 0, s }), `, window "a": margin 1s: is for windows with "algorithm: calendar, fixed, gcra, sliding"`},
		{change(func(w *window) { w.Algorithm, w.Period, w.Limit = throttle.AlgorithmConcurrency, 0, 10_001 }), `, window "a": limit 10001: must be 1 to 10000 with algorithm: concurrency`},
		{change(func(w *window) { w.Algorithm, w.Period, w.Lease = throttle.AlgorithmConcurrency, 0, ms }), `, window "a": lease 1ms: must be 1s to 24h0m0s`},
		{change(func(w *window) { w.Algorithm, w.Period, w.Lease = throttle.AlgorithmConcurrency, 0, s+1 }), `, window "a": lease 1.000000001s: must be whole microseconds`},
		{change(func(w *window) { w.Lease = s }), `, window "a": lease 1s: is for windows with "algorithm: concurrency"`},

		{change(func(w *window) { w.Algorithm, w.Resets = throttle.AlgorithmCalendar, "@daily" }), `, window "a": period 1m0s: is for windows with "algorithm: fixed, gcra, sliding"`},
		{calendar(window{Resets: "0 0 1 * *"}), ``},
		{calendar(window{}), `, window "a": resets "": must be a cron expression of five fields, such as "0 0 * * *" for every midnight`},
		{calendar(window{Resets: "@every 1h"}), `, window "a": resets "@every 1h": must be a cron expression of five fields, such as "0 0 * * *" for every midnight`},
		{calendar(window{Resets: "CRON_TZ=UTC 0 0 * * *"}), `, window "a": resets "CRON_TZ=UTC 0 0 * * *": must be a cron expression of five fields, such as "0 0 * * *" for every midnight`},
		{calendar(window{Resets: "0 0 30 2 *"}), `, window "a": resets "0 0 30 2 *": must be a time that comes within the next five years`},
		{calendar(window{Resets: "@daily", Timezone: "Mars/Base"}), `, window "a": timezone "Mars/Base": must be a name of the IANA time zone database, such as "America/Los_Angeles"`},
		{calendar(window{Resets: "@daily", Timezone: "America/Los_Angeles"}), ``},
		{calendar(window{Resets: "@hourly", Margin: 30 * m}), `, window "a": margin 30m0s: must be less than half the time between two resets`},
		{calendar(window{Resets: "@hourly", Margin: 29 * m}), ``},
		{change(func(w *window) { w.Resets = "@daily" }), `, window "a": resets "@daily": is for windows with "algorithm: calendar"`},
		{change(func(w *window) { w.Timezone = "UTC" }), `, window "a": timezone "UTC": is for windows with "algorithm: calendar"`},
		{func(p *throttle.Policy) { p.MaxPause = us }, `: max_pause 1µs: must be 1ms to 8784h0m0s, in whole microseconds`},
		{func(p *throttle.Policy) { p.MaxPause = throttle.MaxPeriod + us }, `: max_pause 8784h0m0.000001s: must be 1ms to 8784h0m0s, in whole microseconds`},
		{func(p *throttle.Policy) { p.MaxRefusedWait = -us }, `: max_refused_wait -1µs: must be 0s to 8784h0m0s, in whole microseconds`},
		{func(p *throttle.Policy) { p.MaxRefusedWait = throttle.MaxPeriod + us }, `: max_refused_wait 8784h0m0.000001s: must be 0s to 8784h0m0s, in whole microseconds`},

		{tenant("", throttle.Tenant{}), `: tenant "": must be 1 to 512 bytes`},
		{tenant("any\x00bytes}", throttle.Tenant{Weight: 0.001}), ``},
		{tenant("acme", throttle.Tenant{Weight: 0.0009}), `, tenant "acme": weight 0.0009: must be 0.001 to 1000000`},
		{tenant("acme", throttle.Tenant{Weight: math.NaN()}), `, tenant "acme": weight NaN: must be 0.001 to 1000000`},
		{tenant("acme", throttle.Tenant{Weight: math.Inf(1)}), `, tenant "acme": weight +Inf: must be 0.001 to 1000000`},
		{override("a", throttle.Override{Limit: 50}), ``},
		{override("nope", throttle.Override{Limit: 50}), `, tenant "acme": windows "nope": must be the name of a window of this policy`},
		{tenant("acme", throttle.Tenant{Windows: map[string]throttle.Override{"a": {Limit: 50}, "all": {Limit: 50}}}), `, tenant "acme": windows "all": does not count by tenant: a tenant has a limit of its own only where the scope contains tenant`},
		{override("a", throttle.Override{Limit: -1}), `, tenant "acme", window "a": limit -1: must be 1 to 1000000000000`},
		{override("a", throttle.Override{Burst: 7}), `, tenant "acme", window "a": burst 7: is for windows with "algorithm: gcra"`},
	} {
		p := limitertest.Policy(window{Name: "a", Limit: 20, Period: m}, window{Name: "all", Limit: 100, Period: s, Shared: true})
		tc.change(&p)
		want := cmp.Or(tc.want, "<nil>")
		if strings.HasPrefix(want, ":") || strings.HasPrefix(want, ",") {
			want = `throttle: policy "p"` + want
		}
		err := p.Validate()
		expect.Equal(t, fmt.Sprint(err), want)
		expect.That(t, err == nil || errors.As(err, new(*throttle.PolicyError)), err, "is no *PolicyError")
		_, newErr := throttle.New(throttle.Config{Client: redis.NewClient(&redis.Options{}), Policies: []throttle.Policy{p}})
		expect.Equal(t, fmt.Sprint(newErr), want)
	}
}

func TestNewRefusesBadPolicies(t *testing.T) {
	good := limitertest.Policy(throttle.Window{Name: "w", Limit: 1, Period: m})
	_, err := throttle.New(throttle.Config{Policies: []throttle.Policy{good}})
	expect.Equal(t, fmt.Sprint(err), "throttle: Config.Client is nil: must be a connection to Redis")
	_, err = throttle.New(throttle.Config{Client: redis.NewClient(&redis.Options{}), Policies: []throttle.Policy{good, good}})
	expect.Equal(t, fmt.Sprint(err), `throttle: policy "p": name "p": is taken: policies have different names`)
}

func TestPoliciesHaveDefaults(t *testing.T) {
	given := throttle.Policy{
		Name:    "p",
		Tenants: map[string]throttle.Tenant{"acme": {}},
		Windows: []throttle.Window{
			{Name: "s", Limit: 5, Period: m},
			{Name: "f", Algorithm: throttle.AlgorithmFixed, Limit: 5, Period: m, Per: []string{"user", "ip"}},
			{Name: "g", Algorithm: throttle.AlgorithmGCRA, Limit: 5, Period: m, Shared: true, Unit: "tokens"},
		},
	}
	want := throttle.Policy{
		BatchShare: 0.05, MaxPause: h, Name: "p", Shards: 1,
		Tenants: map[string]throttle.Tenant{"acme": {Weight: 1}},
		Windows: []throttle.Window{
			{Algorithm: throttle.AlgorithmSliding, Name: "s", Limit: 5, Period: m, Per: []string{"tenant"}, Unit: "requests"},
			{Algorithm: throttle.AlgorithmFixed, Name: "f", Limit: 5, Period: m, Per: []string{"ip", "user"}, Unit: "requests"},
			{Algorithm: throttle.AlgorithmGCRA, Burst: 5, Name: "g", Limit: 5, Period: m, Shared: true, Unit: "tokens"},
		},
	}
	expect.Equal(t, given.WithDefaults(), want)
	expect.That(t, given.Windows[0].Algorithm == "" && given.Tenants["acme"].Weight == 0, "the policy given was changed", given)
	// Written out once they stay: a shared window does not become a tenant's.
	again := given.WithDefaults().WithDefaults()
	expect.That(t, reflect.DeepEqual(again, given.WithDefaults()) && again.Validate() == nil,
		"defaults of defaults", again)
}

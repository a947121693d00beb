package main

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/throttle"
)

func TestCheckPrintsAPolicyFile(t *testing.T) {
	t.Parallel()
	d := newWorkspace(t, `
policies:
  - name: github-api
    match: ["http:*", "github:sync"]
    windows:
      - {name: per-minute, limit: 20, period: 60s}
      - {name: burst, limit: 5, period: 3s, margin: 50ms}
      - {name: provider, limit: 100, period: 1s, shared: true}
      - {name: spend, limit: 90000, period: 1h, unit: tokens, algorithm: gcra, burst: 20000}
      - {name: daily, limit: 1000, period: 24h, algorithm: fixed}
    tenants:
      acme: {weight: 2, windows: {per-minute: {limit: 50}, spend: {burst: 9}}}
      internal: {exempt: true, weight: 1000000}
      $${HOME}: {weight: 3}
  - name: slow
    fail_open: true
    earliest_reset: true
    windows:
      - {name: short, limit: 10, period: 10s, per: [user, tenant]}
      - {name: long, limit: 600, period: 600s, per: [user, tenant]}
`, "")
	e := runMain(t.Context(), "", "check", d.path("policies.yml")).want(t, exitDone)
	equal(t, e.stdout, `policies:
- name: github-api
  match: ['http:*', 'github:sync']
  batch_share: 0.05
  max_pause: 1h
  shards: 1
  windows:
  - {name: per-minute, limit: 20, period: 1m, algorithm: sliding, per: [tenant], unit: requests}
  - {name: burst, limit: 5, period: 3s, algorithm: sliding, margin: 50ms, per: [tenant], unit: requests}
  - {name: provider, limit: 100, period: 1s, algorithm: sliding, shared: true, unit: requests}
  - {name: spend, limit: 90000, period: 1h, algorithm: gcra, burst: 20000, per: [tenant], unit: tokens}
  - {name: daily, limit: 1000, period: 24h, algorithm: fixed, per: [tenant], unit: requests}
  tenants:
    $${HOME}: {weight: 3}
    acme: {weight: 2, windows: {per-minute: {limit: 50}, spend: {burst: 9}}}
    internal: {exempt: true, weight: 1e+06}
- name: slow
  batch_share: 0.05
  earliest_reset: true
  fail_open: true
  max_pause: 1h
  shards: 1
  windows:
  - {name: short, limit: 10, period: 10s, algorithm: sliding, per: [tenant, user], unit: requests}
  - {name: long, limit: 600, period: 10m, algorithm: sliding, per: [tenant, user], unit: requests}
`)
	equal(t, runMain(t.Context(), e.stdout, "check", "-"), e, "what it prints means something else")

	got := decoded[struct {
		Policies []struct {
			Windows []struct {
				Name, Period, Unit, Algorithm string
				Limit, Burst                  int64
				Per                           []string
				Shared                        bool
			}
			Tenants map[string]throttle.Tenant
		}
	}](t, runMain(t.Context(), "", "check", d.path("policies.yml"), "-json").want(t, exitDone))
	equal(t, fmt.Sprint(got.Policies[0].Windows[3]), "{spend 1h tokens gcra 90000 20000 [tenant] false}")
	that(t, got.Policies[0].Windows[2].Shared, "provider is not shared")
	equal(t, got.Policies[0].Tenants["acme"].Windows["per-minute"].Limit, 50)

	d.write("policies.yml", "policies:\n  - name: p\n    windows:\n      - {name: w, limit: 0, period: 1s}\n")
	runMain(t.Context(), "", "check", d.path("policies.yml")).
		want(t, exitBadInput, "sluice: policyfile: "+d.path("policies.yml")+":4: ")
	d.write("policies.yml", nightly+"    schedule: every night\n")
	runMain(t.Context(), "", "check", d.path("policies.yml")).
		want(t, exitBadInput, `sluice: policyfile: `+d.path("policies.yml")+`:23: batch "late": schedule`)
}

// Whatever is set differently is printed differently, as text and as JSON: no setting is left out.
func TestCheckPrintsEverySetting(t *testing.T) {
	t.Parallel()
	const (
		one   = "{name: w, limit: 7, period: 10s}"
		fixed = "{name: w, limit: 7, period: 10s, algorithm: fixed}"
		gcra  = "{name: w, limit: 7, period: 10s, algorithm: gcra}"
		slots = "{name: w, limit: 7, algorithm: concurrency}"
		daily = "{name: w, limit: 7, algorithm: calendar, resets: \"0 0 * * *\"}"
	)
	window := func(before, after string) [2]string {
		return [2]string{"{name: p, windows: [" + before + "]}", "{name: p, windows: [" + after + "]}"}
	}
	policy := func(after string) [2]string {
		return [2]string{"{name: p, windows: [" + one + "]}", "{name: p, windows: [" + one + "], " + after + "}"}
	}
	tenant := func(before, after string) [2]string {
		return [2]string{
			"{name: p, windows: [" + gcra + "], tenants: {a: {" + before + "}}}",
			"{name: p, windows: [" + gcra + "], tenants: {a: {" + after + "}}}",
		}
	}
	for _, c := range []struct {
		typ    reflect.Type
		fields map[string][2]string
	}{
		{reflect.TypeFor[throttle.Policy](), map[string][2]string{
			"KeepRate": policy("keep_rate: true"),
			"Shards":   policy("shards: 4"),
			"FailOpen": policy("fail_open: true"),

			"BatchShare": policy("batch_share: 0.2"),

			"Match":    policy("match: [x]"),
			"Name":     {"{name: p, windows: [" + one + "]}", "{name: q, windows: [" + one + "]}"},
			"MaxPause": policy("max_pause: 5m"),

			"MaxRefusedWait": policy("max_refused_wait: 5m"),
			"Observe":        policy("observe: true"),

			"UpstreamShared": policy("upstream_shared: true"),
			"EarliestReset":  policy("earliest_reset: true"),
			"Tenants":        policy("tenants: {a: {weight: 1}}"),
			"Windows":        window(one, one+", {name: v, limit: 2, period: 1s}"),
		}},
		{reflect.TypeFor[throttle.Window](), map[string][2]string{
			"Algorithm": window(one, fixed),
			"Burst":     window(gcra, strings.Replace(gcra, "}", ", burst: 3}", 1)),
			"Lease":     window(slots, strings.Replace(slots, "}", ", lease: 77s}", 1)),
			"Limit":     window(one, strings.Replace(one, "7", "8", 1)),
			"Margin":    window(one, strings.Replace(one, "}", ", margin: 1s}", 1)),
			"Name":      window(one, strings.Replace(one, "name: w", "name: v", 1)),
			"Shared":    window(one, strings.Replace(one, "}", ", shared: true}", 1)),
			"Per":       window(one, strings.Replace(one, "}", ", per: [user]}", 1)),
			"Period":    window(one, strings.Replace(one, "10s", "20s", 1)),
			"Resets":    window(daily, strings.Replace(daily, "0 0", "0 1", 1)),
			"Timezone":  window(daily, strings.Replace(daily, "}", ", timezone: Asia/Tokyo}", 1)),
			"Unit":      window(one, strings.Replace(one, "}", ", unit: tokens}", 1)),
		}},
		{reflect.TypeFor[throttle.Tenant](), map[string][2]string{
			"Exempt":  tenant("weight: 1", "exempt: true"),
			"Weight":  tenant("weight: 1", "weight: 2"),
			"Windows": tenant("exempt: true", "exempt: true, windows: {w: {limit: 2}}"),
		}},
		{reflect.TypeFor[throttle.Override](), map[string][2]string{
			"Burst": tenant("windows: {w: {limit: 2}}", "windows: {w: {limit: 2, burst: 2}}"),
			"Limit": tenant("windows: {w: {limit: 2}}", "windows: {w: {limit: 3}}"),
		}},
	} {
		for field := range c.typ.Fields() {
			pair, known := c.fields[field.Name]
			if !known {
				t.Errorf("%s.%s: this test does not know the setting", c.typ.Name(), field.Name)
				continue
			}
			for _, args := range [][]string{{"check", "-"}, {"check", "--json", "-"}} {
				var printed [2]string
				for i, p := range pair {
					printed[i] = runMain(t.Context(), "policies: ["+p+"]\n", args...).want(t, exitDone).stdout
				}
				that(t, printed[0] != printed[1], c.typ.Name(), field.Name, args, "is the same for", pair, printed[0])
			}
		}
	}
}

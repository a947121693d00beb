package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
)

// CheckCommand validates a policy file and prints what it means.
type CheckCommand struct {
	*Main

	Policies string // file, or "-" for stdin
}

func (c *CheckCommand) Run(context.Context) error {
	policies, err := c.loadPolicies(c.Policies)
	if err != nil {
		return inputError{err}
	}
	for i := range policies {
		policies[i] = policies[i].WithDefaults()
	}
	if c.json {
		return show.JSON(c.Stdout, describe(policies))
	}
	for _, p := range policies {
		printPolicy(c.Stdout, p)
	}
	return nil
}

func printPolicy(w io.Writer, p throttle.Policy) {
	match := strings.Join(p.Match, " ")
	if match == "" {
		match = "no task type"
	}
	observes := ""
	if p.Mode == throttle.ModeObserve {
		observes = "\n  observes only: denies nothing"
	}
	fmt.Fprintf(w, "policy %s%s\n  matches %s, fails %s, fails over %s, requeues %s%s\n  upstream refusals pause %s, for %s at most; adapts: %s%s%s\n",
		p.Name, observes, match, p.Fail, p.Failover, p.Requeue, shardsText(p), refusedText(p), show.Short(p.MaxPause), p.Adapt, givenUpText(p), shareText(p))
	t := show.Table(w)
	fmt.Fprintln(t, "  WINDOW\tLIMIT\tPER\tALGORITHM\tMARGIN")
	for _, window := range p.Windows {
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\n", window.Name,
			show.Limit(window),
			scopeText(window.Scope), algorithmText(window), show.Short(window.Margin))
	}
	t.Flush()
	if len(p.Tenants) > 0 {
		t = show.Table(w)
		fmt.Fprintln(t, "  TENANT\tWEIGHT\tLIMITS OF ITS OWN")
		for _, name := range slices.Sorted(maps.Keys(p.Tenants)) {
			fmt.Fprintf(t, "  %s\t%v\t%s\n", name, p.Tenants[name].Weight, ownText(p.Tenants[name]))
		}
		t.Flush()
	}
	for _, warning := range p.Warnings() {
		fmt.Fprintf(w, "  warning: %s\n", warning)
	}
}

// refusedText says whom an upstream means that refuses a call.
func refusedText(p throttle.Policy) string {
	if p.Upstream == throttle.UpstreamShared {
		return "all tenants"
	}
	return "one tenant"
}

// givenUpText says when a task ends that is refused again and again.
func givenUpText(p throttle.Policy) string {
	text := ""
	if p.MaxRefusals > 0 {
		text += fmt.Sprintf("; the refusal %d of a task fails it", p.MaxRefusals)
	}
	if p.MaxRefusedWait > 0 {
		text += fmt.Sprintf("; a task fails that is refused for longer than %s", show.Short(p.MaxRefusedWait))
	}
	return text
}

// shareText says what batches get, unless it is the default.
func shareText(p throttle.Policy) string {
	if p.BatchShare == throttle.DefaultBatchShare {
		return ""
	}
	return fmt.Sprintf("\n  beside live tasks batches get %v of what there is", p.BatchShare)
}

func shardsText(p throttle.Policy) string {
	if p.Shards == 1 {
		return ""
	}
	return fmt.Sprintf(", in %d shards", p.Shards)
}

func scopeText(s throttle.Scope) string {
	if s == throttle.Shared {
		return "shared by all"
	}
	return strings.Join(s.Attributes(), ", ")
}

func algorithmText(w throttle.Window) string {
	switch w.Algorithm {
	case throttle.GCRA:
		return fmt.Sprintf("gcra, burst %d", w.Burst)
	case throttle.Fixed:
		return "fixed, from " + string(w.Anchor)
	case throttle.Concurrency:
		return "concurrency, lease " + show.Short(w.Lease)
	}
	return string(w.Algorithm)
}

func ownText(t throttle.Tenant) string {
	var own []string
	if t.Exempt {
		own = append(own, "exempt: counted, never denied")
	}
	for _, name := range slices.Sorted(maps.Keys(t.Windows)) {
		o := t.Windows[name]
		if o.Limit > 0 {
			own = append(own, fmt.Sprintf("%s %d", name, o.Limit))
		}
		if o.Burst > 0 {
			own = append(own, fmt.Sprintf("%s burst %d", name, o.Burst))
		}
	}
	if len(own) == 0 {
		return "none"
	}
	return strings.Join(own, ", ")
}

// The JSON of "check --json", with every default written out.
type (
	checked struct {
		Policies []checkedPolicy `json:"policies"`
	}
	checkedPolicy struct {
		Name       string                   `json:"name"`
		Match      []string                 `json:"match"`
		Adapt      throttle.Adapt           `json:"adapt"`
		BatchShare float64                  `json:"batch_share"`
		Mode       throttle.Mode            `json:"mode"`
		Fail       throttle.FailMode        `json:"fail"`
		Failover   throttle.FailoverMode    `json:"failover"`
		MaxPauseMS float64                  `json:"max_pause_ms"`
		Refusals   int64                    `json:"max_refusals,omitempty"`
		RefusedMS  float64                  `json:"max_refused_wait_ms,omitempty"`
		Upstream   throttle.Upstream        `json:"upstream"`
		Requeue    throttle.Requeue         `json:"requeue"`
		Shards     int                      `json:"shards"`
		Windows    []checkedWindow          `json:"windows"`
		Tenants    map[string]checkedTenant `json:"tenants"`
		Warnings   []string                 `json:"warnings"`
	}
	checkedWindow struct {
		Name      string             `json:"name"`
		Limit     int64              `json:"limit"`
		PeriodMS  float64            `json:"period_ms,omitempty"`
		Unit      string             `json:"unit"`
		Per       []string           `json:"per"`
		Algorithm throttle.Algorithm `json:"algorithm"`
		Anchor    throttle.Anchor    `json:"anchor,omitempty"`
		Burst     int64              `json:"burst,omitempty"`
		MarginMS  float64            `json:"margin_ms"`
		LeaseMS   float64            `json:"lease_ms,omitempty"`
		Resets    string             `json:"resets,omitempty"`
		Timezone  string             `json:"timezone,omitempty"`
	}
	checkedTenant struct {
		Exempt  bool                         `json:"exempt"`
		Weight  float64                      `json:"weight"`
		Windows map[string]throttle.Override `json:"windows"`
	}
)

func describe(policies []throttle.Policy) checked {
	out := checked{Policies: []checkedPolicy{}}
	for _, p := range policies {
		c := checkedPolicy{
			Name: p.Name, Match: append([]string{}, p.Match...), Mode: p.Mode, Adapt: p.Adapt, BatchShare: p.BatchShare, Fail: p.Fail, Failover: p.Failover, MaxPauseMS: show.Milliseconds(p.MaxPause), Upstream: p.Upstream, Requeue: p.Requeue, Shards: p.Shards,
			Refusals: p.MaxRefusals, RefusedMS: show.Milliseconds(p.MaxRefusedWait),
			Tenants: map[string]checkedTenant{}, Warnings: append([]string{}, p.Warnings()...),
		}
		for _, w := range p.Windows {
			c.Windows = append(c.Windows, checkedWindow{
				Name: w.Name, Limit: w.Limit, PeriodMS: show.Milliseconds(w.Period), Unit: w.Unit, Per: w.Scope.Attributes(),
				Algorithm: w.Algorithm, Anchor: w.Anchor, Burst: w.Burst, MarginMS: show.Milliseconds(w.Margin),
				LeaseMS: show.Milliseconds(w.Lease), Resets: w.Resets, Timezone: w.Timezone,
			})
		}
		for name, t := range p.Tenants {
			if t.Windows == nil {
				t.Windows = map[string]throttle.Override{}
			}
			c.Tenants[name] = checkedTenant(t)
		}
		out.Policies = append(out.Policies, c)
	}
	return out
}

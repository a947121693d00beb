package throttle

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/quote"
)

const maxGlobBytes, maxAttributes = 1024, 8

// A PolicyError names the invalid value of a policy, and what would be valid.
type PolicyError struct {
	Policy string // the policy's name
	Window string // the window's name, or ""
	Tenant string // the tenant's name, or ""
	Field  string // the field as policy files spell it
	Value  any    // the invalid value
	Hint   string // what it must be
}

func (e *PolicyError) Error() string {
	text, value := fmt.Sprintf("throttle: policy %q", e.Policy), fmt.Sprint(e.Value)
	if e.Tenant != "" {
		text += fmt.Sprintf(", tenant %q", e.Tenant)
	}
	if e.Window != "" {
		text += fmt.Sprintf(", window %q", e.Window)
	}
	if s, ok := e.Value.(string); ok {
		value = strconv.Quote(quote.Short(s))
	}
	return text + ": " + e.Field + " " + value + ": " + e.Hint
}

var (
	nameShape = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)
	nameHint  = "must be 1 to 64 of the characters A-Z a-z 0-9 _ . -"
)

// problems collects what is invalid in a policy.
type problems struct {
	subject PolicyError // the policy, window or tenant that is being checked
	found   []error
}

// must notes a value that is not valid, and returns `valid`.
func (c *problems) must(valid bool, field string, value any, hint string) bool {
	if !valid {
		e := c.subject
		e.Field, e.Value, e.Hint = field, value, hint
		c.found = append(c.found, &e)
	}
	return valid
}

// between requires a number within a range. NaN is in none.
func between[T int | int64 | float64](c *problems, field string, value, least, most T) {
	c.must(value >= least && value <= most, field, value, fmt.Sprintf("must be %v to %v", least, most))
}

func (c *problems) lasts(field string, value, least, most time.Duration) bool {
	return c.must(value >= least && value <= most && value%time.Microsecond == 0, field, value,
		fmt.Sprintf("must be %v to %v, in whole microseconds", least, most))
}

// Validate returns a *PolicyError for each invalid value, joined, or nil. Rules between
// values are checked only where each is valid alone. Fields that are not set have their defaults.
func (p Policy) Validate() error {
	p = p.WithDefaults()
	c := problems{subject: PolicyError{Policy: p.Name}}
	c.must(nameShape.MatchString(p.Name), "name", p.Name, nameHint)
	between(&c, "batch_share", p.BatchShare, 0.001, 0.5)
	between(&c, "shards", p.Shards, 1, 64)
	c.lasts("max_pause", p.MaxPause, time.Millisecond, MaxPeriod)
	c.lasts("max_refused_wait", p.MaxRefusedWait, 0, MaxPeriod)
	for i, glob := range p.Match {
		field := fmt.Sprintf("match[%d]", i)
		expression := strings.HasPrefix(glob, "^") || strings.HasSuffix(glob, "$")
		c.must(glob != "", field, glob, `must be a task type or a glob such as "http:*"`)
		c.must(len(glob) <= maxGlobBytes, field, glob, fmt.Sprintf("must be at most %d bytes", maxGlobBytes))
		c.must(!expression, field, glob, `must be a glob such as "http:*", not a regular expression`)
	}
	names, windows := map[string]bool{}, p.Windows
	if !c.must(len(windows) > 0 && len(windows) <= MaxWindows, "windows", len(windows),
		fmt.Sprintf("must be 1 to %d windows", MaxWindows)) {
		windows = nil
	}
	for _, w := range windows {
		c.subject.Window = w.Name
		w.check(&c)
		c.must(w.Name == "" || !names[w.Name], "name", w.Name, "is taken: windows of one policy have different names")
		c.subject.Window, names[w.Name] = "", true
		c.must(p.Shards <= 1 || slices.Contains(w.Per, TenantAttribute), "shards", p.Shards, fmt.Sprintf(
			"must be left out: shards count apart, and tenants share window %q; "+
				"count it per tenant, or split its limit between policies", w.Name))
	}
	for _, name := range slices.Sorted(maps.Keys(p.Tenants)) {
		c.found = append(c.found, p.checkTenant(name, p.Tenants[name])...)
	}
	return errors.Join(c.found...)
}

func (w Window) check(c *problems) {
	faults, per := len(c.found), w.Per
	c.must(nameShape.MatchString(w.Name), "name", w.Name, nameHint)
	between(c, "limit", w.Limit, 1, MaxLimit)
	c.must(nameShape.MatchString(w.Unit), "unit", w.Unit, nameHint)
	c.must(!w.Shared || len(per) == 0, "per", per, "must be left out: the window is shared")
	c.must(len(per) <= maxAttributes, "per", per, fmt.Sprintf("must be at most %d attributes", maxAttributes))
	c.must(len(slices.Compact(slices.Clone(per))) == len(per), "per", per, "must name every attribute once")
	for _, attribute := range per {
		c.must(nameShape.MatchString(attribute), "per", attribute, nameHint)
		c.must(attribute == TenantAttribute || !strings.EqualFold(attribute, TenantAttribute), "per", attribute,
			`must be "tenant", or an attribute that is called otherwise`)
	}

	a := w.Algorithm.side()
	if a == nil {
		names := strings.Join(algorithmNames(""), `", "`)
		c.must(false, "algorithm", string(w.Algorithm), `must be one of "`+names+`"; a token bucket is "gcra"`)
		return
	}
	longest := MaxPeriod // of a margin
	if a.Has(algorithm.OptionPeriod) && c.lasts("period", w.Period, time.Millisecond, MaxPeriod) {
		longest = w.Period
	}
	c.lasts("margin", w.Margin, 0, longest)
	for _, f := range []struct {
		option algorithm.Option
		value  any
		set    bool
	}{
		{algorithm.OptionBurst, w.Burst, w.Burst != 0},
		{algorithm.OptionLease, w.Lease, w.Lease != 0},
		{algorithm.OptionMargin, w.Margin, w.Margin != 0},
		{algorithm.OptionPeriod, w.Period, w.Period != 0},
		{algorithm.OptionResets, w.Resets, w.Resets != ""},
		{algorithm.OptionTimezone, w.Timezone, w.Timezone != ""},
	} {
		if f.set && !a.Has(f.option) {
			only := strings.Join(algorithmNames(f.option), ", ")
			c.must(false, string(f.option), f.value, `is for windows with "algorithm: `+only+`"`)
		}
	}
	if a.Rule != nil && len(c.found) == faults {
		field, value, hint := a.Rule(w.numbers())
		c.must(hint == "", field, value, hint)
	}
}

// checkTenant returns what is invalid in the settings of a tenant.
func (p Policy) checkTenant(name string, t Tenant) []error {
	c := problems{subject: PolicyError{Policy: p.Name, Tenant: name}}
	c.must(name != "" && len(name) <= MaxValueBytes, "tenant", name,
		fmt.Sprintf("must be 1 to %d bytes", MaxValueBytes))
	c.must(t.Weight >= 0.001 && t.Weight <= 1e6, "weight", t.Weight, "must be 0.001 to 1000000")
	for _, name := range slices.Sorted(maps.Keys(t.Windows)) {
		c.subject.Window = ""
		i := slices.IndexFunc(p.Windows, func(w Window) bool { return w.Name == name })
		if c.must(i >= 0, "windows", name, "must be the name of a window of this policy") &&
			c.must(slices.Contains(p.Windows[i].Per, TenantAttribute), "windows", name,
				"does not count by tenant: a tenant has a limit of its own only where the scope contains tenant") {
			c.subject.Window = name
			p.Windows[i].With(t.Windows[name]).check(&c)
		}
	}
	return c.found
}

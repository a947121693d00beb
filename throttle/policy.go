package throttle

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Bounds of a policy. All of them are inclusive.
const (
	MinPeriod     = time.Millisecond
	MaxPeriod     = 366 * 24 * time.Hour
	MaxLimit      = 1_000_000_000_000
	MaxWindows    = 32
	MaxAttributes = 8
	MaxValueBytes = 512 // of a tenant's name or any other attribute's value
)

// TenantAttribute is the attribute that fairness is between and that windows are counted by
// unless they say otherwise.
const TenantAttribute = "tenant"

// Requests is the unit that a window counts unless it says otherwise, and of which a request
// costs 1 unless it says otherwise.
const Requests = "requests"

// A Policy is a named set of windows that guards one resource. A request is granted only if
// it fits all of them.
type Policy struct {
	// Adapt says what follows a refusal by the upstream beside the pause. The default is AdaptFull.
	Adapt Adapt

	// Fail says what happens while Redis does not answer. The default is FailClosed.
	Fail FailMode

	// Match holds globs ("http:*", "?" is one character) over task types: the jobs that this
	// policy guards. The limiter itself takes policies by name and does not use it.
	Match []string

	// MaxPause bounds how long a refusal by the upstream pauses the policy: 1 millisecond to
	// MaxPeriod. The default is DefaultMaxPause.
	MaxPause time.Duration

	// Name is 1 to 64 of the characters A-Z a-z 0-9 _ . -
	Name string

	// Requeue says when a denied task comes back. The default is RequeueWhenFits.
	Requeue Requeue

	// Tenants holds what differs for single tenants, by name.
	Tenants map[string]Tenant

	// Upstream says whether an upstream's refusal, or its report of what remains, is about one tenant
	// or all. The default is UpstreamTenant if some window counts by tenant, else UpstreamShared: one
	// tenant's refusal then stops no other.
	Upstream Upstream

	// Windows are the limits, 1 to MaxWindows of them, with different names.
	Windows []Window
}

// A Window is one named limit of a policy.
type Window struct {
	// Algorithm says how units are counted. The default is Sliding.
	Algorithm Algorithm

	// Anchor says where the buckets of a Fixed window begin. The default is AnchorClock.
	Anchor Anchor

	// Burst is how many units a GCRA window grants at once, 1 to MaxLimit. The default is
	// Limit; 1 makes it a leaky bucket.
	Burst int64

	// Lease is for how long a Concurrency window holds units for an attempt that gives no sign of
	// life: MinLease to MaxLease, by default DefaultLease.
	Lease time.Duration

	// Limit is how many units fit in one period, 1 to MaxLimit; with Concurrency, how many are held
	// at once, 1 to MaxConcurrency.
	Limit int64

	// Margin is kept free of grants beside the period, so that calls which leave on time but
	// arrive bunched do not exceed the limit at the upstream. The default is 0, the largest
	// value is Period; for a Fixed window by the clock, and a Calendar, less than half of what lies
	// between two resets. A Concurrency window has none.
	Margin time.Duration

	// Name is 1 to 64 of the characters A-Z a-z 0-9 _ . -
	Name string

	// Period is MinPeriod to MaxPeriod, in whole microseconds. Calendar and Concurrency windows have
	// none.
	Period time.Duration

	// Resets is when a Calendar window begins anew: a cron expression of five fields, or @hourly,
	// @daily, @weekly, @monthly or @yearly, in Timezone.
	Resets string

	// Scope says which attributes the window is counted by. The zero value is the tenant: each has a
	// count of its own. See Shared and Per.
	Scope Scope

	// Timezone is where Resets is meant: a name of the IANA time zone database. The default is UTC.
	Timezone string

	// Unit is what the window counts. The default is Requests.
	Unit string
}

// A Tenant is what differs for one tenant of a policy.
type Tenant struct {
	// Exempt tenants are counted, but never denied.
	Exempt bool

	// Weight is the tenant's share of shared windows beside others that wait, above 0 and at
	// most 1e6. The default is 1.
	Weight float64

	// Windows holds other limits for this tenant, by the name of a window whose scope
	// contains the tenant.
	Windows map[string]Override
}

// An Override replaces numbers of a window for one tenant. Zero fields keep the window's.
type Override struct {
	Burst int64
	Limit int64
}

// An Upstream says whose limits at the called API a policy stands for: see Reservation.Pause.
type Upstream string

const (
	UpstreamTenant Upstream = "tenant" // each tenant's own: the counts whose scope contains the tenant
	UpstreamShared Upstream = "shared" // one for all tenants: the counts whose scope does not
)

// An Adapt says how a policy adapts to an upstream that refuses calls although the policy keeps its
// limits. It acts on the counts that Policy.Upstream names, on all workers, and never grants more
// than the limits. Grants are spread by the windows of the shortest period; Calendar and Concurrency
// windows do not adapt.
type Adapt string

const (
	// AdaptOff lets out one window's worth evenly after the pause, and then as much as the windows
	// do.
	AdaptOff Adapt = "off"

	// AdaptSpread spreads grants evenly over the period, instead of bursts, until no call was
	// refused for the time of 600 calls, within a minute and an hour. If it is refused again later it
	// spreads them for twice as long.
	AdaptSpread Adapt = "spread"

	// AdaptFull spreads grants and, if calls are still refused, lowers the rate by an eighth, down
	// to a 64th of the limit. The rate then grows again: fast at first, slowly around the rate that
	// was refused last, and faster beyond.
	AdaptFull Adapt = "full"
)

var adapts = []Adapt{AdaptOff, AdaptSpread, AdaptFull} // in the order of their numbers in the scripts

// A FailMode says what a reserve does while Redis does not answer.
type FailMode string

const (
	FailClosed FailMode = "closed" // Reserve returns an error: nothing runs unthrottled.
	FailOpen   FailMode = "open"   // Reserve grants and says so in Decision.FailedOpen.
)

// A Requeue says for when a denied task is requeued.
type Requeue string

const (
	RequeueWhenFits      Requeue = "when-fits"      // for the earliest time at which everything fits
	RequeueEarliestReset Requeue = "earliest-reset" // for the earliest time at which any denying window would have room
)

// An Anchor says where the buckets of a fixed window begin.
type Anchor string

const (
	AnchorClock    Anchor = "clock"     // at whole multiples of the period since 1970, in UTC
	AnchorFirstUse Anchor = "first-use" // at the first grant after the bucket before has ended
)

// A PolicyError says which value of a policy cannot be used, and what would be right.
type PolicyError struct {
	Policy string // the policy's name
	Window string // the window's name, if one is meant
	Tenant string // the tenant's name, if one is meant
	Field  string // the field as policy files spell it
	Value  any    // what it holds
	Hint   string // what it must be
}

func (e *PolicyError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "throttle: policy %q", e.Policy)
	if e.Tenant != "" {
		fmt.Fprintf(&b, ", tenant %q", e.Tenant)
	}
	if e.Window != "" {
		fmt.Fprintf(&b, ", window %q", e.Window)
	}
	value := fmt.Sprint(e.Value)
	if s, ok := e.Value.(string); ok {
		value = fmt.Sprintf("%q", s)
	}
	fmt.Fprintf(&b, ": %s %s: %s", e.Field, value, e.Hint)
	return b.String()
}

var (
	nameShape = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)
	nameHint  = "must be 1 to 64 of the characters A-Z a-z 0-9 _ . -"
)

// WithDefaults returns a copy with every default written out.
func (w Window) WithDefaults() Window {
	if w.Algorithm == "" {
		w.Algorithm = Sliding
	}
	if a := algorithms[w.Algorithm]; a != nil && a.defaults != nil {
		a.defaults(&w)
	}
	if w.Unit == "" {
		w.Unit = Requests
	}
	return w
}

// WithDefaults returns a copy with every default written out, also in its windows and tenants.
func (p Policy) WithDefaults() Policy {
	if p.Adapt == "" {
		p.Adapt = AdaptFull
	}
	if p.Fail == "" {
		p.Fail = FailClosed
	}
	if p.Requeue == "" {
		p.Requeue = RequeueWhenFits
	}
	p.Match = slices.Clone(p.Match)
	windows := make([]Window, len(p.Windows))
	for i, w := range p.Windows {
		windows[i] = w.WithDefaults()
	}
	p.Windows = windows
	if p.Upstream == "" {
		p.Upstream = UpstreamShared
		if slices.ContainsFunc(windows, func(w Window) bool { return w.Scope.has(TenantAttribute) }) {
			p.Upstream = UpstreamTenant
		}
	}
	if p.MaxPause == 0 {
		p.MaxPause = DefaultMaxPause
	}
	tenants := make(map[string]Tenant, len(p.Tenants))
	for name, t := range p.Tenants {
		tenants[name] = t.withDefaults()
	}
	p.Tenants = tenants
	return p
}

func (t Tenant) withDefaults() Tenant {
	if t.Weight == 0 {
		t.Weight = 1
	}
	t.Windows = maps.Clone(t.Windows)
	return t
}

// Validate returns nil or a *PolicyError that names the first value which cannot be used.
func (p Policy) Validate() error {
	p = p.WithDefaults()
	bad := func(field string, value any, hint string) error {
		return &PolicyError{Policy: p.Name, Field: field, Value: value, Hint: hint}
	}
	if !nameShape.MatchString(p.Name) {
		return bad("name", p.Name, nameHint)
	}
	if !slices.Contains(adapts, p.Adapt) {
		return bad("adapt", string(p.Adapt), `must be "off", "spread" or "full"`)
	}
	if p.Fail != FailClosed && p.Fail != FailOpen {
		return bad("fail", string(p.Fail), `must be "closed" or "open"`)
	}
	if p.Requeue != RequeueWhenFits && p.Requeue != RequeueEarliestReset {
		return bad("requeue", string(p.Requeue), `must be "when-fits" or "earliest-reset"`)
	}
	if p.Upstream != UpstreamTenant && p.Upstream != UpstreamShared {
		return bad("upstream", string(p.Upstream), `must be "tenant" or "shared"`)
	}
	if p.MaxPause < time.Millisecond || p.MaxPause > MaxPeriod || p.MaxPause%time.Microsecond != 0 {
		return bad("max_pause", p.MaxPause, fmt.Sprintf("must be 1ms to %v, in whole microseconds", MaxPeriod))
	}
	for i, glob := range p.Match {
		if glob == "" {
			return bad(fmt.Sprintf("match[%d]", i), glob, `must be a task type or a glob such as "http:*"`)
		}
		if len(glob) > MaxGlobBytes {
			return bad(fmt.Sprintf("match[%d]", i), cut(glob), fmt.Sprintf("must be at most %d bytes", MaxGlobBytes))
		}
	}
	if len(p.Windows) == 0 || len(p.Windows) > MaxWindows {
		return bad("windows", len(p.Windows), fmt.Sprintf("must be 1 to %d windows", MaxWindows))
	}
	names := map[string]bool{}
	for _, w := range p.Windows {
		if err := w.validate(p.Name); err != nil {
			return err
		}
		if names[w.Name] {
			return &PolicyError{p.Name, w.Name, "", "name", w.Name, "is taken: windows of one policy have different names"}
		}
		names[w.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(p.Tenants)) {
		if err := p.validateTenant(name, p.Tenants[name]); err != nil {
			return err
		}
	}
	return nil
}

func (w Window) validate(policy string) error {
	bad := func(field string, value any, hint string) error {
		return &PolicyError{Policy: policy, Window: w.Name, Field: field, Value: value, Hint: hint}
	}
	if !nameShape.MatchString(w.Name) {
		return bad("name", w.Name, nameHint)
	}
	algorithm, ok := algorithms[w.Algorithm]
	if !ok {
		return bad("algorithm", string(w.Algorithm), "must be one of "+algorithmNames())
	}
	if w.Limit < 1 || w.Limit > MaxLimit {
		return bad("limit", w.Limit, fmt.Sprintf("must be 1 to %d", int64(MaxLimit)))
	}
	timeless := !algorithm.has(optionPeriod)
	switch {
	case timeless && w.Period != 0:
		return bad("period", w.Period, `is not for windows with "algorithm: `+string(w.Algorithm)+`"`)
	case timeless:
	case w.Period < MinPeriod:
		return bad("period", w.Period, "must be at least 1ms")
	case w.Period > MaxPeriod:
		return bad("period", w.Period, fmt.Sprintf("must be at most %v", MaxPeriod))
	case w.Period%time.Microsecond != 0:
		return bad("period", w.Period, "must be whole microseconds")
	}
	switch {
	case w.Margin != 0 && !algorithm.has(optionMargin):
		return bad("margin", w.Margin, `is not for windows with "algorithm: `+string(w.Algorithm)+`"`)
	case w.Margin < 0 || w.Margin > w.Period && !timeless:
		return bad("margin", w.Margin, fmt.Sprintf("must be 0 to the period, %v", w.Period))
	case w.Margin > MaxPeriod:
		return bad("margin", w.Margin, fmt.Sprintf("must be at most %v", MaxPeriod))
	}
	if w.Margin%time.Microsecond != 0 {
		return bad("margin", w.Margin, "must be whole microseconds")
	}
	if !nameShape.MatchString(w.Unit) {
		return bad("unit", w.Unit, nameHint)
	}
	per := w.Scope.Attributes()
	if len(per) > MaxAttributes {
		return bad("per", per, fmt.Sprintf("must be at most %d attributes", MaxAttributes))
	}
	for i, attribute := range per {
		if !nameShape.MatchString(attribute) {
			return bad("per", attribute, nameHint)
		}
		if i > 0 && attribute == per[i-1] {
			return bad("per", per, "must name every attribute once")
		}
	}
	for _, f := range []struct {
		option option
		value  any
		set    bool
	}{
		{optionBurst, w.Burst, w.Burst != 0},
		{optionLease, w.Lease, w.Lease != 0},
		{optionResets, w.Resets, w.Resets != ""},
		{optionTimezone, w.Timezone, w.Timezone != ""},
		{optionAnchor, string(w.Anchor), w.Anchor != ""},
	} {
		if f.set && !algorithm.has(f.option) {
			return bad(string(f.option), f.value, `is for windows with "algorithm: `+strings.ReplaceAll(algorithmNames(f.option), `"`, "")+`"`)
		}
	}
	if algorithm.validate == nil {
		return nil
	}
	if field, value, hint := algorithm.validate(w); hint != "" {
		return bad(field, value, hint)
	}
	return nil
}

func (p Policy) validateTenant(name string, t Tenant) error {
	bad := func(field string, value any, hint string) error {
		return &PolicyError{Policy: p.Name, Tenant: name, Field: field, Value: value, Hint: hint}
	}
	if name == "" || len(name) > MaxValueBytes {
		return bad("tenant", name, fmt.Sprintf("must be 1 to %d bytes", MaxValueBytes))
	}
	if !(t.Weight > 0 && t.Weight <= 1e6) || math.IsNaN(t.Weight) {
		return bad("weight", t.Weight, "must be above 0 and at most 1000000")
	}
	for _, window := range slices.Sorted(maps.Keys(t.Windows)) {
		i := slices.IndexFunc(p.Windows, func(w Window) bool { return w.Name == window })
		if i < 0 {
			return bad("windows", window, "must be the name of a window of this policy")
		}
		if !p.Windows[i].Scope.has(TenantAttribute) {
			return bad("windows", window, "is shared: a tenant has a limit of its own only where the scope contains tenant")
		}
		if err := t.apply(p.Windows[i]).validate(p.Name); err != nil {
			err := err.(*PolicyError)
			err.Tenant = name
			return err
		}
	}
	return nil
}

// apply returns the window as it holds for the tenant.
func (t Tenant) apply(w Window) Window {
	o, ok := t.Windows[w.Name]
	if !ok {
		return w
	}
	if o.Limit != 0 {
		if o.Burst == 0 && w.Burst == w.Limit { // the default
			w.Burst = o.Limit
		}
		w.Limit = o.Limit
	}
	if o.Burst != 0 {
		w.Burst = o.Burst
	}
	return w
}

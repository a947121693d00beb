package throttle

import (
	"maps"
	"slices"
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

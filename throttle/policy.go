package throttle

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/glob"
)

// TenantAttribute is the attribute of tenants. Lines are fair between its values, and windows count by it
// unless Window.Per or Window.Shared says otherwise.
const TenantAttribute = "tenant"

// Requests is the default of Window.Unit. A request costs 1 of it by default.
const Requests = "requests"

// Bounds, all inclusive, and a default.
const (
	MaxPeriod     = algorithm.MaxPeriod // 366 days; also of pauses
	MaxLimit      = algorithm.MaxLimit  // 10^12
	MaxWindows    = 32                  // of a policy
	MaxValueBytes = 512                 // of a tenant's name or any other attribute's value
	MaxKeyBytes   = 64                  // of Request.Key
	MaxTake       = 64                  // tickets of one Line.Take

	DefaultPause = time.Second // of a policy that does not adapt, if the upstream does not say
)

// A Policy is a named set of windows that guards one resource. A request is granted only if it fits all of
// them. Limiters copy policies. Durations in it are whole microseconds.
type Policy struct {
	// BatchShare is the share of batches in what a window grants, and in handler slots, while live
	// requests wait there too: 0.001 to 0.5. The default is 0.05.
	BatchShare float64

	// EarliestReset brings a worker's denied task back at Decision.EarliestReset, without a line. By default the
	// task waits in line, and starts when its whole cost fits.
	EarliestReset bool

	// FailOpen lets Reserve and Wait grant while Redis does not answer, unless operators pause the tenant, and report it
	// in Decision.FailedOpen. By default they return ErrUnavailable, or their context's error if that ends first. If
	// Redis hangs they wait 5 seconds, or up to the client's ReadTimeout longer, and as long again for a call under way.
	FailOpen bool

	// KeepRate lets windows grant as much as ever after a pause by the upstream. By default grants are spread evenly
	// over the period, until no call was refused for as long as 600 calls take: at least a minute, at most an hour.
	// Later refusals lower the rate by an eighth, at most once in the shorter of half a period and 30 s, down to a
	// 64th of the limit. The rate then grows again. All workers adapt alike, in the counts that UpstreamShared selects,
	// by the windows of the shortest period. Calendar and Concurrency windows do not adapt.
	KeepRate bool

	// Match lists globs over the types of tasks that this policy guards: "*" matches any bytes or none, "?" one byte,
	// everything else itself. A glob has 1 to 1024 bytes, no "^" first and no "$" last. No two policies of a
	// limiter may match the same task type. The default is none: then requests name the policy.
	Match []string

	MaxPause time.Duration // bounds pauses, whatever the upstream asks for: 1ms to MaxPeriod; by default 1 hour

	// MaxRefusedWait fails a worker's task by a worker.GivenUpError if its next start would come later than
	// this after the upstream's first refusal: 0 to MaxPeriod. The default, 0, is no limit.
	MaxRefusedWait time.Duration

	Name string // 1 to 64 of the characters A-Z a-z 0-9 _ . -

	// Observe grants every request, and reports in Decision.Observed what would be denied, and for how long. Sliding
	// and Fixed windows count as GCRA windows with a Burst of their Limit, and count anew when Observe changes. Tickets
	// that wait when Observe is set start at once. Operators' pauses still deny.
	Observe bool

	// Shards spreads the tenants over hash tags, each with a line, for several primaries of a Redis Cluster: 1
	// to 64. All windows must count by tenant. A change has all tenants count from 0. The default is 1.
	Shards int

	Tenants map[string]Tenant // settings of single tenants, by name, unless Config.Tenants finds them

	// UpstreamShared applies what the upstream reports to the counts that all tenants share, such as where they use one
	// key of the API. By default it applies to the counts of the call's tenant. Where a policy has no such
	// count, it applies to all counts of the call.
	UpstreamShared bool

	Windows []Window // the limits: 1 to MaxWindows, with different names
}

// A Window is one named limit of a policy.
type Window struct {
	Algorithm Algorithm // how units are counted; by default AlgorithmSliding

	Burst int64 // how many units a GCRA window grants at once: 1 (a leaky bucket) to MaxLimit; by default Limit

	Lease time.Duration // how long a Concurrency window holds units without a renewal: 1s to 24h; by default 30s

	Limit int64 // required: how many units fit in one period, 1 to MaxLimit; for Concurrency at once, 1 to 10,000

	// Margin keeps calls that leave on time, but arrive bunched, below the limit of the upstream. Units count
	// for Period plus Margin. Fixed and Calendar windows reset Margin later, and count a grant within Margin of
	// a reset on both sides of it. Margin is at most Period, and for Calendar and Fixed less than half the time
	// between two resets. The default is 0. Concurrency windows have none.
	Margin time.Duration

	Name string // 1 to 64 of the characters A-Z a-z 0-9 _ . -

	// Per is the scope: the attributes that the window counts by. The window has a count for each combination of
	// their values. Per has at most 8 different ones, in any order, each of 1 to 64 of the characters
	// A-Z a-z 0-9 _ . - The default is the tenant.
	Per []string

	// Period is the time that Limit applies to: 1ms to MaxPeriod. It is required, but Calendar and Concurrency have none.
	Period time.Duration

	// Resets says when a Calendar window starts again from 0, and is required there: a cron expression
	// of five fields, or @hourly, @daily, @weekly, @monthly or @yearly.
	Resets string

	Shared bool // one count for all tenants, instead of Per

	Timezone string // of Resets: a name of the IANA database; by default "UTC"

	// Unit names the units that the window counts, such as "tokens". It is spelled like a Name. The default is Requests.
	Unit string
}

// A Tenant has the settings of one tenant in a policy.
type Tenant struct {
	Exempt  bool                // counted, but denied only while operators pause the tenant or the policy
	Weight  float64             // share of windows and handler slots, relative to others': 0.001 to 1e6; by default 1
	Windows map[string]Override // own limits, by the names of windows whose scope contains the tenant
}

// An Override replaces a window's numbers for one tenant. Zero fields keep the window's; a default Burst follows Limit.
type Override struct {
	Burst int64 `json:"burst,omitempty"` // Window.Burst, in units; of GCRA windows
	Limit int64 `json:"limit,omitempty"` // Window.Limit, in units
}

func (w Window) withDefaults() Window {
	w.Algorithm, w.Unit = cmp.Or(w.Algorithm, AlgorithmSliding), cmp.Or(w.Unit, Requests)
	if w.Per = slices.Sorted(slices.Values(w.Per)); len(w.Per) == 0 && !w.Shared {
		w.Per = []string{TenantAttribute}
	}
	if a := w.Algorithm.side(); a != nil && a.Defaults != nil {
		n := w.numbers()
		a.Defaults(&n)
		w.Burst, w.Lease, w.Timezone = n.Burst, n.Lease, n.Timezone
	}
	return w
}

func (w Window) numbers() algorithm.Window {
	return algorithm.Window{
		Burst: w.Burst, Limit: w.Limit, Lease: w.Lease,
		Margin: w.Margin, Period: w.Period, Resets: w.Resets, Timezone: w.Timezone,
	}
}

// capacity returns the largest cost that can ever fit.
func (w Window) capacity() int64 { return w.Algorithm.side().Capacity(w.numbers()) }

// WithDefaults returns a deep copy with every default written out.
func (p Policy) WithDefaults() Policy {
	p.BatchShare = cmp.Or(p.BatchShare, 0.05)
	p.MaxPause = cmp.Or(p.MaxPause, time.Hour)
	p.Shards = cmp.Or(p.Shards, 1)
	p.Match = slices.Clone(p.Match)
	p.Windows = slices.Clone(p.Windows)
	for i, w := range p.Windows {
		p.Windows[i] = w.withDefaults()
	}
	tenants := make(map[string]Tenant, len(p.Tenants))
	for name, t := range p.Tenants {
		tenants[name] = t.withDefaults()
	}
	p.Tenants = tenants
	return p
}

// Matches reports whether one of Match matches a task type.
func (p Policy) Matches(taskType string) bool {
	return slices.ContainsFunc(p.Match, func(g string) bool { return glob.Match(g, taskType) })
}

func (t Tenant) withDefaults() Tenant {
	t.Weight = cmp.Or(t.Weight, 1)
	t.Windows = maps.Clone(t.Windows)
	return t
}

// With returns the window with the numbers of an override.
func (w Window) With(o Override) Window {
	if o.Burst == 0 && w.Burst == w.Limit { // the default
		o.Burst = o.Limit
	}
	w.Burst, w.Limit = cmp.Or(o.Burst, w.Burst), cmp.Or(o.Limit, w.Limit)
	return w
}

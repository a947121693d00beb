package throttle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Limiter reserves capacity by policies. All limiters with equal policies on one Redis count
// together. It is safe for concurrent use.
//
// Calls of one policy that are made while another one is under way go to Redis together. Each keeps
// its own context and its own error.
type Limiter struct {
	library  script.Library
	now      func() int64 // microseconds for the scripts, 0 for the clock of Redis; tests set it
	policies atomic.Pointer[policySet]
	runner   *script.Runner
	setting  sync.Mutex // held by SetPolicies
	tenants  TenantFunc
}

// A TenantFunc looks a tenant up, for instance in a user's own database of plans. Not found
// means what the policy says of the tenant. It is called at every request and must be safe for
// concurrent use; caching is its own business.
type TenantFunc func(ctx context.Context, policy, tenant string) (t Tenant, found bool, err error)

// Config is what New needs.
type Config struct {
	// Client is the connection to Redis, single or cluster. It stays the caller's to close.
	Client redis.UniversalClient

	// Policies are the policies to begin with; SetPolicies replaces them.
	Policies []Policy

	// Tenants, if not nil, is asked before the policy's own tenants.
	Tenants TenantFunc
}

// New returns a limiter, or a *PolicyError. It does not talk to Redis.
func New(c Config) (*Limiter, error) {
	if c.Client == nil {
		return nil, errors.New("throttle: Config.Client is nil: must be a connection to Redis")
	}
	l := &Limiter{now: func() int64 { return 0 }, tenants: c.Tenants}
	l.runner = script.NewRunner(c.Client, func() int64 { return l.now() })
	if err := l.SetPolicies(c.Policies); err != nil {
		return nil, err
	}
	return l, nil
}

// SetPolicies replaces all policies at once, for calls that begin later. The counts of windows that
// keep their policy, name, algorithm and scope go on. A policy that is removed while tickets wait
// in its line goes on being taken from: see TakePolicies. On error, a *PolicyError, nothing
// changes.
func (l *Limiter) SetPolicies(policies []Policy) error {
	set, err := compile(policies, &l.library)
	if err != nil {
		return err
	}
	l.setting.Lock()
	defer l.setting.Unlock()
	set.follow(l.policies.Load(), l.runner)
	l.policies.Store(set)
	return nil
}

// follow takes over what goes on by name.
func (set *policySet) follow(before *policySet, r *script.Runner) {
	set.former = map[string]*compiledPolicy{}
	if before != nil {
		for _, all := range []map[string]*compiledPolicy{before.former, before.byName} {
			for name, cp := range all {
				if now := set.byName[name]; now != nil {
					now.perName = cp.perName
				} else {
					set.former[name] = cp
				}
			}
		}
	}
	for _, cp := range set.list {
		if cp.perName == nil {
			cp.perName = &perName{batcher: r.NewBatcher(), claims: newClaims(r), taker: r.NewTaker()}
		}
	}
}

// Policy returns a copy of the policy of that name, with its defaults written out.
func (l *Limiter) Policy(name string) (Policy, bool) { return l.policies.Load().byName[name].copy() }

// PolicyFor returns a copy of the policy whose globs match the task type, with its defaults written
// out. Match is the cheaper way to know which it is.
func (l *Limiter) PolicyFor(taskType string) (Policy, bool) {
	return l.policies.Load().match(taskType).copy()
}

// Policies returns copies of all policies, with their defaults written out, in the order they were
// given.
func (l *Limiter) Policies() []Policy {
	var policies []Policy
	for _, cp := range l.policies.Load().list {
		policies = append(policies, cp.Policy.WithDefaults())
	}
	return policies
}

func (cp *compiledPolicy) copy() (Policy, bool) {
	if cp == nil {
		return Policy{}, false
	}
	return cp.Policy.WithDefaults(), true
}

// A PolicyInfo is what has to be known of a policy at every job.
type PolicyInfo struct {
	Fail    FailMode
	Leases  bool // some window is a Concurrency window: what it grants has to be renewed and released
	Name    string
	Requeue Requeue
}

// Match returns what Limiter.PolicyFor does, in short, and is made for every job.
func (l *Limiter) Match(taskType string) (PolicyInfo, bool) {
	return l.policies.Load().match(taskType).info()
}

// Lookup returns what Limiter.Policy does, in short, and is made for every job.
func (l *Limiter) Lookup(policy string) (PolicyInfo, bool) {
	return l.policies.Load().byName[policy].info()
}

func (cp *compiledPolicy) info() (PolicyInfo, bool) {
	if cp == nil {
		return PolicyInfo{}, false
	}
	return PolicyInfo{Fail: cp.Fail, Leases: cp.leases, Name: cp.Name, Requeue: cp.Requeue}, true
}

// Reserve takes the request's cost from all windows of its policy, or from none, and returns at
// once: Decision.Granted says which. A denial is not an error. A request with a ticket that is
// denied stands in line afterwards: Decision.Queued.
//
// Errors are ErrUnknownPolicy, *RequestError and *NeverFitsError for requests that can never be
// granted, ErrUnavailable (unless the policy fails open), ErrState, ErrClock, ErrReply, the
// context's error, and whatever the TenantFunc returned, wrapped. Nothing runs on an error.
func (l *Limiter) Reserve(ctx context.Context, r Request) (Decision, error) {
	o, err := l.checked(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	return l.reserve(ctx, o, 0, reservationID(r))
}

// reserve reserves under an ID; at is when what is granted anew was granted before, or 0.
func (l *Limiter) reserve(ctx context.Context, o *operation, at int64, id string) (Decision, error) {
	ask := o.reserving(id)
	ask.At = at
	return l.send(ctx, o, ask)
}

func (o *operation) reserving(id string) script.Request {
	if o.tenant.Exempt {
		return o.waiting(script.Exempt, id)
	}
	return o.waiting(script.Reserve, id)
}

// send sends what reserving has made.
func (l *Limiter) send(ctx context.Context, o *operation, ask script.Request) (Decision, error) {
	a, err := o.do(ctx, ask)
	if err != nil {
		return l.failsOpen(ctx, o, err)
	}
	d := o.decision(a)
	late := a.Status == script.PastDeadline && ask.Place.Deadline > 0
	if d.Granted {
		d.Reservation = Reservation{Request: o.request, At: d.At, ID: ask.ID}
	} else if !d.Queued && !late && (a.Status != script.Denied || d.RetryIn == 0) {
		return Decision{}, o.unlike(a)
	}
	return d, nil
}

// failsOpen is what an error means to a request that asks for capacity.
func (l *Limiter) failsOpen(ctx context.Context, o *operation, err error) (Decision, error) {
	if errors.Is(err, ErrUnavailable) && o.Fail == FailOpen && ctx.Err() == nil {
		return Decision{At: time.Now(), FailedOpen: err, Granted: true, Policy: o.request.Policy, Tenant: o.request.Tenant}, nil
	}
	return Decision{}, err
}

// reservationID returns an ID for what a request may be granted. A repeat by the same idempotency key
// means the same reservation.
func reservationID(r Request) string {
	if r.IdempotencyKey == "" {
		return script.NewID()
	}
	sum := sha256.Sum256([]byte(script.OnceKey(r.Tenant, r.IdempotencyKey)))
	return hex.EncodeToString(sum[:8])
}

// Peek tells what Reserve would answer, and changes nothing. It differs from Reserve also in
// that it never fails open.
func (l *Limiter) Peek(ctx context.Context, r Request) (Decision, error) {
	o, err := l.checked(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	ask := o.waiting(script.Peek, "")
	ask.Once = ""
	a, err := o.do(ctx, ask)
	if err != nil {
		return Decision{}, err
	}
	d := o.decision(a)
	if !d.Granted && (a.Status != script.Denied || d.RetryIn == 0) {
		return Decision{}, o.unlike(a)
	}
	return d, nil
}

// Check returns the error by which every Reserve of this request would fail, whatever is in
// use: ErrUnknownPolicy, *RequestError or *NeverFitsError, or that of the TenantFunc. It
// differs from Peek in that it does not ask Redis.
func (l *Limiter) Check(ctx context.Context, r Request) error {
	_, err := l.checked(ctx, r)
	return err
}

// find returns the policy of that name; with former also one that was removed.
func (l *Limiter) find(policy string, former bool) (*compiledPolicy, error) {
	set := l.policies.Load()
	cp := set.byName[policy]
	if cp == nil && former {
		cp = set.former[policy]
	}
	if cp == nil {
		return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, cut(policy))
	}
	return cp, nil
}

// checked makes a request ready that asks for capacity.
func (l *Limiter) checked(ctx context.Context, r Request) (*operation, error) {
	cp, err := l.find(r.Policy, false)
	if err != nil {
		return nil, err
	}
	o, err := l.operation(ctx, cp, r)
	if err != nil {
		return nil, err
	}
	return o, o.checkCosts()
}

func (l *Limiter) operation(ctx context.Context, cp *compiledPolicy, r Request) (*operation, error) {
	t, err := l.tenant(ctx, cp, r.Tenant)
	if err != nil {
		return nil, err
	}
	t.Exempt = t.Exempt || r.Exempt
	return cp.newOperation(r, t)
}

// tenant is what the TenantFunc says of the tenant, or else the policy.
func (l *Limiter) tenant(ctx context.Context, cp *compiledPolicy, name string) (Tenant, error) {
	if l.tenants == nil {
		return cp.Tenants[name], nil
	}
	t, found, err := l.tenants(ctx, cp.Name, name)
	if err != nil {
		return Tenant{}, fmt.Errorf("throttle: policy %q: looking up tenant %q: %w", cp.Name, cut(name), err)
	}
	if !found {
		return cp.Tenants[name], nil
	}
	t = t.withDefaults()
	return t, cp.validateTenant(name, t)
}

// waiting is a request that may have to wait, or that those who wait matter to.
func (o *operation) waiting(op, id string) script.Request {
	ask := o.ask(op, id)
	ask.Hold = max(0, o.request.HoldFor.Microseconds())
	ask.Place = o.place()
	if o.request.Ticket != (TicketID{}) {
		ask.Ticket = script.TicketName(o.request.Ticket.Queue, o.request.Ticket.ID)
	}
	return ask
}

// do sends one request. Its errors are those of the call and of the request, classified.
func (o *operation) do(ctx context.Context, ask script.Request) (script.Answer, error) {
	answers, err := o.batcher.Do(ctx, o.script, ask)
	if err == nil {
		err = answers[0].Err
	}
	if err != nil {
		return script.Answer{}, classify(ctx, o.Name, err)
	}
	return answers[0], nil
}

func (o *operation) unlike(a script.Answer) error {
	return fmt.Errorf("%w: policy %q: neither granted nor denied for a time, but %d", ErrReply, o.Name, a.Status)
}

// decision is what an answer says to the caller.
func (o *operation) decision(a script.Answer) Decision {
	d := Decision{
		AlreadyQueued: a.Status == script.WaitedBefore,
		At:            time.UnixMicro(a.At),
		ClockBehind:   micros(a.Behind),
		Exempt:        o.tenant.Exempt,
		Granted:       a.Status == script.Granted || a.Status == script.GrantedBefore || o.tenant.Exempt,
		Policy:        o.Name,
		Queued:        a.Status == script.Waits || a.Status == script.WaitedBefore,
		Tenant:        o.request.Tenant,
	}
	if !d.Granted {
		d.RetryIn = micros(a.Time - a.At)
		d.RetryInMost = max(d.RetryIn, micros(a.Most-a.At))
		d.RetryInLeast = min(d.RetryIn, micros(a.Least-a.At))
	}
	if a.Windows != nil {
		d.Windows = o.states(a.Windows, a.At, d.Granted)
	}
	return d
}

// states is what the windows look like at a time.
func (o *operation) states(windows []script.WindowAnswer, at int64, granted bool) []WindowState {
	states := make([]WindowState, len(o.windows))
	for i, w := range o.windows {
		answer, capacity := windows[i], o.known[i].capacity(w)
		states[i] = WindowState{
			Algorithm: w.Algorithm,
			Burst:     capacity,
			Denied:    !granted && answer.Fits > at,
			Limit:     w.Limit,
			Name:      w.Name,
			Period:    w.Period,
			Remaining: max(0, capacity-answer.Used),
			ResetsAt:  time.UnixMicro(answer.Resets),
			Scope:     o.scope(o.scopeOf[i]),
			Unit:      w.Unit,
			Used:      answer.Used,
		}
		if states[i].Denied {
			states[i].RetryIn = micros(answer.Fits - at)
		}
	}
	return states
}

// scope is a copy, as whoever gets a decision may change it.
func (o *operation) scope(i int) Scope {
	n := len(o.scopes[i])
	both := append(append(make([]string, 0, 2*n), o.scopes[i]...), o.values[i]...)
	return Scope{Attributes: both[:n:n], Values: both[n:]}
}

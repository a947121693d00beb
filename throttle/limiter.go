package throttle

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// nonceKept is for how long a repeated call is recognised by its nonce.
const nonceKept = time.Minute

// detourKept is for how long a policy's calls take the long way (lua/reserve.lua) after one of them had
// to: most of what sends a call there is so for a while, such as a line or a pause.
const detourKept = time.Second

// A Limiter reserves capacity by policies. All limiters with equal policies on one Redis count
// together. It is safe for concurrent use.
type Limiter struct {
	client    redis.UniversalClient
	lead      *redis.Script
	line      atomic.Pointer[listener]
	listening sync.Mutex   // guards changes of line
	now       func() int64 // microseconds for the scripts, 0 for the clock of Redis; tests set it
	plans     atomic.Pointer[plans]
	scripts   scriptCache
	tenants   TenantFunc
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
	l := &Limiter{
		client:  c.Client,
		lead:    redis.NewScript(leadLua),
		now:     func() int64 { return 0 },
		tenants: c.Tenants,
	}
	if err := l.SetPolicies(c.Policies); err != nil {
		return nil, err
	}
	return l, nil
}

// SetPolicies replaces all policies at once, for calls that begin later. The counts of windows
// that keep their policy, name, algorithm and scope go on. On error, a *PolicyError, nothing
// changes.
func (l *Limiter) SetPolicies(policies []Policy) error {
	ps, err := newPlans(policies, &l.scripts)
	if err != nil {
		return err
	}
	l.plans.Store(ps)
	l.listening.Lock()
	top := l.line.Load()
	l.listening.Unlock()
	for ; top != nil; top = top.before {
		top.listen(Line{})
	}
	return nil
}

// Policy returns the policy of that name, with its defaults written out.
func (l *Limiter) Policy(name string) (Policy, bool) {
	pl, ok := l.plans.Load().byName[name]
	if !ok {
		return Policy{}, false
	}
	return pl.Policy, true
}

// PolicyFor returns the policy whose globs match the task type, with its defaults written out.
func (l *Limiter) PolicyFor(taskType string) (Policy, bool) {
	pl := l.plans.Load().match(taskType)
	if pl == nil {
		return Policy{}, false
	}
	return pl.Policy, true
}

// Policies returns all policies, with their defaults written out, in the order they were given.
// They are copies, to change and to set.
func (l *Limiter) Policies() []Policy {
	var policies []Policy
	for _, pl := range l.plans.Load().list {
		policies = append(policies, pl.Policy.WithDefaults())
	}
	return policies
}

// Reserve takes the request's cost from all windows of its policy, or from none, and returns
// at once: Decision.Granted says which. A denial is not an error.
//
// Errors are ErrUnknownPolicy, *RequestError and *NeverFitsError for requests that can never
// be granted, ErrUnavailable (unless the policy fails open), ErrState, ErrReply, the context's
// error, and whatever the TenantFunc returned, wrapped. Nothing runs on an error.
func (l *Limiter) Reserve(ctx context.Context, r Request) (Decision, error) {
	if r.Nonce == "" {
		r.Nonce = rand.Text()
	}
	c, err := l.newCall(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	what := "reserve"
	if c.tenant.Exempt {
		what = "exempt"
	}
	d, err := l.decide(ctx, c, what, r.Ticket, planOptions{})
	if errors.Is(err, ErrUnavailable) && c.Fail == FailOpen && ctx.Err() == nil {
		return Decision{At: time.Now(), FailedOpen: err, Granted: true, Policy: r.Policy, Tenant: r.Tenant}, nil
	}
	if d.Granted {
		d.Reservation = Reservation{Request: r, At: d.At}
	}
	return d, err
}

// Peek tells what Reserve would answer, and changes nothing. It differs from Reserve also in
// that it never fails open.
func (l *Limiter) Peek(ctx context.Context, r Request) (Decision, error) {
	r.Nonce = "peek" // not used, but every call has one
	c, err := l.newCall(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	return l.decide(ctx, c, "peek", r.Ticket, planOptions{})
}

// Check returns the error by which every Reserve of this request would fail, whatever is in
// use: ErrUnknownPolicy, *RequestError or *NeverFitsError, or that of the TenantFunc. It
// differs from Peek in that it does not ask Redis.
func (l *Limiter) Check(ctx context.Context, r Request) error {
	r.Nonce = "check" // not used, but every call has one
	c, err := l.newCall(ctx, r)
	if err != nil {
		return err
	}
	return c.checkCosts()
}

// askAgain is how often Wait asks for what may fit sooner than it was told.
const askAgain = time.Second

// Wait reserves, and while it is denied sleeps for RetryIn and reserves again, or for a second where
// a Concurrency window denied. It is for use outside of a job queue: inside one, a denied job gives its
// worker back.
//
// It returns a *WaitError, at once, if the context's deadline comes before the request can
// fit, and the context's error if it ends during the sleep. Otherwise errors are Reserve's.
func (l *Limiter) Wait(ctx context.Context, r Request) (Decision, error) {
	for {
		d, err := l.Reserve(ctx, r)
		if err != nil || d.Granted {
			return d, err
		}
		pause := d.RetryIn
		if d.MayBeSooner() {
			pause = min(pause, askAgain)
		} else if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < pause {
			return d, &WaitError{Decision: d, Deadline: deadline}
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return d, fmt.Errorf("throttle: %s: %w", d.Reason(), context.Cause(ctx))
		}
	}
}

// Cancel gives the units of a reservation back, as far as they still count: never more than it
// took, and once, however often it is called. The decision returned carries the windows as
// they are then. A reservation that failed open took nothing, and cancelling it does nothing.
func (l *Limiter) Cancel(ctx context.Context, r Reservation) (Decision, error) {
	if r.Nonce == "" {
		return Decision{}, nil
	}
	c, err := l.newCall(ctx, r.Request)
	if err != nil {
		return Decision{}, err
	}
	return l.settle(ctx, c, r, "cancel", "", "")
}

func (l *Limiter) newCall(ctx context.Context, r Request) (*call, error) {
	pl, ok := l.plans.Load().byName[r.Policy]
	if !ok {
		return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, cut(r.Policy))
	}
	t, err := l.tenant(ctx, pl, r.Tenant)
	if err != nil {
		return nil, err
	}
	t.Exempt = t.Exempt || r.Exempt
	return pl.newCall(r, t)
}

// tenant is what the TenantFunc says of the tenant, or else the policy.
func (l *Limiter) tenant(ctx context.Context, pl *plan, name string) (Tenant, error) {
	if l.tenants == nil {
		return pl.Tenants[name], nil
	}
	t, found, err := l.tenants(ctx, pl.Name, name)
	if err != nil {
		return Tenant{}, fmt.Errorf("throttle: policy %q: looking up tenant %q: %w", pl.Name, cut(name), err)
	}
	if !found {
		return pl.Tenants[name], nil
	}
	t = t.withDefaults()
	return t, pl.validateTenant(name, t)
}

func (l *Limiter) decide(ctx context.Context, c *call, what, ticket string, o planOptions) (Decision, error) {
	if err := c.checkCosts(); err != nil {
		return Decision{}, err
	}
	ticket, budget := l.lineArguments(ticket)
	var d Decision
	var err error
	short := what == "reserve" && c.scripts.grant != nil && time.Since(time.Unix(0, c.detour.Load())) > detourKept
	if short {
		d, err = l.run(ctx, c, c.scripts.grant, c.grantArguments(l.now(), ticket != ""))
	}
	if !short || errors.Is(err, redis.Nil) {
		args := c.arguments(l.now(), what, nonceKept.Milliseconds(), c.lineFields(ticket, budget, o), max(0, c.request.HoldFor.Microseconds()))
		d, err = l.run(ctx, c, c.scripts.reserve, args)
		if short {
			c.detour.Store(time.Now().UnixNano())
		}
	}
	if err == nil && what != "plan" && !d.Granted && (d.Planned || d.refused || d.RetryIn == 0) {
		return Decision{}, fmt.Errorf("%w: policy %q: neither granted nor denied for a time", ErrReply, c.Name)
	}
	return d, err
}

func (l *Limiter) run(ctx context.Context, c *call, script *redis.Script, args []any) (Decision, error) {
	reply, err := script.Run(ctx, l.client, c.keys, args...).Slice()
	if err != nil {
		return Decision{}, classify(ctx, c.Name, err)
	}
	if script == c.scripts.grant {
		reply = c.inOrder(reply)
	}
	d, line, err := c.decision(reply)
	if err == nil && line != nil {
		c.detour.Store(time.Now().UnixNano())
		l.tell(line)
	}
	return d, err
}

// decision reads a script's reply (lua/reserve.lua).
func (c *call) decision(reply []any) (Decision, *Line, error) {
	bad := fmt.Errorf("%w: policy %q: %d values for %d windows", ErrReply, c.Name, len(reply), len(c.windows))
	numbers := 4 + 3*len(c.windows)
	if len(reply) < numbers {
		return Decision{}, nil, bad
	}
	n := make([]int64, min(len(reply), numbers+1))
	for i := range n {
		var ok bool
		if n[i], ok = reply[i].(int64); !ok {
			return Decision{}, nil, bad
		}
	}
	status, at, fits, behind := n[0], n[1], n[2], n[3]
	if status < statusDenied || status > statusPlannedBefore {
		return Decision{}, nil, bad
	}
	d := Decision{
		At:          time.UnixMicro(at),
		ClockBehind: micros(behind),
		Exempt:      c.tenant.Exempt,
		Granted:     status == statusGranted || status == statusGrantedBefore || c.tenant.Exempt,
		Known:       status == statusPlannedBefore,
		Planned:     status == statusPlanned || status == statusPlannedBefore,
		Policy:      c.Name,
		refused:     status == statusTooLate || status == statusBacklog,
		Tenant:      c.request.Tenant,
		Windows:     make([]WindowState, len(c.windows)),
	}
	if !d.Granted {
		d.RetryIn = micros(fits - at)
	}
	for i, w := range c.windows {
		used, fits, resets := n[4+3*i], n[5+3*i], n[6+3*i]
		if used < 0 {
			return Decision{}, nil, bad
		}
		capacity := algorithms[w.Algorithm].capacity(w)
		d.Windows[i] = WindowState{
			Algorithm: w.Algorithm,
			Burst:     capacity,
			Denied:    !d.Granted && fits > at,
			Limit:     w.Limit,
			Name:      w.Name,
			Period:    w.Period,
			Remaining: max(0, capacity-used),
			ResetsAt:  time.UnixMicro(resets),
			Scope:     c.scoped[c.scopeOf[i]],
			Unit:      w.Unit,
			Used:      used,
		}
		if d.Windows[i].Denied {
			d.Windows[i].RetryIn = micros(fits - at)
		}
	}
	line, ok := readLine(reply[numbers:], at)
	if !ok {
		return Decision{}, nil, bad
	}
	if line != nil {
		line.Policy = c.Name
		line.Tenant, c.waits = c.lineTenant(), line.Due >= 0
	}
	return d, line, nil
}

// micros turns microseconds into a duration that is never negative and never overflows.
func micros(us int64) time.Duration {
	const most = int64(1<<63-1) / int64(time.Microsecond)
	return time.Duration(min(max(us, 0), most)) * time.Microsecond
}

// classify wraps an error of go-redis in our class for it, and keeps it for errors.Is.
func classify(ctx context.Context, policy string, err error) error {
	if ended := ctx.Err(); ended != nil {
		if !errors.Is(err, ended) {
			err = fmt.Errorf("%w: %w", ended, err)
		}
		return fmt.Errorf("throttle: policy %q: %w", policy, err)
	}
	// Whatever is not an answer of Redis is about the way to it: a network, TLS, a closed pipe or pool.
	// Of OOM, READONLY and their like Redis says too which line of the script met them.
	var reply redis.Error
	var number *strconv.NumError // of what should be a length
	class := ErrUnavailable
	switch text := err.Error(); {
	case strings.Contains(text, "SLUICE_STATE"):
		class = ErrState
	case strings.Contains(text, "SLUICE_CLOCK"):
		class = ErrClock
	case errors.Is(err, redis.Nil), strings.HasPrefix(text, "redis: unexpected type="),
		strings.HasPrefix(text, "redis: can't parse"), strings.HasPrefix(text, "redis: invalid reply"),
		errors.As(err, &number), errors.As(err, &reply) && strings.HasPrefix(text, "ERR ") && strings.Contains(text, "script"):
		class = ErrReply
	}
	return fmt.Errorf("%w: policy %q: %w", class, policy, err)
}

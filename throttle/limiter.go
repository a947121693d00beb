package throttle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/internal/script"
	"github.com/sluice-go/sluice/throttle/internal/testhook"
)

// A Limiter reserves capacity by policies. All limiters with equal policies on one Redis count
// together. It is safe for concurrent use.
//
// Calls of one policy that are made while another is under way go to Redis together. Each keeps its
// own context and its own error.
type Limiter struct {
	library  script.Library
	policies atomic.Pointer[policySet]
	runner   *script.Runner
	setting  sync.Mutex // held by SetPolicies
	tenants  TenantFunc
}

// A TenantFunc looks up what differs for one tenant, for instance in a database of plans. If the
// tenant is not found, Policy.Tenants holds. It is called at every request, by many goroutines at
// once; it should cache. Its errors are returned to the caller, wrapped.
type TenantFunc func(ctx context.Context, policy, tenant string) (t Tenant, found bool, err error)

// Config is what New needs.
type Config struct {
	// Client is the connection to Redis, single or cluster. It is required. The caller closes it.
	Client redis.UniversalClient

	// Policies are the policies to begin with. The default is none. SetPolicies replaces them.
	Policies []Policy

	// Prefix begins every key of this limiter, so that two environments can share one Redis. It is up
	// to 64 of the characters A-Z a-z 0-9 _ . : - and empty by default. Limiters count together only
	// if they have the same prefix. It does not reach asynq's own keys: queues need different names.
	Prefix string

	// Tenants looks up tenants before Policy.Tenants does. The default, nil, looks up none.
	Tenants TenantFunc
}

var prefixShape = regexp.MustCompile(`^[A-Za-z0-9_.:-]{0,64}$`)

// New returns a limiter. It does not talk to Redis. Errors are a *PolicyError, or say which field of
// the Config cannot be used.
func New(c Config) (*Limiter, error) {
	if c.Client == nil {
		return nil, errors.New("throttle: Config.Client is nil: must be a connection to Redis")
	}
	if !prefixShape.MatchString(c.Prefix) {
		return nil, fmt.Errorf("throttle: Config.Prefix %q: must be at most 64 of the characters A-Z a-z 0-9 _ . : -", shorten(c.Prefix))
	}
	l := &Limiter{tenants: c.Tenants}
	l.library.Prefix = c.Prefix
	now := func() int64 { return 0 }
	if hooks, ok := c.Client.(*testhook.Client); ok {
		l.hook(hooks)
		if hooks.Now != nil {
			now = hooks.Now
		}
	}
	l.runner = script.NewRunner(c.Client, c.Prefix, now)
	if err := l.SetPolicies(c.Policies); err != nil {
		return nil, err
	}
	return l, nil
}

// hook connects the limiter with a test.
func (l *Limiter) hook(hooks *testhook.Client) {
	l.library.Edit = hooks.Edit
	hooks.Gathered = func(policy string) int { return l.policies.Load().byName[policy].batcher.Gathered() }
	hooks.Refresh = func(ctx context.Context, policy string) error {
		cp, err := l.find(policy, false)
		if err != nil {
			return err
		}
		cp.refreshAt.Store(math.MaxInt64)
		return l.refresh(ctx, cp)
	}
}

// Reserve takes the request's cost from all windows of its policy, or from none, and returns at
// once. Decision.Granted says which: a denial is not an error. A denied request that has a ticket
// waits in line afterwards (Decision.Queued).
//
// For requests that can never be granted, errors are ErrUnknownPolicy, *RequestError and
// *NeverFitsError. Others are ErrUnavailable (unless the policy fails open), ErrState, ErrClock,
// ErrReply, the context's error, and that of the TenantFunc. After an error the work must not run.
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
		d.Reservation = Reservation{Request: o.request, At: d.At, ID: ask.ID, limiter: l}
	} else if !d.Queued && !late && (a.Status != script.Denied || d.RetryIn == 0) {
		return Decision{}, o.unlike(a)
	}
	return d, nil
}

// failsOpen is what an error means to a request that asks for capacity.
func (l *Limiter) failsOpen(ctx context.Context, o *operation, err error) (Decision, error) {
	if !errors.Is(err, ErrUnavailable) || o.Fail != FailOpen || ctx.Err() != nil {
		return Decision{}, err
	}
	r := o.request
	d := Decision{At: time.Now(), FailedOpen: err, Granted: true, Policy: r.Policy, Tenant: r.Tenant}
	d.Reservation = Reservation{Request: r, At: d.At, limiter: l}
	return d, nil
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

// Attach returns the reservation bound to this limiter, by which its methods then work: for one that
// was decoded, from JSON for instance, or granted by another limiter. The limiter needs the policy.
func (l *Limiter) Attach(r Reservation) Reservation {
	r.limiter = l
	return r
}

// Peek tells what Reserve would answer, and changes nothing. It never fails open. Errors are
// Reserve's.
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

// Check returns the error by which every Reserve of this request would fail, however much room there
// is: ErrUnknownPolicy, *RequestError, *NeverFitsError or that of the TenantFunc. Unlike Peek it
// does not ask Redis.
func (l *Limiter) Check(ctx context.Context, r Request) error {
	_, err := l.checked(ctx, r)
	return err
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
		return Tenant{}, fmt.Errorf("throttle: policy %q: looking up tenant %q: %w", cp.Name, shorten(name), err)
	}
	if !found {
		return cp.Tenants[name], nil
	}
	t = t.withDefaults()
	return t, cp.validateTenant(name, t)
}

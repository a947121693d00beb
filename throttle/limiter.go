package throttle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/redischeck"
	"github.com/sluice-go/sluice/internal/testhook"
	"github.com/sluice-go/sluice/throttle/internal/quote"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Limiter reserves capacity by policies. Limiters with the same policies and Prefix on one Redis count together. It
// is safe for concurrent use. Calls for a line that are made while one is under way share the next call to Redis.
type Limiter struct {
	config        Config   // with defaults
	holds         sync.Map // *hold by the reservation's ID
	interventions atomic.Pointer[interventions]
	observer      Observer // the user's; nil if there is none
	panicked      sync.Map // when a panic was last logged (time.Time), by the function's name in the Config
	policies      atomic.Pointer[policySet]
	runner        script.Runner
	setting       sync.Mutex // held by SetPolicies and SetInterventions
}

// A TenantFunc looks up the settings of one tenant, such as in a database. It is called at every request, by many
// goroutines at once: it should cache. The caller gets its errors, wrapped, and a *PolicyError for each invalid setting
// that it returns. For a panic the caller gets a *RequestError, and the stack is logged: at most once a minute. In
// spite of errors, reservations are renewed, corrected and released, and refusals by the upstream are reported.
type TenantFunc func(ctx context.Context, policy, tenant string) (t Tenant, found bool, err error)

// Config configures New.
type Config struct {
	// Client is a client of Redis, single or cluster. It is required. The caller closes it.
	Client redis.UniversalClient

	// Logger gets pauses and changed rates after refusals by upstreams, policies that SetPolicies changes, panics of
	// the other fields' functions, and what package control puts in force. The default is slog.Default().
	Logger *slog.Logger

	// Name identifies this process to others, such as in the pause after a refusal that it reported. It is at most
	// 128 bytes. The default is the host's name, "/" and the process ID.
	Name string

	Observer Observer // is told what the limiter does; by default none, which costs nothing

	// Policies are the policies to begin with. The default is none. SetPolicies replaces them.
	Policies []Policy

	// Prefix begins every key of this limiter, so that two environments can share one Redis: up to 64
	// of the characters A-Z a-z 0-9 _ . : - The default is empty. It does not apply to asynq's own
	// keys: queues need different names.
	Prefix string

	// Tenants looks up tenants. Policy.Tenants applies to tenants that it does not find.
	Tenants TenantFunc
}

const maxNameBytes = 128 // of Config.Name

var prefixShape = regexp.MustCompile(`^[A-Za-z0-9_.:-]{0,64}$`)

// New returns a limiter. It does not call Redis. The error wraps a *PolicyError for each invalid value of a policy
// (errors.As), or names the field of the Config that is invalid.
func New(c Config) (*Limiter, error) {
	if c.Client == nil {
		return nil, errors.New("throttle: Config.Client is nil: must be a connection to Redis")
	}
	if !prefixShape.MatchString(c.Prefix) {
		return nil, fmt.Errorf("throttle: Config.Prefix %q: "+
			"must be at most 64 of the characters A-Z a-z 0-9 _ . : -", quote.Short(c.Prefix))
	}
	if len(c.Name) > maxNameBytes {
		return nil, fmt.Errorf("throttle: Config.Name %q: must be at most %d bytes", quote.Short(c.Name), maxNameBytes)
	}
	if c.Name == "" {
		host, _ := os.Hostname()
		c.Name = fmt.Sprintf("%s/%d", host[:min(len(host), maxNameBytes/2)], os.Getpid())
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	l := &Limiter{config: c, observer: c.Observer}
	l.config.Observer = func(event any) { tell(l, event) }
	l.interventions.Store(&interventions{})
	l.runner.Client, l.runner.Prefix = c.Client, c.Prefix
	if hooks, ok := c.Client.(*testhook.Client); ok {
		l.hook(hooks)
	}
	l.runner.Called = func(ctx context.Context, line, name string, n int, took time.Duration, err error) {
		policy := script.PolicyOf(line)
		tell(l, Call{classify(ctx, policy, err), n, policy, name, took})
	}
	l.config.Policies = nil
	if err := l.SetPolicies(c.Policies); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *Limiter) hook(hooks *testhook.Client) {
	l.runner.Edit, l.runner.Now = hooks.Edit, hooks.Now
	hooks.Gathered = func(policy string) int { return l.policies.Load().byLine[policy].group.Gathered() }
	hooks.Refresh = func(ctx context.Context, policy string) error {
		cp := l.policies.Load().byLine[policy]
		cp.refreshAt.Store(refreshUnderWay)
		return l.refresh(ctx, cp, nil)
	}
}

// Config returns what New got, with defaults, and without the policies. Its Observer is never nil.
func (l *Limiter) Config() Config { return l.config }

// Reserve takes the cost of a request from all windows of its policy, or from none, without a wait.
// A denial is not an error. A denied request that has a ticket joins the line (Decision.Queued).
//
// If the request can never be granted, the error is ErrUnknownPolicy or a *RequestError. If its
// Deadline or MaxWait refuses it, the error is a *DeniedError, and it joins no line. Other errors are
// ErrUnavailable (unless the policy fails open), ErrState, ErrClock, ErrReply, the context's error, and
// the TenantFunc's. After an error the work must not run.
func (l *Limiter) Reserve(ctx context.Context, r Request) (Decision, error) {
	o, err := l.checked(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	return l.send(ctx, o, o.reserveRequest())
}

func (l *Limiter) send(ctx context.Context, o *operation, ask script.Request) (Decision, error) {
	a, err := o.do(ctx, ask)
	if err != nil {
		return l.failOpen(ctx, o, err)
	}
	return l.decided(o, ask, a)
}

// failOpen grants a request that Redis did not answer, if its policy says so and no operator has paused its tenant.
func (l *Limiter) failOpen(ctx context.Context, o *operation, err error) (Decision, error) {
	gaveUp := ctx.Err() != nil && !silent(ctx)
	if !errors.Is(err, ErrUnavailable) || !o.FailOpen || gaveUp || o.tenant.paused() {
		return Decision{}, err
	}
	r := o.request
	d := Decision{At: time.Now(), FailedOpen: err, Granted: true, Policy: r.Policy, Tenant: r.Tenant}
	d.Reservation = Reservation{Request: r, limiter: l}
	tell(l, d)
	return d, nil
}

// Attach binds a reservation to this limiter, which must have the reservation's policy. Use it if another limiter has
// granted the reservation; or if that has only a Request, to report a Pause for a call that reserved nothing.
func (l *Limiter) Attach(r Reservation) Reservation {
	r.limiter = l
	return r
}

// Peek returns the decision that Reserve would make if the request's Ticket were not in line. It takes nothing, joins
// no line, ignores Deadline and MaxWait, and never fails open. Errors are Reserve's.
func (l *Limiter) Peek(ctx context.Context, r Request) (Decision, error) {
	o, err := l.checked(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	ask := o.lineRequest(script.Peek)
	a, err := o.do(ctx, ask)
	if err != nil {
		return Decision{}, err
	}
	return l.decided(o, ask, a)
}

// Reset empties the windows of a policy, of one tenant or with "" of all: as if nothing had been granted. If a tenant
// is named, counts that all tenants share stay. Pauses by the upstream and adapted rates of the emptied scopes end too.
// Concurrency windows forget the work that runs now: other work may start, and work that finds no room when it renews
// its lease is ended by ErrLeaseLost. Tickets in line keep their places.
//
// Reset returns how many scopes it has emptied, with all of their windows. For each set of attributes that windows
// count by, it looks through all keys of a Redis, some thousand a call, unless that set is empty, or is the tenant alone
// and a tenant is named. If Reset fails or ctx ends, some counts are empty: repeat it. Errors are Take's.
func (l *Limiter) Reset(ctx context.Context, policy, tenant string) (int, error) {
	cp, err := l.policyFor(policy, tenant, orRemoved)
	if err != nil {
		return 0, err
	}
	shards := []*compiledPolicy{cp}
	if tenant == "" {
		shards = l.policies.Load().byName[policy]
	}
	n := 0
	for _, cp := range shards {
		for _, attributes := range cp.scopes {
			if tenant != "" && !slices.Contains(attributes, TenantAttribute) {
				continue
			}
			some, err := l.runner.Forget(ctx, cp.line, attributes, tenant)
			n += int(some)
			if err != nil {
				return n, classify(ctx, cp.Name, err)
			}
		}
		if err := l.runner.LookAgain(ctx, cp.line); err != nil {
			return n, classify(ctx, cp.Name, err)
		}
	}
	return n, nil
}

// Check returns the error with which Reserve would fail however much room there is: ErrUnknownPolicy,
// a *RequestError or the TenantFunc's. It does not call Redis.
func (l *Limiter) Check(ctx context.Context, r Request) error {
	_, err := l.checked(ctx, r)
	return err
}

// CheckRedis checks how the limiter's Redis is set up, and returns a text for each problem: its eviction
// policy, its clock, or a command that the limiter needs and its user may not call. On a Cluster it checks all
// primaries, but tries the commands on one. It leaves out what the server does not tell, or the user may not ask. It
// makes a few calls: use it at the start of a program. Errors are ErrUnavailable, ErrForbidden and the context's.
func (l *Limiter) CheckRedis(ctx context.Context) ([]string, error) {
	findings, err := redischeck.Findings(ctx, l.runner.Client)
	if err != nil {
		return findings, classify(ctx, "", err)
	}
	if err = l.runner.Preflight(ctx); redischeck.Forbidden(err) {
		findings = append(findings, fmt.Sprintf("redis: %v: see docs/howto/lock-down-redis.md", err))
	}
	return findings, classify(ctx, "", err)
}

// Ping returns nil if the limiter can decide: Redis answers, and its user may call all that the limiter needs. It is
// one call, for readiness probes. Errors are ErrUnavailable, ErrForbidden and the context's. See CheckRedis for more.
func (l *Limiter) Ping(ctx context.Context) error { return classify(ctx, "", l.runner.Preflight(ctx)) }

package httpthrottle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strconv"

	"github.com/sluice-go/sluice/internal/breaker"
	"github.com/sluice-go/sluice/throttle"
)

// IPAttribute is the attribute by which NewMiddleware names the client's address.
const IPAttribute = "ip"

// MiddlewareConfig configures NewMiddleware. Its functions are called by many goroutines at once.
type MiddlewareConfig struct {
	// Allow reports whether a request is served even if it does not fit. It is counted in any case.
	// The default allows none.
	Allow func(*http.Request) bool

	// Attributes returns the attributes by which windows count a request, such as the user: 1 to
	// throttle.MaxValueBytes bytes; else the answer is 400. The default of "ip" is ClientIP's. It is
	// required if a window counts by anything but that and the tenant.
	Attributes func(*http.Request) map[string]string

	// ChargeRefused counts refused requests too, but in Concurrency windows: a client that does not
	// slow down is not served at all. Each costs two more calls to Redis.
	ChargeRefused bool

	// Cost returns what a request costs, by unit. The default is 1 of throttle.Requests.
	Cost func(*http.Request) map[string]int64

	// Limiter decides. It is required.
	Limiter *throttle.Limiter

	// Logger gets, at most once a minute, how many requests could not be counted, and when Redis
	// answers again. The default is slog.Default().
	Logger *slog.Logger

	// Policy guards the requests. It is required. For several policies, chain several middlewares.
	Policy string

	// Refused writes the response to a request that is not served, with its header fields set. The
	// status is 429; 503 while Redis does not answer; or 400 if an attribute or the tenant is empty or
	// too long. With 400 and 503 the decision has no windows. The default writes a line of text.
	Refused func(w http.ResponseWriter, r *http.Request, status int, d throttle.Decision)

	// Tenant returns the tenant of a request, under the rules of Attributes. It is required if a
	// window counts by tenant.
	Tenant func(*http.Request) string

	// TrustedProxies are the proxies whose X-Forwarded-For is believed. The default is none.
	TrustedProxies []netip.Prefix
}

// NewMiddleware returns a middleware that serves a request if it fits all windows of the policy. A
// nil handler means http.DefaultServeMux, as for an http.Server. An error names the field of the
// config that cannot be used.
//
// Responses describe all windows by RateLimit and RateLimit-Policy (IETF draft
// draft-ietf-httpapi-ratelimit-headers-10). X-RateLimit-Limit, -Remaining and -Reset (seconds since
// 1970, rounded up) describe the tightest. A refused request gets 429 with Retry-After in whole
// seconds, rounded up. Repeated after that time it fits, unless others took the room.
//
// A request holds its slots in Concurrency windows until the handler returns or panics. If a slot
// is lost before, the request's context ends with throttle.ErrLeaseLost.
//
// A request that can never fit gets 413. One whose tenant or attributes cannot be counted gets 400.
// While Redis does not answer, requests get 503 with Retry-After. Under the policy's fail: open
// they are served, without the header fields. The first ones wait for 2 s, later ones not at all: one
// at a time asks whether Redis answers again, for at most 250 ms.
func NewMiddleware(c MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	if c.Limiter == nil {
		return nil, errors.New("httpthrottle: MiddlewareConfig.Limiter is nil: must be what throttle.New returns")
	}
	policies := c.Limiter.Policies()
	i := slices.IndexFunc(policies, func(p throttle.Policy) bool { return p.Name == c.Policy })
	if i < 0 {
		return nil, fmt.Errorf("httpthrottle: MiddlewareConfig.Policy %q: "+
			"must be a policy of the limiter", c.Policy)
	}
	if err := c.checkScopes(policies[i]); err != nil {
		return nil, err
	}
	for i, p := range c.TrustedProxies {
		if !p.IsValid() || p.Addr().Is4In6() { // neither would contain any address
			return nil, fmt.Errorf("httpthrottle: MiddlewareConfig.TrustedProxies[%d] %v: "+
				"must be a prefix such as 10.0.0.0/8 or fd00::/8", i, p)
		}
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Refused == nil {
		c.Refused = refuse
	}
	g := &guard{MiddlewareConfig: c}
	return func(next http.Handler) http.Handler {
		if next == nil {
			next = http.DefaultServeMux
		}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.serve(w, r, next) })
	}, nil
}

// checkScopes reports attributes that windows count by and that the config can never supply.
func (c MiddlewareConfig) checkScopes(p throttle.Policy) error {
	for _, w := range p.Windows {
		for _, a := range w.Scope.Attributes() {
			field, missing := "Attributes", c.Attributes == nil && a != IPAttribute
			if a == throttle.TenantAttribute {
				field, missing = "Tenant", c.Tenant == nil
			}
			if missing {
				return fmt.Errorf("httpthrottle: MiddlewareConfig.%s is nil: must return %q: "+
					"window %q of policy %q counts by it", field, a, w.Name, c.Policy)
			}
		}
	}
	return nil
}

type guard struct {
	MiddlewareConfig
	breaker         breaker.Breaker
	invalid, broken sparse // requests that got 400, and 500
	outage          sparse // requests that came while the limiter was unavailable
}

func (g *guard) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	request := g.request(r)
	d, err := g.reserve(r.Context(), request)
	if err != nil {
		g.fail(w, r, err)
		return
	}
	g.logOutage(d.FailedOpen, "open")
	setRateLimit(w.Header(), d)
	if !d.Granted {
		w.Header().Set("Retry-After", strconv.FormatInt(wholeSeconds(d.RetryIn), 10))
		g.Refused(w, r, http.StatusTooManyRequests, d)
		return
	}
	ctx, hold := d.Reservation.Hold(r.Context())
	defer release(r.Context(), hold, g.Logger)
	next.ServeHTTP(w, r.WithContext(ctx))
}

// reserve asks the limiter. A denial stands if Redis does not answer when it is charged.
func (g *guard) reserve(ctx context.Context, r throttle.Request) (d throttle.Decision, err error) {
	err = g.breaker.Do(ctx, breaker.AnswerWithin, func(ctx context.Context) error {
		d, err = g.Limiter.Reserve(ctx, r)
		if err == nil && !d.Granted && g.ChargeRefused {
			charged, failed := g.charge(ctx, r, d)
			if !errors.Is(failed, throttle.ErrUnavailable) {
				d, err = charged, failed
			}
		}
		return err
	})
	return d, err
}

func (g *guard) request(r *http.Request) throttle.Request {
	request := throttle.Request{Attributes: map[string]string{}, Policy: g.Policy}
	if g.Attributes != nil {
		maps.Copy(request.Attributes, g.Attributes(r))
	}
	if request.Attributes[IPAttribute] == "" {
		request.Attributes[IPAttribute] = ClientIP(r, g.TrustedProxies)
	}
	if g.Cost != nil {
		request.Cost = g.Cost(r)
	}
	if g.Tenant != nil {
		request.Tenant = g.Tenant(r)
	}
	request.Exempt = g.Allow != nil && g.Allow(r)
	return request
}

// charge counts a refused request, and returns the denial as it is after that.
func (g *guard) charge(
	ctx context.Context, r throttle.Request, denied throttle.Decision,
) (throttle.Decision, error) {
	exempt := r
	exempt.Exempt = true
	charged, err := g.Limiter.Reserve(ctx, exempt)
	if err != nil {
		return denied, err
	}
	if err := charged.Reservation.Release(ctx); err != nil {
		return denied, err
	}
	d, err := g.Limiter.Peek(ctx, r)
	if d.Granted { // there is room again, but this request was refused
		d.Granted, d.RetryIn = false, denied.RetryIn
	}
	return d, err
}

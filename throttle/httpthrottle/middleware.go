package httpthrottle

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/sluice-go/sluice/throttle"
)

// IPAttribute is the attribute by which NewMiddleware names the client's address.
const IPAttribute = "ip"

// undecidedRetry is the Retry-After, in seconds, of what was not served because Redis is away.
const undecidedRetry = "1"

// MiddlewareConfig is how requests are throttled. Its functions are called by many goroutines at once.
type MiddlewareConfig struct {
	// Allow picks requests that are counted, but never denied.
	Allow func(*http.Request) bool

	// Attributes tells what scopes other than the tenant count a request by, such as the user. The
	// attribute "ip" need not be there: by default it is the client's address, see ClientIP.
	Attributes func(*http.Request) map[string]string

	// ChargeRefused counts refused requests too, so that whoever does not slow down is not served
	// at all. It costs two more calls of Redis for each of them. Concurrency windows do not count them.
	ChargeRefused bool

	// Cost tells what a request takes, per unit. The default is 1 throttle.Requests.
	Cost func(*http.Request) map[string]int64

	// IPv6Bits is how many bits of an IPv6 address are a client, 1 to 128: one has as many
	// addresses as it likes. The default is 64.
	IPv6Bits int

	// Limiter decides. It is required.
	Limiter *throttle.Limiter

	// Logger is told when the limiter cannot decide, and when it can again. The default is
	// slog.Default().
	Logger *slog.Logger

	// OnDecision, if not nil, observes every decision before it takes effect.
	OnDecision func(*http.Request, throttle.Decision)

	// Policy guards the requests. It is required. For several, make several middlewares.
	Policy string

	// Refused, if not nil, writes the answer to a request that is not served, in place of a line of
	// text. The status is 429, or 503 if the limiter could not decide; all header fields are set.
	Refused func(w http.ResponseWriter, r *http.Request, status int, d throttle.Decision)

	// Tenant tells whose request it is. Without it, no window of the policy may be by tenant.
	Tenant func(*http.Request) string

	// TrustedProxies are those whose X-Forwarded-For is believed. The default is nobody.
	TrustedProxies []netip.Prefix
}

// NewMiddleware returns a middleware that serves a request if it fits all windows of the policy, or an
// error that names the field of the config which cannot be used.
//
// Every answer tells the state of all windows by the fields RateLimit and RateLimit-Policy (IETF draft
// draft-ietf-httpapi-ratelimit-headers-10), and that of the tightest by X-RateLimit-Limit, -Remaining
// and -Reset (seconds since 1970, rounded up). A refused request is answered by 429 with Retry-After in
// whole seconds, rounded up: repeated then and not sooner, it fits, unless others took the room.
//
// What Concurrency windows hold is held until the handler returns or panics. If it is lost meanwhile,
// the request's context ends with throttle.ErrLeaseLost.
//
// While Redis does not answer, the answer is 503 with Retry-After; with the policy's fail: open the
// request is served, without the fields.
func NewMiddleware(c MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	if c.Limiter == nil {
		return nil, errors.New("httpthrottle: MiddlewareConfig.Limiter is nil: must be what throttle.New returns")
	}
	if _, ok := c.Limiter.Lookup(c.Policy); !ok {
		return nil, fmt.Errorf("httpthrottle: MiddlewareConfig.Policy %q: must be a policy of the limiter", c.Policy)
	}
	if c.IPv6Bits == 0 {
		c.IPv6Bits = 64
	}
	if c.IPv6Bits < 1 || c.IPv6Bits > 128 {
		return nil, fmt.Errorf("httpthrottle: MiddlewareConfig.IPv6Bits %d: must be 1 to 128", c.IPv6Bits)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Refused == nil {
		c.Refused = refuse
	}
	g := &guard{MiddlewareConfig: c}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.serve(w, r, next) })
	}, nil
}

type guard struct {
	MiddlewareConfig
	away atomic.Bool // the limiter could not decide last time
}

func (g *guard) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	request := g.request(r)
	d, err := g.Limiter.Reserve(r.Context(), request)
	if err == nil && !d.Granted && g.ChargeRefused {
		d, err = g.charge(r, request, d)
	}
	if err != nil {
		g.undecided(w, r, err)
		return
	}
	g.decided(d)
	if g.OnDecision != nil {
		g.OnDecision(r, d)
	}
	tell(w.Header(), d)
	if !d.Granted {
		w.Header().Set("Retry-After", strconv.FormatInt(wholeSeconds(d.RetryIn), 10))
		g.Refused(w, r, http.StatusTooManyRequests, d)
		return
	}
	ctx, hold := d.Reservation.Hold(r.Context())
	defer release(r.Context(), hold, g.Logger)
	next.ServeHTTP(w, r.WithContext(ctx))
}

func (g *guard) request(r *http.Request) throttle.Request {
	request := throttle.Request{Attributes: map[string]string{}, Policy: g.Policy}
	if g.Attributes != nil {
		maps.Copy(request.Attributes, g.Attributes(r))
	}
	if request.Attributes[IPAttribute] == "" {
		request.Attributes[IPAttribute] = ClientIP(r, g.TrustedProxies, g.IPv6Bits)
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

// charge counts a refused request, and returns the denial as it is then.
func (g *guard) charge(r *http.Request, request throttle.Request, denied throttle.Decision) (throttle.Decision, error) {
	exempt := request
	exempt.Exempt = true
	charged, err := g.Limiter.Reserve(r.Context(), exempt)
	if err != nil {
		return denied, err
	}
	if err := charged.Reservation.Release(r.Context()); err != nil {
		return denied, err
	}
	d, err := g.Limiter.Peek(r.Context(), request)
	if d.Granted { // there was room again meanwhile, which this request did not get
		d.Granted, d.RetryIn = false, denied.RetryIn
	}
	return d, err
}

// undecided answers a request of which the limiter could not decide.
func (g *guard) undecided(w http.ResponseWriter, r *http.Request, err error) {
	var never *throttle.NeverFitsError
	var wrong *throttle.RequestError
	switch {
	case r.Context().Err() != nil: // nobody hears the answer
		w.WriteHeader(http.StatusServiceUnavailable)
	case errors.As(err, &never):
		http.Error(w, "more than is ever served at once", http.StatusRequestEntityTooLarge)
	case errors.As(err, &wrong), errors.Is(err, throttle.ErrUnknownPolicy):
		g.Logger.Error("httpthrottle: a request cannot be throttled, and is not served", "policy", g.Policy, "error", err)
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
	default:
		if !g.away.Swap(true) {
			g.Logger.Error("httpthrottle: the limiter cannot decide", "policy", g.Policy, "fails", "closed", "error", err)
		}
		w.Header().Set("Retry-After", undecidedRetry)
		g.Refused(w, r, http.StatusServiceUnavailable, throttle.Decision{At: time.Now(), Policy: g.Policy, RetryIn: time.Second})
	}
}

// decided logs when the limiter's absence begins, for a policy that fails open, and when it ends.
func (g *guard) decided(d throttle.Decision) {
	switch {
	case d.FailedOpen != nil:
		if !g.away.Swap(true) {
			g.Logger.Error("httpthrottle: the limiter cannot decide", "policy", g.Policy, "fails", "open", "error", d.FailedOpen)
		}
	case g.away.CompareAndSwap(true, false):
		g.Logger.Info("httpthrottle: the limiter decides again", "policy", g.Policy)
	}
}

// refuse is MiddlewareConfig.Refused's default. It names no window, as scopes hold other people's names.
func refuse(w http.ResponseWriter, _ *http.Request, status int, _ throttle.Decision) {
	http.Error(w, http.StatusText(status)+": try again in "+w.Header().Get("Retry-After")+" s", status)
}

// tell sets the fields that tell of the windows.
func tell(h http.Header, d throttle.Decision) {
	if len(d.Windows) == 0 {
		return
	}
	policies, limits := httpsfv.List{}, httpsfv.List{}
	tightest := d.Windows[0]
	for _, w := range d.Windows {
		if tighter(w, tightest) {
			tightest = w
		}
		policy, limit := httpsfv.NewItem(w.Name), httpsfv.NewItem(w.Name)
		units, seconds := quota(w)
		policy.Params.Add("q", units)
		limit.Params.Add("r", w.Remaining)
		switch {
		case w.Algorithm == throttle.Concurrency && w.Unit == throttle.Requests:
			policy.Params.Add("qu", "concurrent-requests")
		case w.Unit != throttle.Requests:
			policy.Params.Add("qu", w.Unit)
		}
		if seconds > 0 {
			policy.Params.Add("w", seconds)
		}
		if w.Algorithm != throttle.Concurrency {
			limit.Params.Add("t", wholeSeconds(resetsIn(d, w)))
		}
		policies, limits = append(policies, policy), append(limits, limit)
	}
	// Names and units are of A-Z a-z 0-9 _ . - and numbers are at most 1e12: nothing can be wrong.
	if field, err := httpsfv.Marshal(policies); err == nil {
		h.Set("RateLimit-Policy", field)
	}
	if field, err := httpsfv.Marshal(limits); err == nil {
		h.Set("RateLimit", field)
	}
	units, _ := quota(tightest)
	h.Set("X-RateLimit-Limit", strconv.FormatInt(units, 10))
	h.Set("X-RateLimit-Remaining", strconv.FormatInt(tightest.Remaining, 10))
	reset := d.At.Add(resetsIn(d, tightest)).UnixMicro()
	h.Set("X-RateLimit-Reset", strconv.FormatInt((reset+999_999)/1_000_000, 10))
}

// quota is how many units a window has at the most, and in how many seconds; 0 is unknown. A burst
// above the limit is a quota of the time in which it drains: more can be left than the limit.
func quota(w throttle.WindowState) (units, seconds int64) {
	if w.Burst <= w.Limit {
		return w.Limit, wholeSeconds(w.Period)
	}
	drains := w.Period.Seconds() * float64(w.Burst) / float64(w.Limit)
	return w.Burst, int64(math.Ceil(min(drains, 1e12)))
}

// tighter reports whether a window tells the client more than another: it denied for longer, or less
// of it is left.
func tighter(a, b throttle.WindowState) bool {
	if a.Denied || b.Denied {
		return a.RetryIn > b.RetryIn
	}
	return float64(a.Remaining)/float64(a.Burst) < float64(b.Remaining)/float64(b.Burst)
}

// resetsIn is for how long no more than what remains is sure: until there is room, after a denial.
func resetsIn(d throttle.Decision, w throttle.WindowState) time.Duration {
	if w.Denied {
		return w.RetryIn
	}
	return max(0, w.ResetsAt.Sub(d.At))
}

func wholeSeconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

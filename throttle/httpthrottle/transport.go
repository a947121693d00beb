// Package httpthrottle puts the limits of package throttle around the calls that a program makes by net/http.
//
// A [Transport] reserves for every call. From the responses it learns of refusals, and of how much
// the upstream has left. In a job, whose context carries a [throttle.Caller], a call that does not
// fit returns a *[throttle.DeniedError]. A handler that returns this error has its job requeued:
//
//	transport, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{
//		Limiter: limiter,
//		Policy:  "github-api",
//	})
//	client := &http.Client{Transport: transport}
//	response, err := client.Do(request.WithContext(ctx)) // ctx is the handler's
//
// To follow a call through the code, read [Transport.RoundTrip] here, then body.go and learn.go.
package httpthrottle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// cleanUpTimeout bounds calls to Redis that are made even if the request's context has ended.
const cleanUpTimeout = 5 * time.Second

// TransportConfig configures a Transport. Its functions are called by many goroutines at once.
type TransportConfig struct {
	// Base makes the calls. The default is http.DefaultTransport. A call that found no connection
	// costs nothing if Base reports connections to net/http/httptrace, as *http.Transport does.
	Base http.RoundTripper

	// LearnOnly reserves nothing: for calls of jobs that took their cost when they began. Refusals still pause the
	// policy. Remaining units are learnt if the Caller's Decision has the policy, tenant and attributes of the call.
	LearnOnly bool

	// Limiter decides. It is required.
	Limiter *throttle.Limiter

	// Logger gets a record of each release, cancellation, refusal and remainder that could not be stored in Redis.
	// The default is slog.Default().
	Logger *slog.Logger

	// MaxWait is the longest time that a call waits for its turn, unless Request sets one. The default, 0, does not
	// wait, which is right in a job: its worker has other jobs to run. For more, see throttle.Limiter.Wait.
	MaxWait time.Duration

	// PassUnidentified lets calls that have no policy through, uncounted. By default they fail with
	// an *UnidentifiedError.
	PassUnidentified bool

	// Pause is how long the policy pauses after a refusal that does not say how long. The default, 0,
	// leaves it to the policy: see throttle.Reservation.Pause.
	Pause time.Duration

	// Policy guards the calls, unless Request names another. The default is the policy of the
	// context's throttle.Caller.
	Policy string

	// Refusal reports whether a response refuses the call for now, and for how long, 0 for unknown. It must not
	// read the body. The default knows 429; 503 with Retry-After; and 403 with Retry-After, or with nothing
	// remaining of a unit. Without Retry-After, 429 and 403 last until the longest reset of such units.
	Refusal func(*http.Response) (retryIn time.Duration, refused bool)

	// Request returns what to reserve for a call, and false if that is unknown. The default is the request of
	// the context's throttle.Caller, without its cost if the call's policy is not the job's own.
	Request func(*http.Request) (r throttle.Request, ok bool)
}

// An UnidentifiedError says that a call was not made, because no policy is known for it.
type UnidentifiedError struct {
	Method string
	Host   string
}

func (e *UnidentifiedError) Error() string {
	return fmt.Sprintf("httpthrottle: %s %s: no policy is known for this call: set TransportConfig.Policy, "+
		"make the call with the context of a job, or have TransportConfig.Request return a policy and true", e.Method, e.Host)
}

// A CountedError says that a call was not made, because its job has taken the policy's cost
// already. The call would count twice, and a job that is requeued for it might never end.
type CountedError struct{ Policy string }

func (e *CountedError) Error() string {
	return fmt.Sprintf("httpthrottle: policy %q counted the job when it began: set TransportConfig.LearnOnly, "+
		"or cancel the job's reservation to count each call", e.Policy)
}

// A Transport is an http.RoundTripper that makes calls when they fit. It is safe for concurrent use.
type Transport struct {
	c       TransportConfig
	learner learner
}

// NewTransport returns a transport. An error names the field of the config that cannot be used.
func NewTransport(c TransportConfig) (*Transport, error) {
	if c.Limiter == nil {
		return nil, errors.New("httpthrottle: TransportConfig.Limiter is nil: must be what throttle.New returns")
	}
	if _, ok := c.Limiter.Lookup(c.Policy); c.Policy != "" && !ok {
		return nil, fmt.Errorf("httpthrottle: TransportConfig.Policy %q: must be a policy of the limiter", c.Policy)
	}
	if c.MaxWait < 0 {
		return nil, fmt.Errorf("httpthrottle: TransportConfig.MaxWait %v: must not be below 0", c.MaxWait)
	}
	if c.Pause < 0 || c.Pause > throttle.MaxPeriod {
		return nil, fmt.Errorf("httpthrottle: TransportConfig.Pause %v: must be 0 to %v", c.Pause, throttle.MaxPeriod)
	}
	if c.Base == nil {
		c.Base = http.DefaultTransport
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Refusal == nil {
		c.Refusal = refusal
	}
	return &Transport{c, learner{logger: c.Logger, reported: map[string]gap{}}}, nil
}

// RoundTrip makes the call if it fits, and never repeats it. Each call of a chain of redirects
// counts. A refusal is a response like any other, and the job's worker learns of it too.
//
// Slots in Concurrency windows are held until the response's body is read to its end or closed, or the context ends.
// After a protocol switch they are held until the connection is closed, which also happens when the context ends.
// A call that loses its slot earlier ends with throttle.ErrLeaseLost.
//
// After an *UnidentifiedError, a *CountedError or an error of throttle.Limiter.Wait, such as a
// *throttle.DeniedError, or if the context ended before, the call was not made. Other errors are Base's.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	caller := throttle.CallerFrom(req.Context())
	r, ok := t.identify(req, caller)
	switch {
	case !ok && t.c.PassUnidentified:
		return t.c.Base.RoundTrip(req)
	case !ok:
		return unmade(req, &UnidentifiedError{req.Method, req.URL.Host})
	case t.c.LearnOnly:
		sentAt, d := time.Now(), t.decisionOf(caller, r)
		resp, err := t.c.Base.RoundTrip(req)
		if resp != nil && err == nil {
			t.learn(req.Context(), resp, caller, d, sentAt)
		}
		return resp, err
	case caller.Counted(r.Policy):
		return unmade(req, &CountedError{r.Policy})
	}
	d, err := t.c.Limiter.Wait(req.Context(), r)
	if err != nil {
		return unmade(req, err)
	}
	return t.call(req, caller, d)
}

func (t *Transport) identify(req *http.Request, caller *throttle.Caller) (r throttle.Request, ok bool) {
	if t.c.Request != nil {
		if r, ok = t.c.Request(req); !ok {
			return r, false
		}
		r.Policy = cmp.Or(r.Policy, t.c.Policy, caller.Request.Policy)
	} else {
		r = caller.Request
		// These are the job's, not the call's. Its ticket is for the line of its own policy.
		r.MaxHold, r.MaxWait, r.Ticket, r.Key, r.Front = 0, 0, throttle.Ticket{}, "", false
		if t.c.Policy != "" && t.c.Policy != r.Policy {
			if r.Policy != "" {
				r.Cost = nil // in units of the job's policy
			}
			r.Policy = t.c.Policy
		}
	}
	if deadline, ok := req.Context().Deadline(); ok && r.MaxHold == 0 {
		r.MaxHold = max(0, time.Until(deadline))
	}
	r.MaxWait = cmp.Or(r.MaxWait, t.c.MaxWait, -1)
	return r, r.Policy != ""
}

// decisionOf returns the decision that stands for a call that reserves nothing: the job's, if it is of the same
// policy, tenant and attributes, or else a decision that has only the request.
func (t *Transport) decisionOf(caller *throttle.Caller, r throttle.Request) throttle.Decision {
	d := throttle.Decision{Policy: r.Policy, Reservation: throttle.Reservation{Request: r}}
	job := caller.Decision
	isGranted := job.Reservation.ID != ""
	isAlike := job.Policy == r.Policy && job.Tenant == r.Tenant && hasAttributes(r, job.Reservation.Attributes)
	if isGranted && isAlike {
		d = job
		if time.Since(d.At) > freshFor {
			d.Reservation.At = time.Time{} // the upstream has counted what was granted since
		}
	}
	d.Reservation = t.c.Limiter.Attach(d.Reservation)
	return d
}

// hasAttributes reports whether a request has the attributes of a grant. A taken ticket has only attributes of scopes.
func hasAttributes(r throttle.Request, granted map[string]string) bool {
	for name, value := range granted {
		if name != throttle.TenantAttribute && r.Attributes[name] != value {
			return false
		}
	}
	return true
}

func (t *Transport) call(req *http.Request, caller *throttle.Caller, d throttle.Decision) (*http.Response, error) {
	reqCtx := req.Context()
	if reqCtx.Err() != nil {
		t.cancel(reqCtx, d.Reservation)
		return unmade(req, fmt.Errorf("httpthrottle: %w", context.Cause(reqCtx)))
	}
	holdCtx, held, end := t.hold(reqCtx, d)
	reading := false // the caller reads the body: untilRead calls end
	defer func() {
		if !reading { // even if Base or Refusal panics
			end()
		}
	}()
	var sought, connected atomic.Bool
	trace := &httptrace.ClientTrace{
		GetConn: func(string) { sought.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { connected.Store(true) }, // from here on the upstream may see the call
	}
	sentAt := time.Now()
	resp, err := t.c.Base.RoundTrip(req.WithContext(httptrace.WithClientTrace(holdCtx, trace)))
	if resp == nil || err != nil {
		_, isTransport := t.c.Base.(*http.Transport) // it may fail before it looks for a connection
		if reports := isTransport || sought.Load(); reports && !connected.Load() {
			t.cancel(reqCtx, d.Reservation)
		}
		return nil, lost(holdCtx, err) // if both are nil, http.Client makes an error
	}
	t.learn(reqCtx, resp, caller, d, sentAt)
	if held {
		reading = true
		untilRead(reqCtx, holdCtx, resp, end)
	}
	return resp, nil
}

// hold holds the slots of a grant, if it has any, until `end` is called. Its context also ends when a slot is lost.
func (t *Transport) hold(reqCtx context.Context, d throttle.Decision) (holdCtx context.Context, held bool, end func()) {
	work, drop := reqCtx, func() {}
	held = d.Reservation.Lease() > 0 // by the policy as it is before the call
	if held {
		work, drop = context.WithCancel(reqCtx) // else, after a Cancel, the hold's context lived as long as reqCtx
	}
	var released atomic.Bool
	end = func() { // called again at Close, if the release failed at the body's end
		drop()
		if released.Load() {
			return
		}
		err := d.Reservation.Release(reqCtx)
		released.Store(err == nil)
		if err != nil {
			t.c.Logger.Warn("httpthrottle: a concurrency window's slot was not released, and runs out",
				"policy", d.Policy, "error", err)
		}
	}
	return d.Reservation.Hold(work), held, end
}

// cancel cancels the reservation of a call that was not made.
func (t *Transport) cancel(ctx context.Context, r throttle.Reservation) {
	detached(ctx, func(ctx context.Context) {
		if _, err := r.Cancel(ctx); err != nil {
			t.c.Logger.Warn("httpthrottle: the reservation of a call that was not made was not cancelled, and counts",
				"policy", r.Policy, "error", err)
		}
	})
}

func detached(ctx context.Context, do func(context.Context)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	do(ctx)
}

// unmade returns the error of a call that was not made. A RoundTripper has to close the request's body even then.
func unmade(req *http.Request, err error) (*http.Response, error) {
	if req.Body != nil {
		req.Body.Close()
	}
	return nil, err
}

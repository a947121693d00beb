// Package httpthrottle puts the limits of package throttle around net/http: around the calls that a
// program makes ([Transport]), and in front of the requests that it serves ([NewMiddleware]).
//
// A Transport reserves for every call, and learns from the answers what the upstream knows better.
// In a job, whose context carries a [throttle.Job], a call that does not fit returns a
// *[throttle.DeniedError], by which the job is requeued:
//
//	transport, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{Limiter: limiter, Policy: "github-api"})
//	client := &http.Client{Transport: transport}
//	response, err := client.Do(request.WithContext(ctx)) // ctx is the handler's
//
// To follow a call through the code, read [Transport.RoundTrip] here, then body.go and learn.go.
package httpthrottle

import (
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

// afterwards bounds each call of the limiter that has to be made also when the request's context has
// ended: releasing, cancelling, and passing on what the upstream said.
const afterwards = 5 * time.Second

// TransportConfig is how calls are throttled. Its functions are called by many goroutines at once.
type TransportConfig struct {
	// Base makes the calls. The default is http.DefaultTransport. That a call was never made, and
	// costs nothing, is known only of transports that tell of it as *http.Transport does.
	Base http.RoundTripper

	// LearnOnly reserves nothing, for calls of jobs that were counted when they began: what the
	// far side says of a refusal is passed on all the same.
	LearnOnly bool

	// Limiter decides. It is required.
	Limiter *throttle.Limiter

	// Logger is told when a refusal begins a pause, and when what has to be said after a call cannot
	// be: a release, a pause. The default is slog.Default().
	Logger *slog.Logger

	// MaxWait is for how long a call waits for its turn, at the most. The default, 0, is not at
	// all, which is right in a job: its worker has other jobs to do. A call that is known not to
	// fit within MaxWait, or the deadline of its context, is denied at once; so is one that a job
	// must not wait for: see throttle.Limiter.WaitUpTo.
	MaxWait time.Duration

	// PassUnidentified lets calls through, uncounted, of which nobody tells the policy. By default
	// they fail with an *UnidentifiedError.
	PassUnidentified bool

	// Pause is how long nothing is granted after a refusal that does not say how long. The default, 0,
	// leaves it to the policy: see throttle.Reservation.Pause. The policy's MaxPause bounds it, and
	// what the upstream says.
	Pause time.Duration

	// Policy is the policy of all calls, unless Request names another. The default is that of the
	// context's throttle.Job.
	Policy string

	// Refusal tells whether an answer is a refusal to serve for now, and for how long; 0 is
	// unknown. It must not read the body. The default knows 429; 503 with Retry-After; and 403
	// with Retry-After or with 0 of X-RateLimit-Remaining.
	Refusal func(*http.Response) (retryIn time.Duration, refused bool)

	// Request tells whose a call is, what it costs, and by which ticket it may stand in line; false
	// is unknown. The default is what the context's throttle.Job says, where a Policy other than
	// the job's own means the default cost.
	Request func(*http.Request) (r throttle.Request, ok bool)
}

// An UnidentifiedError says that a call was not made because nobody tells which policy guards it.
type UnidentifiedError struct {
	Method string
	Host   string
}

func (e *UnidentifiedError) Error() string {
	return fmt.Sprintf("httpthrottle: %s %s: no policy is known for this call: set TransportConfig.Policy, "+
		"or make it with the context of a job", e.Method, e.Host)
}

// A CountedError says that a call was not made because its job has taken the policy's cost already. The
// call would be counted twice, and a job that is requeued for its denial might come back for ever.
type CountedError struct {
	Policy string
}

func (e *CountedError) Error() string {
	return fmt.Sprintf("httpthrottle: policy %q has counted the job when it began: set TransportConfig.LearnOnly, "+
		"or cancel the job's reservation to count each call", e.Policy)
}

// A Transport is an http.RoundTripper that makes a call when it fits. It is safe for concurrent use.
type Transport struct {
	c       TransportConfig
	learner learner
}

// NewTransport returns a transport, or an error that names the field of the config which cannot be
// used.
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
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Refusal == nil {
		c.Refusal = refusal
	}
	return &Transport{c, learner{logger: c.Logger, drifts: map[string]drift{}}}, nil
}

// RoundTrip makes the call if it fits, and never repeats one. Each call of a chain of redirects
// counts.
//
// Errors besides those of the base are *throttle.DeniedError if it does not fit now,
// *UnidentifiedError, *CountedError, and those of Limiter.WaitUpTo; then the call was not made.
// throttle.ErrLeaseLost ends a call that lost its slot in a Concurrency window. http.Client wraps all of them in *url.Error;
// errors.As and errors.Is see through it.
//
// What Concurrency windows hold is renewed until the answer's body is closed or read to its end, or
// the context ends, and then released.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	job := throttle.JobFrom(req.Context())
	r, ok := t.identify(req, job)
	switch {
	case !ok && t.c.PassUnidentified:
		return t.c.Base.RoundTrip(req)
	case !ok:
		closeBody(req)
		return nil, &UnidentifiedError{req.Method, req.URL.Host}
	case t.c.LearnOnly:
		resp, err := t.c.Base.RoundTrip(req)
		if err == nil {
			t.learn(req.Context(), resp, job, throttle.Decision{Policy: r.Policy, Reservation: t.c.Limiter.Attach(throttle.Reservation{Request: r})})
		}
		return resp, err
	}
	if job != nil && job.Counted(r.Policy) {
		closeBody(req)
		return nil, &CountedError{r.Policy}
	}
	d, err := t.c.Limiter.WaitUpTo(req.Context(), r, t.c.MaxWait)
	if err != nil {
		closeBody(req)
		return nil, err
	}
	return t.call(req, job, d)
}

// identify tells whose the call is.
func (t *Transport) identify(req *http.Request, job *throttle.Job) (throttle.Request, bool) {
	var r throttle.Request
	switch {
	case t.c.Request != nil:
		var ok bool
		if r, ok = t.c.Request(req); !ok {
			return r, false
		}
		if r.Policy == "" {
			r.Policy = t.c.Policy
		}
	case job != nil:
		r = job.Request
		// Of the job, not of this call. A job waits in no line but its own policy's.
		r.MaxHold, r.IdempotencyKey, r.Ticket, r.Key, r.Front = 0, "", throttle.TicketID{}, "", false
		if t.c.Policy != "" && t.c.Policy != r.Policy {
			if r.Policy != "" {
				r.Cost = nil // in units of the job's policy
			}
			r.Policy = t.c.Policy
		}
	default:
		r.Policy = t.c.Policy
	}
	if deadline, ok := req.Context().Deadline(); ok && r.MaxHold == 0 {
		r.MaxHold = max(0, time.Until(deadline))
	}
	return r, r.Policy != ""
}

// call makes a call that was granted.
func (t *Transport) call(req *http.Request, job *throttle.Job, d throttle.Decision) (*http.Response, error) {
	outer := req.Context()
	if outer.Err() != nil {
		afterward(outer, func(ctx context.Context) {
			t.giveBack(ctx, d.Policy, func(ctx context.Context) error { _, err := d.Reservation.Cancel(ctx); return err })
		})
		closeBody(req)
		return nil, fmt.Errorf("httpthrottle: %w", context.Cause(outer))
	}
	ctx, hold := d.Reservation.Hold(outer)
	end := func() { release(outer, hold, t.c.Logger) }

	var sought, sent atomic.Bool
	trace := &httptrace.ClientTrace{
		GetConn: func(string) { sought.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { sent.Store(true) }, // from here on something may leave
	}
	resp, err := t.c.Base.RoundTrip(req.WithContext(httptrace.WithClientTrace(ctx, trace)))
	if err != nil {
		if sought.Load() && !sent.Load() {
			afterward(outer, func(ctx context.Context) { t.giveBack(ctx, d.Policy, hold.Cancel) })
		}
		end()
		return nil, err
	}
	t.learn(outer, resp, job, d)
	if d.Reservation.Lease() > 0 {
		untilRead(outer, resp, end)
	}
	return resp, nil
}

// giveBack undoes a grant by which no call was made.
func (t *Transport) giveBack(ctx context.Context, policy string, cancel func(context.Context) error) {
	if err := cancel(ctx); err != nil {
		t.c.Logger.Warn("httpthrottle: what was reserved for a call that was not made counts", "policy", policy, "error", err)
	}
}

// release gives back what Concurrency windows hold for a call, or for a request that was served.
func release(ctx context.Context, hold *throttle.Hold, logger *slog.Logger) {
	if err := hold.Release(ctx); err != nil {
		logger.Warn("httpthrottle: a concurrency window's slot was not released, and runs out", "policy", hold.Reservation().Policy, "error", err)
	}
}

// afterward runs what must be done although the context may have ended.
func afterward(ctx context.Context, do func(context.Context)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), afterwards)
	defer cancel()
	do(ctx)
}

// closeBody is a RoundTripper's duty, also when it makes no call.
func closeBody(req *http.Request) {
	if req.Body != nil {
		req.Body.Close()
	}
}

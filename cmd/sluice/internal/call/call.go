// Package call makes the HTTP calls of jobs.
package call

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
)

// Config configures a Caller.
type Config struct {
	Concurrency int               // for so many calls to one host a connection is kept open
	Headers     []jobs.Header     // of all calls; a job's own of the same name go first
	Keep        int               // bytes of an answer's body that are kept, up to MaxKeptBody
	Limiter     *throttle.Limiter // learns what the answers say of limits; nil does not
	Logger      *slog.Logger      // of what it learns; nil is slog.Default()
	Timeout     time.Duration     // of a call, the body included
}

// A Caller makes the HTTP calls. It does not follow redirects: they are answers.
type Caller struct {
	Client *http.Client

	config Config
}

// New returns a caller.
func New(c Config) (*Caller, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns = 0
	transport.MaxIdleConnsPerHost = c.Concurrency
	caller := &Caller{config: c, Client: &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       c.Timeout,
		Transport:     transport,
	}}
	if c.Limiter == nil {
		return caller, nil
	}
	learns, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{
		Base: transport, LearnOnly: true, Limiter: c.Limiter, Logger: c.Logger, PassUnidentified: true,
	})
	caller.Client.Transport = learns
	return caller, err
}

// An Error says why a call failed, and whether it is worth another try.
type Error struct {
	RetryAfter time.Duration // the least time until the next try; 0 if the upstream did not say
	Retryable  bool
	Text       string
}

func (e *Error) Error() string { return e.Text }

// Call makes the job's call. It returns the HTTP code, and what is kept of the answer. Every error is
// an *Error, unless ctx ended before the answer.
func (c *Caller) Call(ctx context.Context, job jobs.Job) (int, jobs.Answer, error) {
	req, err := c.request(ctx, job)
	if err != nil {
		return 0, jobs.Answer{}, &Error{Text: err.Error()}
	}
	var kept jobs.Answer
	res, err := c.Client.Do(req)
	if err == nil {
		defer res.Body.Close()
		kept, err = keep(res, c.config.Keep)
	}
	if err != nil {
		if ctx.Err() != nil {
			return 0, jobs.Answer{}, context.Cause(ctx)
		}
		return 0, kept, &Error{Retryable: true, Text: err.Error()}
	}
	return res.StatusCode, kept, failure(res)
}

func (c *Caller) request(ctx context.Context, job jobs.Job) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, job.Method, job.URL, strings.NewReader(job.Body))
	if err != nil {
		return nil, err
	}
	if job.BodyJSON {
		req.Header.Set("Content-Type", "application/json")
	}
	for _, h := range c.config.Headers {
		req.Header.Set(h.Name, h.Value)
	}
	for name, value := range job.Headers {
		req.Header.Set(name, value)
	}
	req.Host = cmp.Or(req.Header.Get("Host"), req.Host) // net/http ignores the header
	return req, nil
}

// failure is nil if the code counts as success.
func failure(res *http.Response) error {
	code := res.StatusCode
	if code >= 200 && code < 400 {
		return nil
	}
	e := &Error{
		Retryable: code == http.StatusRequestTimeout || code == http.StatusTooEarly ||
			code == http.StatusTooManyRequests || code >= 500,
		Text: strings.TrimSpace(fmt.Sprintf("%d %s", code, http.StatusText(code))),
	}
	e.RetryAfter, _ = httpthrottle.RetryAfter(res)
	return e
}

// RetryDelay returns how long a job waits for its next try: 1 s, 2 s, 4 s and so on to a minute, with up
// to half more, so that jobs that failed together do not come back together. It is no less than the
// upstream asked for.
func RetryDelay(retried int, e *Error) time.Duration {
	delay := min(time.Second<<min(retried, 6), time.Minute)
	return max(delay+rand.N(delay/2), e.RetryAfter)
}

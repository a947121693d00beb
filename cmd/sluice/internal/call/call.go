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
	Concurrency int               // the number of idle connections that stay open to a host
	Headers     []jobs.Header     // of all calls; a job's header of the same name replaces one
	Keep        int               // bytes of an answer's body that are kept, up to MaxKeptBody
	Limiter     *throttle.Limiter // learns from the answers' limits and refusals
	Logger      *slog.Logger      // for what the limiter learns; nil is slog.Default()
	Timeout     time.Duration     // of a call, the body included
}

// A Caller makes the HTTP calls. It takes a redirect for an answer, and does not follow it.
type Caller struct {
	Client *http.Client

	config Config
}

func New(c Config) (*Caller, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns = 0 // no bound
	transport.MaxIdleConnsPerHost = c.Concurrency
	learning, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{
		Base: transport, LearnOnly: true, Limiter: c.Limiter, Logger: c.Logger, PassUnidentified: true,
	})
	return &Caller{config: c, Client: &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       c.Timeout,
		Transport:     learning,
	}}, err
}

// An Error describes why a call failed, and whether it is worth another try.
type Error struct {
	RetryAfter time.Duration // for how long the upstream wants no other try; 0 if it did not say
	Retryable  bool
	Text       string
}

func (e *Error) Error() string { return e.Text }

// Call makes the job's call. It returns the HTTP code, and the part of the answer to keep. An error is an *Error,
// unless ctx ended before the answer.
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
	req.Host = cmp.Or(req.Header.Get("Host"), req.Host) // net/http sends this one, not the header
	return req, nil
}

// failure returns an *Error unless the answer counts as success.
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

// RetryDelay returns the time until a job's next try: 1 s, 2 s, 4 s and so on up to a minute, each with up to half of
// it added at random, so that jobs that failed together do not come back together. It is at least e.RetryAfter.
func RetryDelay(retried int, e *Error) time.Duration {
	delay := min(time.Second<<min(retried, 6), time.Minute)
	return max(delay+rand.N(delay/2), e.RetryAfter)
}

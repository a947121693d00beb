// Package call makes the HTTP calls of jobs.
package call

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
)

// A Caller makes the HTTP calls. It does not follow redirects: they are answers.
type Caller struct {
	Client *http.Client
}

// New returns a caller whose calls take at most the timeout each, the body included, and
// that keeps a connection open for each of the concurrent calls to one host.
func New(timeout time.Duration, concurrency int) *Caller {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns = 0
	transport.MaxIdleConnsPerHost = concurrency
	return &Caller{&http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       timeout,
		Transport:     transport,
	}}
}

// A Error says why a call failed, and whether it is worth another try.
type Error struct {
	Refused    bool          // by an upstream that has too much to do, and says for how long
	RetryAfter time.Duration // the upstream's word, a floor for the next try
	Retryable  bool
	Text       string
}

func (e *Error) Error() string { return e.Text }

// bodyMost bounds how much of an answer is read, so that its connection can be used again.
const bodyMost = 1 << 20

// Call makes the job's call and returns the HTTP code. Every error is a *Error, unless ctx
// ended before the answer.
func (c *Caller) Call(ctx context.Context, job jobs.Job) (int, error) {
	req, err := http.NewRequestWithContext(ctx, job.Method, job.URL, strings.NewReader(job.Body))
	if err != nil {
		return 0, &Error{Text: err.Error()}
	}
	for name, value := range job.Headers {
		req.Header.Set(name, value)
	}
	req.Host = cmp.Or(req.Header.Get("Host"), req.Host) // net/http ignores the header
	res, err := c.Client.Do(req)
	if err == nil {
		defer res.Body.Close()
		_, err = io.CopyN(io.Discard, res.Body, bodyMost)
	}
	if err != nil && err != io.EOF {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		return 0, &Error{Retryable: true, Text: err.Error()}
	}
	return res.StatusCode, statusError(res)
}

// statusError is nil for 2xx and 3xx.
func statusError(res *http.Response) error {
	e := &Error{Text: strings.TrimSpace(fmt.Sprintf("%d %s", res.StatusCode, http.StatusText(res.StatusCode)))}
	switch res.StatusCode {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		e.Retryable = true
	default:
		if res.StatusCode < 400 {
			return nil
		}
		e.Retryable = res.StatusCode >= 500
	}
	e.RetryAfter = retryAfter(res.Header.Get("Retry-After"), time.Now())
	e.Refused = e.RetryAfter > 0 && (res.StatusCode == http.StatusTooManyRequests || res.StatusCode == http.StatusServiceUnavailable)
	return e
}

// retryAfter reads seconds or a date (RFC 9110, 10.2.3); what is neither means nothing.
func retryAfter(header string, now time.Time) time.Duration {
	const most = 366 * 24 * time.Hour
	if seconds, err := strconv.ParseUint(header, 10, 32); err == nil {
		return min(time.Duration(seconds)*time.Second, most)
	}
	if at, err := http.ParseTime(header); err == nil {
		return min(max(at.Sub(now), 0), most)
	}
	return 0
}

// RetryDelay is how long a failed job waits for its next try: 1 s, 2 s, 4 s and so on to a
// minute, with up to half more so that jobs which failed together do not come back together,
// and no less than the upstream asked for.
func RetryDelay(retried int, err error, _ *asynq.Task) time.Duration {
	if errors.Is(err, asynq.ErrLeaseExpired) {
		return 0 // it has waited for its lease
	}
	delay := min(time.Second<<min(retried, 6), time.Minute)
	delay += rand.N(delay / 2)
	var call *Error
	if errors.As(err, &call) && call.RetryAfter > 0 {
		delay = max(delay, call.RetryAfter+time.Second) // asynq keeps whole seconds, rounded down
	}
	return delay
}

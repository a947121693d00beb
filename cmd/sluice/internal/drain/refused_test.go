package drain

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// An apiFunc is a base that answers calls inside the process, after 20 ms.
type apiFunc func(r *http.Request) (status int, retryAfter string)

func (a apiFunc) RoundTrip(r *http.Request) (*http.Response, error) {
	status, retryAfter := a(r)
	time.Sleep(20 * time.Millisecond)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	h := http.Header{}
	if retryAfter != "" {
		h.Set("Retry-After", retryAfter)
	}
	return &http.Response{StatusCode: status, Body: http.NoBody, Header: h, Request: r}, nil
}

// drained drains so many jobs of two tenants in a bubble, until the context ends. They have no retries.
func drained(ctx context.Context, t *testing.T, m throttletest.Memory, p throttle.Policy, n, retries int, a apiFunc) (Summary, []jobs.Result) {
	t.Helper()
	client := m.Client(t)
	limiter := expect.Got(throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}}))(t)
	var list []jobs.Job
	for i := range n {
		list = append(list, jobs.Job{
			ID: fmt.Sprint(i), Tenant: fmt.Sprint("t", i%2), Type: "x",
			Method: "GET", URL: fmt.Sprint("http://x/", i), MaxRetry: retries,
		})
	}
	progress := NewProgress(io.Discard, time.Minute)
	caller := expect.Got(call.New(call.Config{Concurrency: 1, Limiter: limiter, Logger: progress.Logger(), Timeout: time.Minute}))(t)
	caller.Client.Transport = expect.Got(httpthrottle.NewTransport(httpthrottle.TransportConfig{
		Base: a, LearnOnly: true, Limiter: limiter, Logger: progress.Logger(),
	}))(t)
	var out bytes.Buffer
	d := &Drain{
		Caller: caller, Client: client, Concurrency: 8, Jobs: list, Limiter: limiter, Progress: progress,
		Name: "q", Results: jobs.NewLog(&out),
	}
	s, err := d.Run(ctx)
	expect.That(t, err == nil || ctx.Err() != nil, err)
	var results []jobs.Result
	for decoder := json.NewDecoder(&out); decoder.More(); {
		var r jobs.Result
		expect.Must(t, decoder.Decode(&r))
		results = append(results, r)
	}
	return s, results
}

func publishedPolicy(windows ...throttle.Window) throttle.Policy {
	return throttle.Policy{Name: "p", Match: []string{"*"}, Windows: windows}
}

// A job that is refused for ever fails where its policy says so.
func TestAJobThatIsRefusedForEverFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := publishedPolicy(throttle.Window{Name: "all", Limit: 20, Period: time.Second})
		p.MaxRefusedWait = 2500 * time.Millisecond
		var once atomic.Int64
		once.Store(http.StatusForbidden)
		s, results := drained(t.Context(), t, throttletest.InMemory(t), p, 2, 0, func(r *http.Request) (int, string) {
			if r.URL.Path == "/1" { // refused once, as GitHub does that
				return int(once.Swap(http.StatusOK)), "1"
			}
			return http.StatusTooManyRequests, "1"
		})
		expect.Require(t, s.Succeeded == 1 && s.Failed == 1, s)
		for _, r := range results {
			reason := strings.HasPrefix(r.Error, `worker: policy "p", tenant "t0": given up by max_refused_wait 2.5s: refused since `) &&
				strings.HasSuffix(r.Error, "Z: 429 Too Many Requests")
			expect.That(t, r.ID != "0" || r.Attempts == 3 && r.Status == 429 && reason, r)
		}
	})
}

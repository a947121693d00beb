package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A handlerTransport carries calls to an API without a network.
type handlerTransport struct{ http.Handler }

func (w handlerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	answer := httptest.NewRecorder()
	w.ServeHTTP(answer, r)
	return answer.Result(), nil
}

// A demoOutput is written by the demo and its loggers.
type demoOutput struct {
	mu sync.Mutex
	strings.Builder
}

func (o *demoOutput) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.Builder.Write(p)
}

// runDemo runs the demo on the bubble's clock, and returns what it says, without its padding.
func runDemo(t *testing.T, ctx context.Context) (*demo, string) {
	t.Helper()
	var out demoOutput
	api := newAPI()
	d := &demo{api: api, client: &http.Client{Transport: handlerTransport{api}}, out: &out, redis: throttletest.InMemory(t), url: "http://api"}
	err := d.run(ctx)
	expect.Require(t, err == nil, err, out.String())
	return d, strings.Join(strings.Fields(out.String()), " ")
}

func TestTheDemoTellsItsStory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, printed := runDemo(t, t.Context())
		for _, text := range []string{
			`78 jobs of 4 tenants, for an API that allows 4 calls per 1s of each tenant`,
			`Those of "plain" come from a plain asynq client.`,
			`After 2s the API grants half of its last limit, for 5s, without notice.`, `2 s: \d+ of 78 jobs done`,
			`All 78 jobs are done, in 2\d s.`, `large 40 \d+\.\d s 2\d\.\d s \d`,
			`4 calls per 1s of each tenant [34] 14 calls per 7s of each tenant 14 8 calls per 1s of all tenants together 8`,
			`6 jobs of the plain client were denied when a worker picked them up.`,
			`it refused [1-8] calls\..* The jobs have used 0 retries\.`,
		} {
			expect.That(t, regexp.MustCompile(text).MatchString(printed), "it does not tell", text, printed)
		}
		expect.Equal(t, len(d.denied), 6, "jobs were denied, not those of the plain client", d.denied)
	})
}

func TestAnInterruptedDemoEndsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		begun := time.Now()
		if _, printed := runDemo(t, ctx); !strings.Contains(printed, "Interrupted: ") || time.Since(begun) > 10*time.Second {
			t.Errorf("after %v:\n%s", time.Since(begun), printed)
		}
	})
}

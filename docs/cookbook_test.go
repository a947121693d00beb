package docs_test

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batchfile"
)

// The programs of docs/howto/cookbook.md.

func callCRM(ctx context.Context, _ *asynq.Task) error {
	resp, err := http.Get("https://crm.example/contacts")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusTooManyRequests {
		seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		return worker.RetryAfter(time.Duration(seconds) * time.Second) // pauses the policy on every worker
	}
	return nil
}

var _ asynq.HandlerFunc = callCRM

var plans = map[string]int64{"acme": 2}

func planOf(_ context.Context, policy, tenant string) (throttle.Tenant, bool, error) {
	quota, known := plans[tenant]
	if policy != "reports" || !known {
		return throttle.Tenant{}, false, nil // Policy.Tenants applies
	}
	return throttle.Tenant{Windows: map[string]throttle.Override{"quota": {Limit: quota}}}, true, nil
}

func limiterOf(client *redis.Client, policies []throttle.Policy) (*throttle.Limiter, error) {
	limiter, err := throttle.New(throttle.Config{Client: client, Policies: policies, Tenants: planOf})
	return limiter, err
}

func waits(ctx context.Context, limiter *throttle.Limiter) error {
	d, err := limiter.Wait(ctx, throttle.Request{Policy: "crm", Tenant: "acme"})
	if err != nil {
		return err // a *throttle.DeniedError if ctx ends before it fits
	}
	_, err = d.Reservation.Cancel(ctx)
	return err
}

func transportOf(limiter *throttle.Limiter) (http.RoundTripper, error) {
	transport, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{
		Limiter: limiter, Policy: "crm", MaxWait: 10 * time.Second,
		Request: func(*http.Request) (throttle.Request, bool) { return throttle.Request{Tenant: "acme"}, true },
	})
	return transport, err
}

func webhooksOf(limiter *throttle.Limiter, next http.Handler) http.HandlerFunc {
	webhooks := func(w http.ResponseWriter, r *http.Request) {
		sender := map[string]string{"sender": r.PathValue("sender")}
		d, err := limiter.Reserve(r.Context(), throttle.Request{Policy: "webhooks", Attributes: sender})
		switch {
		case err != nil:
			http.Error(w, "cannot be counted", http.StatusServiceUnavailable)
		case !d.Granted:
			w.Header().Set("Retry-After", fmt.Sprint(math.Ceil(d.RetryIn.Seconds())))
			http.Error(w, "too many requests", http.StatusTooManyRequests)
		default:
			next.ServeHTTP(w, r)
		}
	}
	return webhooks
}

// policiesOfCookbook loads all policies of the page, as one file.
func policiesOfCookbook(t *testing.T) []throttle.Policy {
	var all []throttle.Policy
	_, blocks := parts(files(t, "cookbook.md")["docs/howto/cookbook.md"])
	for _, b := range blocks {
		if b.language != "yaml" {
			continue
		}
		policies, _, err := batchfile.Parse("cookbook.md", []byte(b.text))
		expect.That(t, err == nil, err)
		all = append(all, policies...)
	}
	return all
}

func TestTheCookbookWorks(t *testing.T) {
	policies := policiesOfCookbook(t)
	limiter := expect.Got(limiterOf(throttletest.InMemory(t).Client(t), policies))(t)
	ctx := t.Context()
	for i, granted := range []bool{true, true, false} {
		d, err := limiter.Reserve(ctx, throttle.Request{Policy: "reports", Tenant: "acme"})
		expect.That(t, err == nil && d.Granted == granted, "report", i+1, "of a quota of 2: granted", d.Granted, err)
	}
	expect.Must(t, waits(ctx, limiter))

	api := httptest.NewServer(http.NotFoundHandler())
	defer api.Close()
	transport := expect.Got(transportOf(limiter))(t)
	resp := expect.Got((&http.Client{Transport: transport}).Get(api.URL))(t)
	resp.Body.Close()

	served := 0
	webhooks := http.NewServeMux()
	webhooks.Handle("POST /{sender}", webhooksOf(limiter, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served++ })))
	w := httptest.NewRecorder()
	for range 101 {
		w = httptest.NewRecorder()
		webhooks.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/acme", strings.NewReader("{}")))
	}
	retryIn, err := strconv.Atoi(w.Header().Get("Retry-After"))
	expect.That(t, served == 100 && w.Code == http.StatusTooManyRequests && err == nil && retryIn > 50 && retryIn <= 60,
		"of 101 webhooks", served, "were served, and the last", w.Code, "after", retryIn, err)

	cancelled, cancel := context.WithTimeout(ctx, time.Nanosecond)
	defer cancel()
	expect.Err(t, waits(cancelled, limiter), context.DeadlineExceeded, "a wait whose context has ended:")
}

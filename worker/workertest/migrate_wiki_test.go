package workertest_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/workertest"
)

// What asynq's wiki shows for rate limits.

type RateLimitError struct{ RetryIn time.Duration }

func (e *RateLimitError) Error() string { return "rate limited: retry in " + e.RetryIn.String() }

func isFailure(err error) bool {
	var limited *RateLimitError
	return !errors.As(err, &limited)
}

func retryDelay(n int, err error, task *asynq.Task) time.Duration {
	var limited *RateLimitError
	if errors.As(err, &limited) {
		return limited.RetryIn
	}
	return asynq.DefaultRetryDelayFunc(n, err, task)
}

// retryAfter is what replaces all three.
func retryAfter(d time.Duration) error {
	return worker.RetryAfter(d)
}

// A limitedAPI allows five calls in any ten seconds, of which a stranger takes the first two.
type limitedAPI struct {
	mu      sync.Mutex
	calls   []time.Time
	served  []int
	refused int
}

func (a *limitedAPI) call(number int) (ok bool, retryIn time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	a.calls = slices.DeleteFunc(a.calls, func(at time.Time) bool { return now.Sub(at) >= 10*time.Second })
	if len(a.calls) >= 5 {
		a.refused++
		return false, a.calls[0].Add(10 * time.Second).Sub(now)
	}
	a.calls, a.served = append(a.calls, now), append(a.served, number)
	return true, 0
}

// overtaken returns how many tasks ran before one that was enqueued earlier.
func (a *limitedAPI) overtaken() (n int) {
	for i := range a.served {
		if slices.Max(a.served[:i+1]) != a.served[i] {
			n++
		}
	}
	return n
}

// runAgainst runs 20 tasks by a handler that answers a refusal by that error.
func runAgainst(t *testing.T, c asynq.Config, policies []throttle.Policy, refused func(time.Duration) error) *limitedAPI {
	a := &limitedAPI{}
	synctest.Test(t, func(t *testing.T) {
		a.calls = []time.Time{time.Now(), time.Now()}
		w := workertest.Start(t, workertest.Config{
			Asynq: c, Policies: policies, Handler: asynq.HandlerFunc(func(_ context.Context, task *asynq.Task) error {
				time.Sleep(rand.N(10 * time.Millisecond))
				number, err := strconv.Atoi(string(task.Payload()))
				if err != nil {
					return err
				}
				if ok, retryIn := a.call(number); !ok {
					return refused(retryIn)
				}
				return nil
			}),
		})
		for i := range 20 {
			w.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "api:call", []byte(strconv.Itoa(i))))
		}
		w.Drain(time.Hour)
	})
	return a
}

// The wiki's idiom works beside Sluice, but only worker.RetryAfter stops the other tasks too.
func TestTheWikisIdiomAndWhatReplacesIt(t *testing.T) {
	config := asynq.Config{IsFailure: isFailure, RetryDelayFunc: retryDelay, Concurrency: 4, LogLevel: asynq.FatalLevel}
	policies := []throttle.Policy{{
		Name: "api", Match: []string{"api:*"}, Windows: []throttle.Window{{Name: "published", Limit: 5, Period: 10 * time.Second}},
	}}
	old := runAgainst(t, config, nil, func(d time.Duration) error { return &RateLimitError{d} })
	left := runAgainst(t, config, policies, func(d time.Duration) error { return &RateLimitError{d} })
	replaced := runAgainst(t, asynq.Config{Concurrency: 4}, policies, retryAfter)
	for _, c := range []struct {
		name string
		api  *limitedAPI
	}{{"asynq alone", old}, {"the idiom left as it is", left}, {"worker.RetryAfter", replaced}} {
		t.Logf("%s: %d of %d calls refused, %d overtaken", c.name, c.api.refused, c.api.refused+len(c.api.served), c.api.overtaken())
		expect.That(t, len(c.api.served) == 20, c.name, len(c.api.served), "calls were served, want 20")
	}
	expect.That(t, replaced.refused < old.refused,
		"RetryAfter:", replaced.refused, "refusals, the idiom alone", old.refused)
}

package call

import (
	"fmt"
	"testing"
	"time"

	"github.com/hibiken/asynq"
)

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for header, want := range map[string]time.Duration{
		"":                              0,
		"soon":                          0,
		"-1":                            0,
		"0":                             0,
		"7":                             7 * time.Second,
		"4000000000":                    366 * 24 * time.Hour,
		"Fri, 02 Jan 2026 03:05:05 GMT": time.Minute,
		"Fri, 02 Jan 2026 03:03:05 GMT": 0,
	} {
		if got := retryAfter(header, now); got != want {
			t.Errorf("%q: %v, want %v", header, got, want)
		}
	}
}

func TestRetryDelay(t *testing.T) {
	t.Parallel()
	plain := &Error{Retryable: true}
	asked := fmt.Errorf("wrapped: %w", &Error{Retryable: true, RetryAfter: 100 * time.Second})
	for _, c := range []struct {
		retried     int
		err         error
		least, most time.Duration
	}{
		{0, plain, time.Second, 1500 * time.Millisecond},
		{3, plain, 8 * time.Second, 12 * time.Second},
		{1000, plain, time.Minute, 90 * time.Second},
		{0, asked, 101 * time.Second, 101 * time.Second},
		{0, asynq.ErrLeaseExpired, 0, 0},
	} {
		for range 100 {
			if d := RetryDelay(c.retried, c.err, nil); d < c.least || d > c.most {
				t.Errorf("retried %d, %v: %v, want %v to %v", c.retried, c.err, d, c.least, c.most)
			}
		}
	}
}

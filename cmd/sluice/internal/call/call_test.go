package call

import (
	"errors"
	"net/http"
	"testing"
	"time"
)

func TestRetryAfterOfAFailure(t *testing.T) {
	t.Parallel()
	c, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		status     int
		retryAfter string
		wait       time.Duration
	}{{429, "7", 7 * time.Second}, {429, "", 0}, {503, "7", 7 * time.Second}, {500, "7", 7 * time.Second}} {
		res := &http.Response{StatusCode: row.status, Header: http.Header{}}
		if row.retryAfter != "" {
			res.Header.Set("Retry-After", row.retryAfter)
		}
		var e *Error
		if !errors.As(c.failure(res), &e) || e.RetryAfter != row.wait {
			t.Errorf("%d, Retry-After %q: %+v, want to wait for %v", row.status, row.retryAfter, e, row.wait)
		}
	}
}

func TestARetryWaitsAsLongAsTheAPIAsks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		retried            int
		asked, least, most time.Duration
	}{
		{0, 0, time.Second, 1500 * time.Millisecond},
		{3, 0, 8 * time.Second, 12 * time.Second},
		{1000, 0, time.Minute, 90 * time.Second},
		{0, 100 * time.Second, 100 * time.Second, 100 * time.Second},
	} {
		for range 100 {
			if d := RetryDelay(c.retried, &Error{Retryable: true, RetryAfter: c.asked}); d < c.least || d > c.most {
				t.Errorf("retried %d, asked for %v: %v, want %v to %v", c.retried, c.asked, d, c.least, c.most)
			}
		}
	}
}

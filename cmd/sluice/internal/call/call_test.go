package call

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestACodeIsASuccessARetryOrAFailure(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		code       int
		retryAfter string
		want       *Error // nil: success
	}{
		{101, "", &Error{Text: "101 Switching Protocols"}},
		{200, "", nil},
		{304, "", nil},
		{404, "", &Error{Text: "404 Not Found"}},
		{408, "", &Error{Retryable: true, Text: "408 Request Timeout"}},
		{425, "", &Error{Retryable: true, Text: "425 Too Early"}},
		{429, "7", &Error{Retryable: true, RetryAfter: 7 * time.Second, Text: "429 Too Many Requests"}},
		{500, "7", &Error{Retryable: true, RetryAfter: 7 * time.Second, Text: "500 Internal Server Error"}},
		{503, "", &Error{Retryable: true, Text: "503 Service Unavailable"}},
		{599, "", &Error{Retryable: true, Text: "599"}},
	} {
		res := &http.Response{StatusCode: row.code, Header: http.Header{}}
		if row.retryAfter != "" {
			res.Header.Set("Retry-After", row.retryAfter)
		}
		var got *Error
		errors.As(failure(res), &got)
		expect.That(t, (got == nil) == (row.want == nil) && !(got != nil && *got != *row.want),
			row.code, "Retry-After", row.retryAfter, got, "want", row.want)
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
			d := RetryDelay(c.retried, &Error{Retryable: true, RetryAfter: c.asked})
			expect.That(t, d >= c.least && d <= c.most, "retried", c.retried, "asked for", c.asked, d, "want", c.least, "to", c.most)
		}
	}
}

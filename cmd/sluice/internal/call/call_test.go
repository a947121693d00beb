package call

import (
	"errors"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
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

func TestBodiesAreKeptAsAskedFor(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		keep int
		body string
		want jobs.Answer
	}{
		{"nothing", 0, "hello", jobs.Answer{}},
		{"all of a body", 5, "hello", jobs.Answer{Body: "hello"}},
		{"a part", 4, "hello", jobs.Answer{Body: "hell", BodyCut: true}},
		{"no half of a character", 3, "né\u00e9!", jobs.Answer{Body: "né", BodyCut: true}},
		{"no half of a wide one", 4, "n\U0001F600!", jobs.Answer{Body: "n", BodyCut: true}},
		{"no text", 9, "a\xff\xfe", jobs.Answer{BodyBase64: []byte("a\xff\xfe")}},
		{"a part of no text", 3, "\xffaaa", jobs.Answer{BodyBase64: []byte("\xffaa"), BodyCut: true}},
		{"the largest", MaxKeptBody, strings.Repeat("x", MaxKeptBody+1),
			jobs.Answer{Body: strings.Repeat("x", MaxKeptBody), BodyCut: true}},
	} {
		got, err := keep(&http.Response{Body: io.NopCloser(strings.NewReader(c.body))}, c.keep)
		expect.That(t, err == nil && reflect.DeepEqual(got, c.want), c.name, err, "got", got.Body)
	}
}

package limitertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// A denial says each thing once, with any cause.
func TestADenialSaysWhyOnce(t *testing.T) {
	d := throttle.Decision{
		Policy: "api", Tenant: "acme", RetryIn: 1800 * ms, Binds: "burst",
	}
	plain := &throttle.DeniedError{Decision: d}
	task := throttle.Decision{Policy: "api", Tenant: "acme", RetryIn: 2 * s}
	at := time.Date(2026, 1, 2, 14, 0, 0, 0, time.UTC)
	late := &throttle.DeniedError{Cause: context.DeadlineExceeded, Decision: d, Request: throttle.Request{Deadline: at}, StartsAt: at.Add(2 * time.Minute)}
	const reason, later = "throttled: api/burst, tenant acme, 1.8s", "throttled: api, tenant acme, 2s"
	for _, row := range []struct {
		err  error
		want string
	}{
		{plain, reason},
		{&throttle.DeniedError{Decision: task, Cause: io.EOF}, later + ": EOF"},
		{&throttle.DeniedError{Decision: task, Cause: plain}, reason},
		{&throttle.DeniedError{Decision: task, Cause: fmt.Errorf("Get %q: %w", "http://x", plain)}, reason},
		{late, reason + ": would start 2026-01-02T14:02:00Z, deadline 2026-01-02T14:00:00Z"},
		{&throttle.DeniedError{Decision: d, Cause: context.DeadlineExceeded}, reason + ": context deadline exceeded"},
		{&throttle.DeniedError{Decision: task, Cause: errors.New("\xff")}, later + ": \uFFFD"},
	} {
		got := row.err.Error()
		expect.That(t, got == row.want && utf8.ValidString(got), got, "want", row.want)
	}
	wrapped := fmt.Errorf("worker: %w", &throttle.DeniedError{Decision: task, Cause: io.EOF})
	expect.That(t, errors.Is(wrapped, io.EOF) && !errors.Is(wrapped, context.DeadlineExceeded) &&
		errors.Is(fmt.Errorf("worker: %w", late), context.DeadlineExceeded), "an error's kind is lost")
}

package outage

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

var (
	errMissed = fmt.Errorf("%w: %w", throttle.ErrUnavailable, context.DeadlineExceeded)
	errGone   = fmt.Errorf("%w: connection refused", throttle.ErrUnavailable)
)

// logging runs steps of a log in a bubble, and returns the lines logged.
func logging(t *testing.T, service string, steps func(o *Log)) []string {
	t.Helper()
	var text bytes.Buffer
	synctest.Test(t, func(*testing.T) {
		o := &Log{Service: service, Logger: slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{
			ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == slog.TimeKey || a.Key == "err" {
					return slog.Attr{}
				}
				return a
			},
		}))}
		steps(o)
	})
	return strings.Split(strings.TrimSpace(text.String()), "\n")
}

func wantLog(t *testing.T, got []string, want ...string) {
	t.Helper()
	expect.That(t, strings.Join(got, "\n") == strings.Join(want, "\n"),
		"logged", strings.Join(got, "\n"), "want", strings.Join(want, "\n"))
}

// It is logged every minute that an outage lasts, and at its end how long it lasted.
func TestAnOutageIsLoggedWhileItLasts(t *testing.T) {
	wantLog(t, logging(t, "asynq's Redis", func(o *Log) {
		for range 15 {
			o.Failed(errGone, "policy", "api")
			time.Sleep(10 * time.Second)
		}
		o.Answered(0)
		o.Answered(0)
		time.Sleep(10 * time.Second)
		o.Failed(errGone, "policy", "api") // it was not over
		time.Sleep(30 * time.Second)
		o.Answered(0)
		time.Sleep(overAfter)
		o.Answered(0)
		o.Failed(errGone, "policy", "mail")
	}), `level=ERROR msg="worker: asynq's Redis is unavailable" policy=api`,
		`level=ERROR msg="worker: asynq's Redis is still unavailable" for=1m0s failures=7 policy=api`,
		`level=ERROR msg="worker: asynq's Redis is still unavailable" for=2m0s failures=13 policy=api`,
		`level=INFO msg="worker: asynq's Redis is available again" after=3m10s failures=16`,
		`level=ERROR msg="worker: asynq's Redis is unavailable" policy=mail`)
}

// A take that a busy host answers too late is no outage. Takes that miss for two seconds are one.
func TestATakeThatMissesIsNoOutage(t *testing.T) {
	wantLog(t, logging(t, "the limiter", func(o *Log) {
		for range 10 {
			o.Failed(errMissed, "policy", "api")
			time.Sleep(time.Second)
			o.Failed(errMissed, "policy", "api")
			o.Answered(0)
		}
	}), "")
	wantLog(t, logging(t, "the limiter", func(o *Log) {
		for range 4 {
			o.Failed(errMissed, "policy", "api")
			time.Sleep(time.Second)
		}
	}), `level=ERROR msg="worker: the limiter is unavailable" policy=api`)
}

// A clock that was set back is an outage until it has caught up.
func TestAClockThatWasSetBackIsLogged(t *testing.T) {
	wantLog(t, logging(t, "the limiter", func(o *Log) {
		o.Answered(time.Second) // clocks differ
		o.Answered(30*time.Second, "policy", "api")
		time.Sleep(30 * time.Second)
		o.Answered(0)
		time.Sleep(time.Minute)
		o.Answered(0)
	}), `level=ERROR msg="worker: the limiter is unavailable" policy=api`,
		`level=INFO msg="worker: the limiter is available again" after=30s failures=1`)
}

package outage

import (
	"bytes"
	"context"
	"fmt"
	"io"
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

// logging runs a story about a log in a bubble, and returns the lines logged.
func logging(t *testing.T, story func(o *Log)) []string {
	t.Helper()
	var text bytes.Buffer
	synctest.Test(t, func(*testing.T) {
		o := NewLog(slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{
			ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == slog.TimeKey || a.Key == "err" {
					return slog.Attr{}
				}
				return a
			},
		})))
		story(o)
		o.Close()
		time.Sleep(time.Hour)
	})
	return strings.Split(strings.TrimSpace(text.String()), "\n")
}

func wantLog(t *testing.T, got []string, want ...string) {
	t.Helper()
	expect.That(t, strings.Join(got, "\n") == strings.Join(want, "\n"),
		"logged", strings.Join(got, "\n"), "want", strings.Join(want, "\n"))
}

// It is logged every minute that an outage lasts, although nobody asks while asynq's Redis is out too,
// and at its end how long it lasted.
func TestAnOutageIsLoggedWhileItLasts(t *testing.T) {
	wantLog(t, logging(t, func(o *Log) {
		o.Failed(Limiter, errGone, "policy", "api")
		time.Sleep(150 * time.Second)
		o.Decided()
		o.Decided()
		time.Sleep(10 * time.Second)
		o.Failed(Limiter, errGone, "policy", "api") // it was not over
		time.Sleep(30 * time.Second)
		o.Decided()
		time.Sleep(time.Minute)
		o.Decided()
		o.Failed(Limiter, errGone, "policy", "mail")
	}),
		`level=ERROR msg="worker: the limiter is unavailable" policy=api`,
		`level=ERROR msg="worker: the limiter is still unavailable" for=1m0s failures=1 policy=api`,
		`level=ERROR msg="worker: the limiter is still unavailable" for=2m0s failures=1 policy=api`,
		`level=INFO msg="worker: the limiter is available again" after=3m10s failures=2`,
		`level=ERROR msg="worker: the limiter is unavailable" policy=mail`,
	)
}

// asynq's Redis is told apart from the limiter's.
func TestAnOutageOfAsynqsRedisIsLogged(t *testing.T) {
	wantLog(t, logging(t, func(o *Log) {
		o.Failed(Queues, io.EOF)
		time.Sleep(27 * time.Second)
		o.Decided()
		time.Sleep(time.Minute)
	}),
		`level=ERROR msg="worker: asynq's Redis is unavailable"`,
		`level=INFO msg="worker: asynq's Redis is available again" after=27s failures=1`,
	)
}

// A take that a busy host answers too late is no outage. Takes that miss for two seconds are one.
func TestATakeThatMissesIsNoOutage(t *testing.T) {
	wantLog(t, logging(t, func(o *Log) {
		for range 10 {
			o.Failed(Limiter, errMissed, "policy", "api")
			time.Sleep(time.Second)
			o.Failed(Limiter, errMissed, "policy", "api")
			o.Decided()
		}
	}), "")
	wantLog(t, logging(t, func(o *Log) {
		for range 4 {
			o.Failed(Limiter, errMissed, "policy", "api")
			time.Sleep(time.Second)
		}
	}), `level=ERROR msg="worker: the limiter is unavailable" policy=api`)
}

// A log about the line of one shard names the policy, and the line beside it.
func TestALogNamesThePolicyOfAShard(t *testing.T) {
	for line, want := range map[string]string{"api": "[policy api]", "api/2of3": "[policy api line api/2of3]"} {
		expect.Equal(t, fmt.Sprint(OfLine(line)), want, "of the line", line, "it says")
	}
}

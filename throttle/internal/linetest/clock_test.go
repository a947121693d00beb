package linetest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// The clock is set back by 100 s while tickets wait. None is granted until the clock has caught up,
// and then each has its turn.
func TestClockThatStepsBackBesideALine(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(2, 10*s)))
		sc.at(200*s).granted("a1", "a2")
		sc.waits("a3", "a4", "a5", "b1")
		sc.at(210*s).takes("a3", "b1")

		sc.at(110 * s)
		sc.waits("c1")
		for _, back := range []time.Duration{111 * s, 150 * s, 209 * s, 220*s - us} {
			sc.at(back).takes()
			sc.waits("a4", "a5", "c1", "c2")
		}
		sc.at(220*s).takes("c1", "a4") // a had its two already
		sc.at(230*s).takes("c2", "a5")
	})
}

// A ticket that waits for several resets learns the right one, by the calendar and not by the
// length of today. Beyond the ticks that are sent, the pace is the same.
func TestCalendarPromises(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.Quota(1, "0 0 1 * *", "UTC")))
		sc.at(limitertest.Day(t, "2027-01-31T00:00:00Z")).granted("a0")
		for i, want := range []string{"2027-02-01T00:00:00Z", "2027-03-01T00:00:00Z", "2027-04-01T00:00:00Z", "2027-05-01T00:00:00Z"} {
			ticket := []string{"a1", "a2", "a3", "a4"}[i]
			sc.denied(ticket, limitertest.Day(t, want)-limitertest.Day(t, "2027-01-31T00:00:00Z"))
		}
		sc.at(limitertest.Day(t, "2027-02-01T00:00:00Z") - us).takes()
		sc.at(limitertest.Day(t, "2027-02-01T00:00:00Z")).takes("a1")
		sc.at(limitertest.Day(t, "2027-03-01T00:00:00Z")).takes("a2")
	})
}

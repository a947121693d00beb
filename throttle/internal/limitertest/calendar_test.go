package limitertest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// The days on which a time zone's clocks change have 23 and 25 hours, and quotas by the day reset
// at midnight there.
func TestCalendarFollowsItsTimeZone(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ zone, resets, now, reset string }{
		{"", "0 0 * * *", "2027-03-14T12:00:00Z", "2027-03-15T00:00:00Z"},
		{"America/Los_Angeles", "0 0 * * *", "2027-03-13T12:00:00-08:00", "2027-03-14T00:00:00-08:00"},
		{"America/Los_Angeles", "0 0 * * *", "2027-03-14T00:00:00-08:00", "2027-03-15T00:00:00-07:00"}, // 23 hours
		{"America/Los_Angeles", "0 0 * * *", "2027-11-07T00:00:00-07:00", "2027-11-08T00:00:00-08:00"}, // 25 hours
		{"America/Los_Angeles", "0 0 1 * *", "2027-02-28T23:59:59-08:00", "2027-03-01T00:00:00-08:00"},
		{"Asia/Kolkata", "@monthly", "2028-02-10T00:00:00+05:30", "2028-03-01T00:00:00+05:30"},
		{"Europe/Berlin", "0 9 * * 1", "2027-03-27T00:00:00+01:00", "2027-03-29T09:00:00+02:00"},
	} {
		throttletest.Each(t, func(t *testing.T, client *redis.Client) {
			l, c := NewWithClock(t, client, Policy(Quota(2, tc.resets, tc.zone)))
			now, reset := Day(t, tc.now), Day(t, tc.reset)
			c.Set(now)
			Reserve(t, l, Acme(1))
			Reserve(t, l, Acme(1))
			d := Reserve(t, l, Acme(1))
			if d.Granted || d.RetryIn != reset-now || !d.Windows[0].ResetsAt.Equal(At(reset)) {
				t.Errorf("%+v: granted %v, denied for %v until %v, want %v", tc, d.Granted, d.RetryIn, d.Windows[0].ResetsAt, reset-now)
			}
			c.Set(reset - us)
			expect.That(t, !Reserve(t, l, Acme(1)).Granted, tc, "granted before the reset")
			c.Set(reset)
			expect.Equal(t, Reserve(t, l, Acme(2)).Granted, true)
		})
	}
}

// A call whose ticks are not around Redis's time is refused before anything is written.
func TestCalendarRefusesAClockThatIsFarOff(t *testing.T) {
	client := Redis(t)
	p := Policy(Quota(5, "* * * * *", ""))
	l := New(t, client, p)
	expect.Require(t, Reserve(t, l, Acme(1)).Granted, "denied")
	before := Dump(t, client)
	for _, off := range []time.Duration{time.Hour, -time.Hour} {
		if off < 0 { // or time stands still
			client.FlushAll(t.Context())
			before = Dump(t, client)
		}
		l := NewEdited(t, client, nil, []func(string) string{ShiftClock(off.Microseconds())}, p)
		expect.Err(t, expect.ErrOf(l.Reserve(t.Context(), Acme(1))), throttle.ErrClock, "Redis's clock is off by")
		expect.Equal(t, Dump(t, client), before)
	}
	for _, off := range []time.Duration{-5 * m, 5 * m} {
		expect.Must(t, client.FlushAll(t.Context()).Err())
		l := NewEdited(t, client, nil, []func(string) string{ShiftClock(off.Microseconds())}, p)
		d, err := l.Reserve(t.Context(), Acme(1))
		expect.That(t, err == nil && d.Granted, "Redis's clock is off by", off, "granted", d.Granted, err)
	}
}

// What is granted around a tick counts on both sides of it. A request fits as a whole on one of them.
func TestARequestFitsInOneSpanOfACalendar(t *testing.T) {
	w := Quota(3, "@hourly", "")
	w.Margin = 8 * m
	l, _ := NewWithClock(t, Redis(t), Policy(w))
	Reserve(t, l, Acme(2))
	d := Reserve(t, l, Acme(2))
	expect.That(t, d.RetryIn == h+8*m && d.Windows[0].RetryIn == d.RetryIn, d)
}

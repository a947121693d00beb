package limitertest

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/robfig/cron/v3"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// The days on which a time zone's clocks change have 23 and 25 hours, and quotas by the day reset at midnight there.
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
			Reserve(t, l, Acme(2))
			d := Reserve(t, l, Acme(1))
			expect.That(t, !d.Granted && d.RetryIn == reset-now && d.Windows[0].ResetsAt.Equal(At(reset)), tc, d, "want", reset-now)
			c.Set(reset - us)
			expect.That(t, !Reserve(t, l, Acme(1)).Granted, tc, "granted before the reset")
			c.Set(reset)
			expect.Equal(t, Reserve(t, l, Acme(2)).Granted, true)
		})
	}
}

// A call whose ticks are not around Redis's time is refused before anything is written.
func TestCalendarRefusesAClockThatIsFarOff(t *testing.T) {
	client := RedisClient(t)
	// The other window keeps what is stored when the minute ends.
	quota := Quota(5, "* * * * *", "")
	quota.Margin = s
	p := Policy(quota, throttle.Window{Name: "day", Limit: 5, Period: 24 * time.Hour})
	expect.Require(t, Reserve(t, New(t, client, p), Acme(1)).Granted, "denied")
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
	// Nor does one whose other scope was changed by a clock that has been set back since.
	shared := Policy(SharedWindow(5, 24*time.Hour))
	Reserve(t, NewEdited(t, client, nil, []func(string) string{ShiftClock(time.Hour.Microseconds())}, shared).Limiter, Acme(1))
	before, shared.Windows = Dump(t, client), append(shared.Windows, quota)
	expect.Err(t, expect.ErrOf(New(t, client, shared).Reserve(t.Context(), Acme(1))), throttle.ErrClock)
	expect.Equal(t, Dump(t, client), before)
	for _, off := range []time.Duration{-5 * m, 5 * m} {
		expect.Must(t, client.FlushAll(t.Context()).Err())
		l := NewEdited(t, client, nil, []func(string) string{ShiftClock(off.Microseconds())}, p)
		expect.That(t, Reserve(t, l.Limiter, Acme(1)).Granted, "denied, Redis's clock is off by", off)
	}
}

// Random grants and cancels. At every step a log of them is counted again, by cron alone.
func TestCalendarIsNeverExceeded(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		rapid.Check(t, func(t *rapid.T) {
			expect.Must(t, client.FlushAll(t.Context()).Err())
			w := Quota(rapid.Int64Range(1, 6).Draw(t, "limit"), rapid.SampledFrom([]string{"0 * * * *", "0 0 * * *", "30 2 * * *", "0 0 1 * *"}).Draw(t, "resets"),
				rapid.SampledFrom([]string{"UTC", "America/Los_Angeles", "America/St_Johns", "Asia/Kathmandu"}).Draw(t, "zone"))
			w.Margin = time.Duration(rapid.IntRange(0, 25).Draw(t, "margin")) * m
			schedule := expect.Got(cron.ParseStandard(w.Resets))(t)
			zone := expect.Got(time.LoadLocation(w.Timezone))(t)
			l, c := NewWithClock(t, client, Policy(w))
			var log []throttle.Decision
			now := time.Duration(rapid.Int64Range(0, int64(400*24*h)).Draw(t, "begin")).Truncate(us)
			c.Set(now)
			ticks := []time.Time{schedule.Next(At(now - 32*24*h).In(zone))}
			spanOf := func(at time.Time) int {
				for !ticks[len(ticks)-1].After(at) {
					ticks = append(ticks, schedule.Next(ticks[len(ticks)-1]))
				}
				i, _ := slices.BinarySearchFunc(ticks, at, func(tick, at time.Time) int { return cmp.Or(tick.Compare(at), -1) })
				return i
			}
			// most is the most units that an upstream can have counted in a span, by a clock that is off by the
			// margin.
			most := func() int64 {
				var most int64
				for _, off := range []time.Duration{-w.Margin, 0, w.Margin} {
					units := map[int]int64{}
					for _, g := range log {
						span := spanOf(g.At.Add(off))
						units[span] += g.Reservation.Cost[throttle.Requests]
						most = max(most, units[span])
					}
				}
				return most
			}
			t.Repeat(map[string]func(*rapid.T){
				"": func(t *rapid.T) {
					units := most()
					expect.Require(t, units <= w.Limit, units, "units in one span of", w.Resets, "limit", w.Limit, log)
				},
				"pass": func(t *rapid.T) {
					now += time.Duration(rapid.SampledFrom([]int64{int64(s), int64(10 * m), int64(h), int64(20 * h)}).Draw(t, "by"))
					c.Set(now)
				},
				"reserve": func(t *rapid.T) {
					cost := rapid.Int64Range(1, w.Limit).Draw(t, "cost")
					d := Reserve(t, l, Acme(cost))
					if !d.Granted { // the truth: a microsecond before RetryIn, it would be denied
						c.Set(now + d.RetryIn - us)
						expect.Require(t, !Peek(t, l, Acme(cost)).Granted, "granted before", d.RetryIn, "have passed")
						now += d.RetryIn
						c.Set(now)
						d = Reserve(t, l, Acme(cost))
						expect.Require(t, d.Granted, "denied at its own RetryIn, for more:", d.RetryIn)
					}
					log = append(log, d)
				},
				"cancel": func(t *rapid.T) {
					if len(log) == 0 {
						t.Skip("nothing")
					}
					i := rapid.IntRange(max(0, len(log)-4), len(log)-1).Draw(t, "which")
					Cancel(t, l, log[i].Reservation)
					log = append(log[:i:i], log[i+1:]...)
				},
			})
		})
	})
}

package ticks_test

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/internal/ticks"
)

func TestTicksOfAClockThatIsSet(t *testing.T) {
	for _, c := range []struct{ zone, expression, after, want string }{
		{"Africa/Cairo", "@daily", "2024-04-25T12:00:00+02:00", "2024-04-26T01:00:00+03:00"},
		{"Africa/Cairo", "@daily", "2024-04-26T01:00:00+03:00", "2024-04-27T00:00:00+03:00"},
		{"America/Santiago", "0 0 * * *", "2024-09-07T12:00:00-04:00", "2024-09-08T01:00:00-03:00"},
		{"Asia/Beirut", "0 0 * * 0", "2024-03-25T12:00:00+02:00", "2024-03-31T01:00:00+03:00"},
		{"Asia/Beirut", "0 0 * * 1", "2024-03-30T12:00:00+02:00", "2024-04-01T00:00:00+03:00"},
		{"Africa/Cairo", "30 0 * * *", "2024-04-25T12:00:00+02:00", "2024-04-26T01:00:00+03:00"},
		{"Asia/Beirut", "30 0 * * 0", "2024-03-25T12:00:00+02:00", "2024-03-31T01:00:00+03:00"},
		{"America/Asuncion", "@monthly", "2023-09-15T12:00:00-04:00", "2023-10-01T01:00:00-03:00"},
		{"Europe/Berlin", "*/20 2 * * *", "2024-03-31T01:59:00+01:00", "2024-03-31T03:00:00+02:00"},
		{"Europe/Berlin", "*/20 2 * * *", "2024-03-31T03:00:00+02:00", "2024-04-01T02:00:00+02:00"},
		{"Europe/Berlin", "30 * * * *", "2024-03-31T01:30:00+01:00", "2024-03-31T03:30:00+02:00"},
		{"Europe/Berlin", "0 0 * * *", "2024-03-30T12:00:00+01:00", "2024-03-31T00:00:00+01:00"},
		{"Africa/Cairo", "0 0,6 * * *", "2024-04-25T23:30:00+02:00", "2024-04-26T01:00:00+03:00"},
		{"Africa/Cairo", "0 23 * * *", "2024-04-25T22:30:00+02:00", "2024-04-25T23:00:00+02:00"},
		{"America/New_York", "0 0 1 7 *", "2040-12-31T12:00:00-05:00", "2041-07-01T00:00:00-04:00"},
		{"America/New_York", "0 0 1 1 *", "3977-04-25T22:30:00-04:00", "3978-01-01T00:00:00-05:00"},
		{"America/Havana", "@daily", "2024-11-02T12:00:00-04:00", "2024-11-03T00:00:00-04:00"},
		{"America/Havana", "@daily", "2024-11-03T00:00:00-04:00", "2024-11-04T00:00:00-05:00"},
		{"America/Havana", "@hourly", "2024-11-03T00:00:00-04:00", "2024-11-03T00:00:00-05:00"},
		{"America/Havana", "30 0 * * *", "2024-11-03T00:30:00-04:00", "2024-11-03T00:30:00-05:00"},
		{"Africa/Cairo", "0 0 30 2 *", "2024-04-25T12:00:00+02:00", ""},
		{"Africa/Cairo", "@every 1h", "2024-04-25T23:30:00+02:00", "2024-04-26T01:30:00+03:00"},
	} {
		zone := expect.Got(time.LoadLocation(c.zone))(t)
		schedule := expect.Got(ticks.Parse(c.expression))(t)
		after := expect.Got(time.Parse(time.RFC3339, c.after))(t)
		got := ""
		if next := schedule.Next(after.In(zone)); !next.IsZero() {
			got = next.Format(time.RFC3339)
		}
		expect.That(t, got == c.want, c.expression, "in", c.zone, "after", c.after, got, "want", c.want)
	}
	_, err := ticks.Parse("never")
	expect.That(t, err != nil, "an expression that is none was read")
}

package batch_test

import (
	"context"
	"iter"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/batch"
)

func noTasks(context.Context, batch.Firing, string) iter.Seq2[*asynq.Task, error] {
	return func(func(*asynq.Task, error) bool) {}
}

func at(t *testing.T, s string) time.Time {
	t.Helper()
	return expect.Got(time.Parse(time.RFC3339, s))(t)
}

func TestTicksAreDueOnTimeOrWhenMissed(t *testing.T) {
	for _, c := range []struct {
		name      string
		b         batch.Batch
		last, now string
		want      string
	}{
		{"on time", batch.Batch{Schedule: "0 2 * * *"}, "2026-01-01T02:00:00Z", "2026-01-02T02:00:00Z", "2026-01-02T02:00:00Z"},
		{"not yet", batch.Batch{Schedule: "0 2 * * *"}, "2026-01-01T02:00:00Z", "2026-01-02T01:59:59Z", ""},
		{"a minute late is on time", batch.Batch{Schedule: "0 2 * * *"},
			"2026-01-01T02:00:00Z", "2026-01-02T02:00:59Z", "2026-01-02T02:00:00Z"},
		{"missed: skip", batch.Batch{Schedule: "0 2 * * *"}, "2026-01-01T02:00:00Z", "2026-01-02T02:01:01Z", ""},
		{"missed: once", batch.Batch{Schedule: "@hourly", Missed: batch.MissedOnce},
			"2026-01-01T02:00:00Z", "2026-01-01T06:30:00Z", "2026-01-01T06:00:00Z"},
		{"missed: once, and one on time", batch.Batch{Schedule: "@hourly", Missed: batch.MissedOnce},
			"2026-01-01T02:00:00Z", "2026-01-01T05:00:00Z", "2026-01-01T05:00:00Z"},
		{"missed long ago", batch.Batch{Schedule: "30 2 * * *", Missed: batch.MissedOnce, MissedWithin: 2 * time.Hour},
			"2026-01-01T02:30:00Z", "2026-01-09T04:31:00Z", ""},
		{"missed: skip, one on time", batch.Batch{Schedule: "@every 5s"},
			"2026-01-01T00:00:00Z", "2026-01-01T00:01:22Z", "2026-01-01T00:01:20Z"},
		{"every keeps step after long", batch.Batch{Schedule: "@every 7m"},
			"2026-01-01T00:00:00Z", "2026-01-08T00:00:10Z", "2026-01-08T00:00:00Z"},
		{"a zone", batch.Batch{Schedule: "0 2 * * *", Timezone: "Europe/Berlin"},
			"2026-01-01T01:00:00Z", "2026-01-02T01:00:10Z", "2026-01-02T01:00:00Z"},
		{"a zone in the schedule", batch.Batch{Schedule: "TZ=Europe/Berlin  0 2 * * *"},
			"2026-01-01T01:00:00Z", "2026-01-02T01:00:10Z", "2026-01-02T01:00:00Z"},
		// Berlin sets its clocks from 2:00 to 3:00 on 29 March 2026, and from 3:00 to 2:00 on 25 October.
		{"a time that does not come", batch.Batch{Schedule: "30 2 * * *", Timezone: "Europe/Berlin", Missed: batch.MissedOnce},
			"2026-03-28T01:30:00Z", "2026-03-29T12:00:00Z", "2026-03-29T01:00:00Z"},
		{"a time that comes twice", batch.Batch{Schedule: "30 2 * * *", Timezone: "Europe/Berlin"},
			"2026-10-24T00:30:00Z", "2026-10-25T00:30:10Z", "2026-10-25T00:30:00Z"},
		{"and again", batch.Batch{Schedule: "30 2 * * *", Timezone: "Europe/Berlin"},
			"2026-10-25T00:30:00Z", "2026-10-25T01:30:10Z", "2026-10-25T01:30:00Z"},
		{"a midnight that does not come", batch.Batch{Schedule: "@daily", Timezone: "Africa/Cairo"},
			"2024-04-24T22:00:00Z", "2024-04-25T22:00:10Z", "2024-04-25T22:00:00Z"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.b.Name, c.b.Tasks, c.b.Tenants = "b", noTasks, batch.List("acme")
			fire, upTo, err := batch.Due(c.b, at(t, c.last), at(t, c.now))
			expect.Must(t, err)
			got := ""
			if !fire.IsZero() {
				got = fire.UTC().Format(time.RFC3339)
			}
			expect.That(t, got == c.want && fire.Equal(upTo),
				"fires", got, ", want", c.want, ", and decides up to", upTo)
		})
	}
}

// Berlin sets its clocks from 3:00 to 2:00 on 25 October 2026, and Cairo from 24:00 to 1:00 on 26 April
// 2024. A time of day that the clock shows twice is that with the offset of the tick.
func TestTimesOfDayMeanTheFiringsOwnOffset(t *testing.T) {
	for _, c := range []struct{ zone, finishBy, tick, want string }{
		{"Europe/Berlin", "02:45", "2026-10-25T00:30:00Z", "2026-10-25T00:45:00Z"},
		{"Europe/Berlin", "02:45", "2026-10-25T01:30:00Z", "2026-10-25T01:45:00Z"},
		{"Europe/Berlin", "02:15", "2026-10-25T01:30:00Z", "2026-10-26T01:15:00Z"},
		{"Europe/Berlin", "05:00", "2026-10-25T00:30:00Z", "2026-10-25T04:00:00Z"},
		{"Europe/Berlin", "02:30", "2026-03-28T23:00:00Z", "2026-03-29T01:00:00Z"}, // it is skipped: 3:00
		{"Africa/Cairo", "00:00", "2024-04-25T12:00:00Z", "2024-04-25T22:00:00Z"},  // its first instant: 1:00
	} {
		b := batch.Batch{Name: "b", FinishBy: c.finishBy, Timezone: c.zone, Tasks: noTasks, Tenants: batch.List()}
		expect.Equal(t, batch.Deadline(b, at(t, c.tick)).UTC().Format(time.RFC3339), c.want,
			"finish_by", c.finishBy, "in", c.zone, "tick", c.tick)
	}
}

// Hours may cross midnight. In the night in which Berlin sets its clocks back, they end at the first 2:30.
func TestHoursAreThoseOfTheFiring(t *testing.T) {
	for _, c := range []struct {
		from, to, zone string
		now            map[string]bool // whether it is open then
	}{
		{"22:00", "06:00", "UTC", map[string]bool{
			"2026-01-01T22:00:00Z": true, "2026-01-01T23:00:00Z": true, "2026-01-02T05:59:59Z": true,
			"2026-01-02T06:00:00Z": false, "2026-01-02T12:00:00Z": false,
		}},
		{"01:00", "03:00", "UTC", map[string]bool{"2026-01-02T02:00:00Z": true, "2026-01-02T03:30:00Z": false}},
		{"22:00", "02:30", "Europe/Berlin", map[string]bool{
			"2026-10-24T20:00:00Z": true, "2026-10-25T00:29:00Z": true, "2026-10-25T00:31:00Z": false,
			"2026-10-25T01:15:00Z": false, "2026-10-25T01:31:00Z": false, "2026-10-25T21:00:00Z": true,
		}},
		{"03:00", "02:00", "Europe/Berlin", map[string]bool{"2026-03-28T12:00:00Z": true, "2026-03-29T01:30:00Z": true, "2026-03-28T01:30:00Z": false}},
		{"02:15", "02:45", "Europe/Berlin", map[string]bool{"2026-03-28T12:00:00Z": false, "2026-03-28T01:30:00Z": true}},
	} {
		hours := batch.Hours{From: c.from, To: c.to}
		b := batch.Batch{Name: "b", Hours: hours, Timezone: c.zone, Tasks: noTasks, Tenants: batch.List()}
		for now, want := range c.now {
			expect.Equal(t, batch.Open(b, at(t, "2026-10-24T20:00:00Z"), at(t, now)), want,
				hours, "in", c.zone, "at", now, "open")
		}
	}
}

func TestABatchThatCannotBeUsedSaysWhy(t *testing.T) {
	good := batch.Batch{Name: "nightly", Schedule: "0 2 * * *", Tasks: noTasks, Tenants: batch.List("acme")}
	for _, row := range []struct {
		want   string
		change func(*batch.Batch)
	}{
		{`batch "a b": name "a b": must be 1 to 64 of the characters A-Z a-z 0-9 _ . -`,
			func(b *batch.Batch) { b.Name = "a b" }},
		{`batch "nightly": schedule "0 0 30 2 *": must come within the next five years`,
			func(b *batch.Batch) { b.Schedule = "0 0 30 2 *" }},
		{`batch "nightly": timezone "Berlin": must be a name of the IANA time zone database, such as "Europe/Berlin"`,
			func(b *batch.Batch) { b.Timezone = "Berlin" }},
		{`batch "nightly": timezone "UTC": must not be given beside a schedule with TZ=`,
			func(b *batch.Batch) { b.Timezone, b.Schedule = "UTC", "TZ=UTC 0 2 * * *" }},
		{`batch "nightly": missed "never": must be "skip" or "once"`,
			func(b *batch.Batch) { b.Missed = "never" }},
		{`batch "nightly": missed_within 1000h0m0s: must be 1s to 720h`,
			func(b *batch.Batch) { b.MissedWithin = 1000 * time.Hour }},
		{`batch "nightly": hours "06:00": must not end when they begin`,
			func(b *batch.Batch) { b.Hours = batch.Hours{From: "06:00", To: "06:00"} }},
		{`batch "nightly": missed_within 1h0m0s: needs missed "once"`,
			func(b *batch.Batch) { b.MissedWithin = time.Hour }},
		{`batch "nightly": hours "22:00": must have from and to: times of day such as "22:00" and "06:00"`,
			func(b *batch.Batch) { b.Hours = batch.Hours{From: "22:00"} }},
		{`batch "nightly": hours "06:00": must have from and to: times of day such as "22:00" and "06:00"`,
			func(b *batch.Batch) { b.Hours = batch.Hours{To: "06:00"} }},
		{`batch "nightly": ended " ": must be the type of a task`, func(b *batch.Batch) { b.Ended = " " }},
		{`batch "nightly": on_failed "stop at 20%5": must be such as "stop at 20%", with 1 to 100`,
			func(b *batch.Batch) { b.OnFailed = "stop at 20%5" }},
		{`batch "nightly": overlap "never": must be "allow", "skip" or "queue"`,
			func(b *batch.Batch) { b.Overlap = "never" }},
		{`batch "nightly": on_failed "stop at 0%": must be such as "stop at 20%", with 1 to 100`,
			func(b *batch.Batch) { b.OnFailed = "stop at 0%" }},
		{`batch "nightly": finish_by "six": must be a time of day such as "06:00", ` +
			`or a time after the tick such as "4h", at most 9600h`,
			func(b *batch.Batch) { b.FinishBy = "six" }},
		{`batch "nightly": finish_by "-4h": must be a time of day such as "06:00", ` +
			`or a time after the tick such as "4h", at most 9600h`,
			func(b *batch.Batch) { b.FinishBy = "-4h" }},
		{`batch "nightly": late "never": must be "warn" or "refuse"`,
			func(b *batch.Batch) { b.FinishBy, b.Late = "06:00", "never" }},
		{`batch "nightly": late "refuse": needs finish_by`,
			func(b *batch.Batch) { b.Late = batch.LateRefuse }},
		{`batch "nightly": tasks "": must be given`,
			func(b *batch.Batch) { b.Tasks = nil }},
	} {
		b := good
		row.change(&b)
		err := b.Validate()
		expect.That(t, err != nil && err.Error() == "batch: "+row.want, err, "want", row.want)
	}
	expect.Must(t, good.Validate())
	for _, schedule := range []string{"2 o'clock", "CRON_0 2 * * *", "@every 999ms", "@every -1h", "TZ=UTC TZ=UTC 0 2 * * *"} {
		b := good
		b.Schedule = schedule
		err, ok := b.Validate().(*batch.Error)
		expect.That(t, ok && err.Field == "schedule" && err.Value == schedule, schedule, err)
	}
	for _, schedule := range []string{"@every 1s", "@every 1h30m", "CRON_TZ=Europe/Berlin @every 1h", "TZ=UTC  @daily"} {
		b := good
		b.Schedule = schedule
		expect.Must(t, b.Validate())
	}
}

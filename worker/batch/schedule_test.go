package batch_test

import (
	"context"
	"iter"
	"slices"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker/batch"
)

func noTasks(context.Context, batch.Firing, string) iter.Seq2[*asynq.Task, error] {
	return func(func(*asynq.Task, error) bool) {}
}

func at(t *testing.T, s string) time.Time {
	t.Helper()
	parsed, err := time.Parse(time.RFC3339, s)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

func TestTicksAreDueOnTimeOrWhenMissed(t *testing.T) {
	for _, c := range []struct {
		name      string
		b         batch.Batch
		last, now string
		want      []string
	}{
		{"on time", batch.Batch{Schedule: "0 2 * * *"}, "2026-01-01T02:00:00Z", "2026-01-02T02:00:00Z", []string{"2026-01-02T02:00:00Z"}},
		{"not yet", batch.Batch{Schedule: "0 2 * * *"}, "2026-01-01T02:00:00Z", "2026-01-02T01:59:59Z", nil},
		{"a minute late is on time", batch.Batch{Schedule: "0 2 * * *"},
			"2026-01-01T02:00:00Z", "2026-01-02T02:00:59Z", []string{"2026-01-02T02:00:00Z"}},
		{"missed: skip", batch.Batch{Schedule: "0 2 * * *"}, "2026-01-01T02:00:00Z", "2026-01-02T02:01:01Z", nil},
		{"missed: once", batch.Batch{Schedule: "@hourly", Missed: batch.MissedOnce},
			"2026-01-01T02:00:00Z", "2026-01-01T06:30:00Z", []string{"2026-01-01T06:00:00Z"}},
		{"missed: all", batch.Batch{Schedule: "@hourly", Missed: batch.MissedAll},
			"2026-01-01T02:00:00Z", "2026-01-01T04:30:00Z", []string{"2026-01-01T03:00:00Z", "2026-01-01T04:00:00Z"}},
		{"missed: once, and one on time", batch.Batch{Schedule: "@hourly", Missed: batch.MissedOnce},
			"2026-01-01T02:00:00Z", "2026-01-01T05:00:00Z", []string{"2026-01-01T04:00:00Z", "2026-01-01T05:00:00Z"}},
		{"missed long ago", batch.Batch{Schedule: "@hourly", Missed: batch.MissedAll, MissedWithin: 2 * time.Hour},
			"2026-01-01T02:00:00Z", "2026-01-09T04:30:00Z", []string{"2026-01-09T03:00:00Z", "2026-01-09T04:00:00Z"}},
		{"every keeps step after long", batch.Batch{Schedule: "@every 7m"},
			"2026-01-01T00:00:00Z", "2026-01-08T00:00:10Z", []string{"2026-01-08T00:00:00Z"}},
		{"a zone", batch.Batch{Schedule: "0 2 * * *", Timezone: "Europe/Berlin"},
			"2026-01-01T01:00:00Z", "2026-01-02T01:00:10Z", []string{"2026-01-02T01:00:00Z"}},
		{"a zone in the schedule", batch.Batch{Schedule: "TZ=Europe/Berlin 0 2 * * *"},
			"2026-01-01T01:00:00Z", "2026-01-02T01:00:10Z", []string{"2026-01-02T01:00:00Z"}},
		// Berlin sets its clocks from 2:00 to 3:00 on 29 March 2026, and from 3:00 to 2:00 on 25 October.
		{"a time that does not come", batch.Batch{Schedule: "30 2 * * *", Timezone: "Europe/Berlin", Missed: batch.MissedAll},
			"2026-03-28T01:30:00Z", "2026-03-29T12:00:00Z", nil},
		{"a time that comes twice", batch.Batch{Schedule: "30 2 * * *", Timezone: "Europe/Berlin", Missed: batch.MissedAll},
			"2026-10-24T00:30:00Z", "2026-10-25T12:00:00Z", []string{"2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.b.Name, c.b.Tasks, c.b.Tenants = "b", noTasks, batch.List("acme")
			fire, upTo, err := batch.Due(c.b, at(t, c.last), at(t, c.now))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, tick := range fire {
				got = append(got, tick.UTC().Format(time.RFC3339))
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("fires %v, want %v", got, c.want)
			}
			if len(fire) > 0 && !upTo.Equal(fire[len(fire)-1]) {
				t.Errorf("decides up to %v, and fires %v", upTo, fire)
			}
		})
	}
}

func TestHoursMayCrossMidnight(t *testing.T) {
	for _, c := range []struct {
		from, to, at string
		want         bool
	}{
		{"22:00", "06:00", "2026-01-01T23:00:00Z", true},
		{"22:00", "06:00", "2026-01-01T05:59:59Z", true},
		{"22:00", "06:00", "2026-01-01T06:00:00Z", false},
		{"22:00", "06:00", "2026-01-01T12:00:00Z", false},
		{"22:00", "06:00", "2026-01-01T22:00:00Z", true},
		{"01:00", "03:00", "2026-01-01T02:00:00Z", true},
		{"01:00", "03:00", "2026-01-01T03:30:00Z", false},
	} {
		b := batch.Batch{Name: "b", Hours: batch.Hours{From: c.from, To: c.to}, Tasks: noTasks, Tenants: batch.List()}
		if got := batch.Open(b, at(t, c.at)); got != c.want {
			t.Errorf("from %s to %s, at %s: open %v", c.from, c.to, c.at, got)
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
		{`batch "nightly": schedule "2 o'clock": must be a cron expression of five fields, ` +
			`such as "0 2 * * *" for two o'clock every night, or such as "@every 1h"`,
			func(b *batch.Batch) { b.Schedule = "2 o'clock" }},
		{`batch "nightly": schedule "0 0 30 2 *": must come within the next five years`,
			func(b *batch.Batch) { b.Schedule = "0 0 30 2 *" }},
		{`batch "nightly": timezone "Berlin": must be a name of the IANA time zone database, such as "Europe/Berlin"`,
			func(b *batch.Batch) { b.Timezone = "Berlin" }},
		{`batch "nightly": timezone "UTC": must not be given beside a schedule with TZ=`,
			func(b *batch.Batch) { b.Timezone, b.Schedule = "UTC", "TZ=UTC 0 2 * * *" }},
		{`batch "nightly": missed "never": must be "skip", "once" or "all"`,
			func(b *batch.Batch) { b.Missed = "never" }},
		{`batch "nightly": missed_within 1000h0m0s: must be 1s to 720h`,
			func(b *batch.Batch) { b.MissedWithin = 1000 * time.Hour }},
		{`batch "nightly": hours "06:00": must not end when they begin`,
			func(b *batch.Batch) { b.Hours = batch.Hours{From: "06:00", To: "06:00"} }},
		{`batch "nightly": missed_within 1h0m0s: needs missed "once" or "all"`,
			func(b *batch.Batch) { b.MissedWithin = time.Hour }},
		{`batch "nightly": hours "22:00": must have to beside from: a time of day such as "06:00"`,
			func(b *batch.Batch) { b.Hours = batch.Hours{From: "22:00"} }},
		{`batch "nightly": hours "06:00": must have from beside to: a time of day such as "22:00"`,
			func(b *batch.Batch) { b.Hours = batch.Hours{To: "06:00"} }},
		{`batch "nightly": hours "": must have from and to beside stop, such as from "22:00" to "06:00"`,
			func(b *batch.Batch) { b.Hours.Stop = true }},
		{`batch "nightly": tasks "": must be given`,
			func(b *batch.Batch) { b.Tasks = nil }},
	} {
		b := good
		row.change(&b)
		if err := b.Validate(); err == nil || err.Error() != "batch: "+row.want {
			t.Errorf("%v, want %s", err, row.want)
		}
	}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
}

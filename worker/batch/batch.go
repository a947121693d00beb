package batch

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // time zones, also where the machine has no list of them

	"github.com/hibiken/asynq"
	"github.com/robfig/cron/v3"

	"github.com/sluice-go/sluice/internal/ticks"
)

// A Batch describes which tasks are enqueued, and when.
type Batch struct {
	// Duration is how long a task takes, for plans, until a firing has measured it. The default, 0, is unknown.
	// Without a measured or a given one, plans go by the Timeout in Options, if there is one.
	Duration time.Duration

	// Ended is the type of a task that is enqueued, into the batch's queue, each time a firing ends or OnFailed
	// stops it. Its payload is the Status as JSON, its tenant the batch's name. The default is none.
	Ended string

	// FinishBy is the time by which all tasks of a firing are to have ended: a time of day, such as "06:00", the
	// first one after the tick, or a duration after the tick, such as "4h". Late decides about a firing whose
	// tasks are expected to end later. The default is no such time.
	FinishBy string

	// Hours confines the batch to hours of the day. The default is all.
	Hours Hours

	// Late decides about a firing that would not be done by FinishBy, before any of its tasks is enqueued, and
	// by what is known then: see Plan.Unknown. The default is LateWarn.
	Late Late

	// Missed decides about ticks that came while no scheduler ran. The default is MissedSkip.
	Missed Missed

	// MissedWithin is the age up to which missed ticks fire: 1 s to 720 hours, by default 24. It needs MissedOnce.
	MissedWithin time.Duration

	// Name, required, identifies the batch in its queue: at most 64 letters, digits, "_", "-" and ".".
	Name string

	// Options are for every task. TaskID and Queue have no effect. ProcessAt, ProcessIn and Group are refused.
	Options []asynq.Option

	// OnFailed bounds how many tasks may fail for good. "stop at 20%" stops the firing as soon as so many of
	// its tasks have failed: waiting tasks are set aside, and the task of Ended is enqueued. After Resume the
	// firing goes on to its end. The default, empty, never stops it.
	OnFailed string

	// Overlap decides about a firing while another one of the batch has not ended. The default is OverlapAllow.
	Overlap Overlap

	// Queue is the tasks' queue. The default is "default".
	Queue string

	// Schedule is a cron expression of five fields or a descriptor such as "@daily" or "@every 1h", as robfig/cron/v3
	// has them. It may begin with "TZ=Europe/Berlin ". Without a schedule the batch fires by hand only.
	Schedule string

	// Tasks yields the tasks of one tenant. They are of throttle.ClassBatch unless their worker.Identity has
	// another class. It is required.
	Tasks Tasks

	// Tenants yields the tenants. It is required.
	Tenants Tenants

	// Timezone is the IANA name of the zone of Schedule, Hours and FinishBy. The default is UTC, or a Schedule's TZ.
	Timezone string
}

// Missed decides about ticks that came while no scheduler ran.
type Missed string

const (
	MissedSkip Missed = "skip" // they do not fire, unless they are at most a minute late
	MissedOnce Missed = "once" // the last of them fires
)

// Overlap decides about a firing while another one of the batch has not ended.
type Overlap string

const (
	OverlapAllow Overlap = "allow" // it begins: the tasks of both wait in the same lines
	OverlapSkip  Overlap = "skip"  // its tick does not fire, and Fire returns ErrOverlap
	OverlapQueue Overlap = "queue" // it waits until all earlier firings have ended
)

// Hours are hours of the day, such as from "22:00" to "06:00". Outside of them no task of the batch
// starts, but running tasks go on. Unfinished firings go on when the hours begin again.
type Hours struct {
	From, To string // both empty for all hours
}

// An Error names a field of a batch that cannot be used.
type Error struct {
	Batch string
	Field string // as in a file, such as "schedule"
	Value any
	Hint  string
}

func (e *Error) Error() string {
	value := fmt.Sprint(e.Value)
	if s, ok := e.Value.(string); ok {
		value = fmt.Sprintf("%q", s)
	}
	return fmt.Sprintf("batch: batch %q: %s %s: %s", e.Batch, e.Field, value, e.Hint)
}

// Validate returns an *Error for the first field that cannot be used.
func (b Batch) Validate() error {
	_, err := b.compile()
	return err
}

// A compiled batch is valid, and has its defaults.
type compiled struct {
	Batch
	finishBy func(b *compiled, tick time.Time) time.Time // nil for no such time
	hours    *[2]clock
	stopAt   int           // percent of failed tasks at which a firing stops; 0 for never
	schedule cron.Schedule // nil to fire by hand only
	zone     *time.Location
}

var nameShape = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

func (b Batch) compile() (*compiled, error) {
	c := &compiled{Batch: b}
	bad := func(field string, value any, hint string) (*compiled, error) {
		return nil, &Error{b.Name, field, value, hint}
	}
	c.Missed, c.Queue = cmp.Or(b.Missed, MissedSkip), cmp.Or(b.Queue, "default")
	c.MissedWithin, c.Late = cmp.Or(b.MissedWithin, 24*time.Hour), cmp.Or(b.Late, LateWarn)
	c.Overlap = cmp.Or(b.Overlap, OverlapAllow)
	schedule, scheduleZone := strings.Replace(b.Schedule, "CRON_TZ=", "TZ=", 1), ""
	if rest, ok := strings.CutPrefix(schedule, "TZ="); ok {
		scheduleZone, schedule, _ = strings.Cut(rest, " ")
		schedule = strings.TrimSpace(schedule)
	}
	zone, err := time.LoadLocation(cmp.Or(scheduleZone, b.Timezone, "UTC"))
	noZone := err != nil || zone == time.Local
	fmt.Sscanf(b.OnFailed, "stop at %d%%", &c.stopAt)
	switch {
	case !nameShape.MatchString(b.Name):
		return bad("name", b.Name, `must be 1 to 64 of the characters A-Z a-z 0-9 _ . -`)
	case strings.TrimSpace(c.Queue) == "":
		return bad("queue", b.Queue, "must not be blank")
	case b.Timezone != "" && scheduleZone != "":
		return bad("timezone", b.Timezone, "must not be given beside a schedule with TZ=")
	case noZone && scheduleZone != "":
		return bad("schedule", b.Schedule, `must have a name of the IANA time zone database after TZ=, `+
			`such as "Europe/Berlin"`)
	case noZone:
		return bad("timezone", b.Timezone, `must be a name of the IANA time zone database, such as "Europe/Berlin"`)
	case c.Missed != MissedSkip && c.Missed != MissedOnce:
		return bad("missed", string(b.Missed), `must be "skip" or "once"`)
	case !slices.Contains([]Overlap{OverlapAllow, OverlapSkip, OverlapQueue}, c.Overlap):
		return bad("overlap", string(b.Overlap), `must be "allow", "skip" or "queue"`)
	case c.MissedWithin < time.Second || c.MissedWithin > maxMissedWithin:
		return bad("missed_within", b.MissedWithin, "must be 1s to 720h")
	case b.MissedWithin != 0 && c.Missed == MissedSkip:
		return bad("missed_within", b.MissedWithin, `needs missed "once"`)
	case b.Tasks == nil:
		return bad("tasks", "", "must be given")
	case b.Tenants == nil:
		return bad("tenants", "", "must be given")
	case c.Late != LateWarn && c.Late != LateRefuse:
		return bad("late", string(b.Late), `must be "warn" or "refuse"`)
	case b.Late != "" && b.FinishBy == "":
		return bad("late", string(b.Late), "needs finish_by")
	case b.OnFailed != "" && (fmt.Sprintf("stop at %d%%", c.stopAt) != b.OnFailed || c.stopAt < 1 || c.stopAt > 100):
		return bad("on_failed", b.OnFailed, `must be such as "stop at 20%", with 1 to 100`)
	case b.Ended != "" && strings.TrimSpace(b.Ended) == "":
		return bad("ended", b.Ended, "must be the type of a task")
	case b.Duration < 0:
		return bad("duration", b.Duration, "must not be below 0")
	case (b.Hours.From == "") != (b.Hours.To == ""):
		return bad("hours", b.Hours.From+b.Hours.To, `must have from and to: times of day such as "22:00" and "06:00"`)
	}
	c.zone = zone
	if b.FinishBy != "" {
		finishBy, ok := parseFinishBy(b.FinishBy)
		if !ok {
			return bad("finish_by", b.FinishBy, `must be a time of day such as "06:00", `+
				`or a time after the tick such as "4h", at most 9600h`)
		}
		c.finishBy = finishBy
	}
	if b.Schedule != "" {
		every, everyErr := time.ParseDuration(strings.TrimPrefix(schedule, "@every "))
		c.schedule, err = ticks.Parse(schedule)
		if err != nil || everyErr == nil && every < time.Second || strings.Contains(schedule, "TZ=") {
			return bad("schedule", b.Schedule, `must be a cron expression of five fields, `+
				`such as "0 2 * * *" for two o'clock every night, or such as "@every 1h", at least 1s`)
		}
		if c.schedule.Next(time.Now().In(zone)).IsZero() {
			return bad("schedule", b.Schedule, "must come within the next five years")
		}
	}
	if b.Hours == (Hours{}) {
		return c, nil
	}
	c.hours = &[2]clock{}
	for i, text := range []string{b.Hours.From, b.Hours.To} {
		if c.hours[i], err = parseClock(text); err != nil {
			return bad("hours", text, `must be a time of day such as "06:00"`)
		}
	}
	if c.hours[0] == c.hours[1] {
		return bad("hours", b.Hours.From, "must not end when they begin")
	}
	return c, nil
}

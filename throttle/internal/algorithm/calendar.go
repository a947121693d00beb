package algorithm

import (
	"cmp"
	"hash/fnv"
	"strconv"
	"strings"
	"sync"
	"time"
	_ "time/tzdata" // time zones for machines that have no list of them

	"github.com/robfig/cron/v3"

	"github.com/sluice-go/sluice/internal/ticks"
)

// Every call carries the ticks within tickSlack of this machine's time, ticksBefore earlier and ticksAfter later
// ticks. So the ticks suffice if the clock of Redis differs by at most tickSlack.
const (
	tickSlack   = 10 * time.Minute
	ticksBefore = 2
	ticksAfter  = 8
	ticksLast   = 10 * time.Second // a list is used this long before and after the time that it was made for
)

// ticksChecked bounds how many ticks a margin is checked against.
const ticksChecked = 400

// Calendar is the fixed window counter with a calendar's ticks: see throttle/internal/script/lua/fixed.lua.
var Calendar = Algorithm{
	Kind:     "f",
	File:     "fixed",
	Defaults: func(w *Window) { w.Timezone = cmp.Or(w.Timezone, "UTC") },
	Options:  []Option{OptionMargin, OptionResets, OptionTimezone},
	Params: func(w Window) [4]int64 {
		h := fnv.New32()
		h.Write([]byte(w.Resets + "\n" + w.Timezone))
		return [4]int64{w.Limit, w.Margin.Microseconds(), int64(h.Sum32())}
	},
	Simulate: func(w Window, c Counted) Simulated { return c.buckets(w, newTicks(w).resetAfter) },
	Ticks:    newTicks,
	Rule: func(w Window) (string, any, string) {
		zone, err := time.LoadLocation(w.Timezone)
		if err != nil || w.Timezone == "Local" {
			return "timezone", w.Timezone, `must be a name of the IANA time zone database, such as "America/Los_Angeles"`
		}
		schedule, err := ticks.Parse(w.Resets)
		if err != nil || strings.Contains(w.Resets, "TZ=") || strings.HasPrefix(w.Resets, "@every") {
			return "resets", w.Resets, `must be a cron expression of five fields, such as "0 0 * * *" for every midnight`
		}
		tick := schedule.Next(time.Now().In(zone))
		if tick.IsZero() {
			return "resets", w.Resets, "must be a time that comes within the next five years"
		}
		for i := 0; w.Margin > 0 && i < ticksChecked; i++ {
			next := schedule.Next(tick)
			if !next.IsZero() && next.Sub(tick) <= 2*w.Margin {
				return "margin", w.Margin, "must be less than half the time between two resets"
			}
			tick = next
		}
		return "", nil, ""
	},
}

// Ticks computes the ticks of one window.
type Ticks struct {
	margin   time.Duration // ticks take effect this much later
	schedule cron.Schedule
	zone     *time.Location

	mu    sync.Mutex
	list  string    // the ticks as scripts take them
	from  time.Time // when the list begins to be valid
	until time.Time // when it ends
}

func newTicks(w Window) *Ticks {
	zone, _ := time.LoadLocation(w.Timezone)
	schedule, _ := ticks.Parse(w.Resets)
	return &Ticks{margin: w.Margin, schedule: schedule, zone: zone}
}

// Around returns the ticks around a time, as throttle/internal/script/lua/fixed.lua takes them.
func (c *Ticks) Around(now time.Time) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.list != "" && !now.Before(c.from) && now.Before(c.until) {
		return c.list
	}
	from, until := now.Add(-ticksLast-tickSlack-c.margin), now.Add(tickSlack+ticksLast)
	var list []string
	for back := time.Hour; ; back *= 4 { // schedules only look ahead
		earlier, later := 0, 0
		list = nil
		for tick := c.schedule.Next(from.Add(-back).In(c.zone)); !tick.IsZero() && later < ticksAfter; {
			list = append(list, strconv.FormatInt(tick.Unix(), 10))
			if !tick.After(from) {
				earlier++
			} else if tick.After(until) {
				later++
			}
			tick = c.schedule.Next(tick)
		}
		if earlier >= ticksBefore || back > 40*MaxPeriod {
			list = list[max(0, earlier-ticksBefore):]
			break
		}
	}
	c.list, c.from, c.until = strings.Join(list, ","), now.Add(-ticksLast), now.Add(ticksLast)
	return c.list
}

// resetAfter returns the first time after t at which the window starts again from 0 (us).
func (c *Ticks) resetAfter(t int64) int64 {
	tick := c.schedule.Next(time.UnixMicro(t).Add(-c.margin).In(c.zone))
	if tick.IsZero() {
		return Never
	}
	return tick.Add(c.margin).UnixMicro()
}

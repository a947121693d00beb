package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// A figure is one row of the report. It may have a bar to clear.
type figure struct {
	Name       string   `json:"name"`
	Unit       string   `json:"unit,omitempty"`
	Sluice     *float64 `json:"sluice,omitempty"`
	Control    *float64 `json:"control,omitempty"`
	Difference *float64 `json:"difference,omitempty"`
	Bar        string   `json:"bar,omitempty"`
	Missed     bool     `json:"missed"`
}

// The bars.
const (
	noBar      = ""
	zero       = "0"            // of Sluice
	notAbove   = "<= 0"         // of Sluice
	difference = "difference 0" // Sluice's figure is not above the control's
	unjudged   = "interrupted"  // not judged
)

func number[T int | int64 | float64](n T) *float64 { return new(float64(n)) }

func perThousand(n, total int) *float64 { return new(float64(1000*n) / float64(max(total, 1))) }

func seconds(d time.Duration) *float64 { return new(float64(d.Milliseconds()) / 1000) }

func newFigure(name, unit string, sluice, control *float64, bar string) figure {
	f := figure{Name: name, Unit: unit, Sluice: sluice, Control: control, Bar: bar}
	if sluice != nil && control != nil {
		f.Difference = new(*sluice - *control)
	}
	switch bar {
	case zero:
		f.Missed = *sluice != 0
	case notAbove:
		f.Missed = *sluice > 0
	case difference:
		f.Missed = *f.Difference > 0
	case unjudged:
		f.Missed = true
	}
	return f
}

// figures returns the figures of a soak. If it was interrupted, unfinished tasks are not judged.
func figures(sluice, control evidence, interrupted bool) []figure {
	s, c := count(sluice), count(control)
	var all []figure
	both := func(name string, a, b []string, bar string) {
		all = append(all, newFigure(name, "", number(len(a)), number(len(b)), bar))
	}
	shown := func(name, unit string, a, b *float64) {
		all = append(all, newFigure(name, unit, a, b, noBar))
	}
	split := func(name string, a, aUnexcused, b, bUnexcused []string) {
		both(name, a, b, noBar)
		both("- without a fault to blame", aUnexcused, bUnexcused, difference)
	}
	alone := func(name, unit string, value *float64, bar string) {
		all = append(all, newFigure(name, unit, value, nil, bar))
	}
	unfinished, tickets := zero, zero
	if interrupted {
		unfinished, tickets = unjudged, noBar
	}
	shown("tasks enqueued", "", number(len(sluice.enqueued)), number(len(control.enqueued)))
	shown("runs", "", number(len(sluice.runs)), number(len(control.runs)))
	both("ended well", s.succeeded, c.succeeded, noBar)
	both("archived by failures of their own", s.failed, c.failed, noBar)
	both("lost", s.lost, c.lost, zero)
	both("unfinished", s.unfinished, c.unfinished, unfinished)
	split("duplicated runs", s.duplicated, s.duplicatedUnexcused, c.duplicated, c.duplicatedUnexcused)
	split("archived early", s.archived, s.archivedUnexcused, c.archived, c.archivedUnexcused)
	split("retries burnt", s.burnt, s.burntUnexcused, c.burnt, c.burntUnexcused)
	shown("- per 1,000 pick-ups", "",
		perThousand(len(s.burnt), sluice.pickUps), perThousand(len(c.burnt), control.pickUps))
	shown("pick-ups", "", number(sluice.pickUps), number(control.pickUps))
	both("locks left", s.locked, c.locked, difference)
	alone("runs that had waited", "", number(s.waited), noBar)
	alone("denials", "", number(sluice.denials), noBar)
	alone("excess", "units", number(s.excess), notAbove)
	alone("runs not charged", "", number(len(s.uncharged)), zero)
	alone("charged without a run", "units", number(s.leaked), noBar)
	alone("- without a fault to blame", "units", number(s.leakedUnexcused), zero)
	alone("waited without a ticket", "", number(len(sluice.ticketless)), zero)
	alone("tickets left in line", "", number(len(sluice.tickets)), tickets)
	both("workers that did not end", sluice.stuck, control.stuck, difference)
	alone("granted after the expected start, p50", "s", seconds(quantile(s.late, 0.5)), noBar)
	alone("granted after the expected start, p99", "s", seconds(quantile(s.late, 0.99)), noBar)
	alone("granted after the expected start, most", "s", seconds(quantile(s.late, 1)), noBar)
	shown("fault to next run, p50", "s", seconds(quantile(s.recoveries, 0.5)), seconds(quantile(c.recoveries, 0.5)))
	shown("fault to next run, most", "s", seconds(quantile(s.recoveries, 1)), seconds(quantile(c.recoveries, 1)))
	for _, kind := range []string{string(cut), string(dropped), string(delayed), kill, term, stop, flush} {
		shown("fault: "+kind, "", number(sluice.counts[kind]), number(control.counts[kind]))
	}
	for _, kind := range []string{dequeues, enqueues, finishes, limiterCalls} {
		shown("replies lost: "+kind, "", number(sluice.lost[kind]), number(control.lost[kind]))
	}
	return all
}

func missed(figures []figure) (n int) {
	for _, f := range figures {
		if f.Missed {
			n++
		}
	}
	return n
}

func printFigures(w io.Writer, figures []figure, seed uint64, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(map[string]any{"seed": seed, "figures": figures})
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "FIGURE\tSLUICE\tCONTROL\tDIFFERENCE\tBAR\t\n")
	for _, f := range figures {
		verdict := ""
		if f.Missed {
			verdict = "MISSED"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n",
			f.Name, f.text(f.Sluice), f.text(f.Control), f.text(f.Difference), f.Bar, verdict)
	}
	return t.Flush()
}

func (f figure) text(value *float64) string {
	if value == nil {
		return ""
	}
	return strings.TrimSpace(strconv.FormatFloat(math.Round(*value*1000)/1000, 'f', -1, 64) + " " + f.Unit)
}

// explain prints what was seen of tasks that miss a bar.
func explain(w io.Writer, name string, e evidence, attempts func(task string) []attempt, interrupted bool) {
	const most = 5 // of each kind
	t := count(e)
	if interrupted {
		t.unfinished, e.tickets = nil, nil
	}
	shown := map[string]bool{}
	for _, cases := range []struct {
		what  string
		tasks []string
	}{
		{"lost", t.lost}, {"unfinished", t.unfinished}, {"duplicated", t.duplicatedUnexcused},
		{"archived early", t.archivedUnexcused}, {"burnt a retry", t.burntUnexcused}, {"not charged", t.uncharged},
		{"its lock is left", t.locked}, {"without a ticket", e.ticketless}, {"left in line", e.tickets},
	} {
		for _, id := range cases.tasks[:min(most, len(cases.tasks))] {
			if shown[id] {
				continue
			}
			shown[id] = true
			i := slices.IndexFunc(e.jobs, func(j job) bool { return j.ID == id })
			if i < 0 {
				fmt.Fprintf(w, "%s: %s: %s: no such task\n", name, id, cases.what)
				continue
			}
			j := e.jobs[i]
			end, state := e.ends[id], "gone"
			if _, found := e.ends[id]; found {
				state = end.state.String()
			}
			fmt.Fprintf(w, "%s: %s: %s: tenant %s, MaxRetry %d, to fail %d, joins %v, retained %v, delay %v; ",
				name, id, cases.what, j.Tenant, j.MaxRetry, j.Fails, j.Joins, j.Retained, j.Delay)
			fmt.Fprintf(w, "at the end %s, retried %d\n", state, end.retried)
			for _, a := range attempts(id) {
				fmt.Fprintf(w, "  %s picked up by %s, from the line %v, lost %v, put down %s by %s\n",
					clock(a.At), a.Holder, a.Taken, a.Lost, clock(a.Ended), a.EndedBy)
			}
			for _, r := range e.runs {
				if r.Task != id {
					continue
				}
				fmt.Fprintf(w, "  %s run by %s, granted %s, expected %s, retried %d, ended %s, failed %v\n",
					clock(r.Begun), r.Holder, clock(r.Granted), clock(r.Expected), r.Retried, clock(r.Ended), r.Failed)
			}
		}
	}
}

func clock(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.Format("15:04:05.000000")
}

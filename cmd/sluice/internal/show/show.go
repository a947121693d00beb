// Package show writes what a command prints: tables, JSON and short durations.
package show

import (
	"encoding/json"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"
)

// Table returns a writer that aligns columns separated by tabs. It writes at Flush.
func Table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 3, ' ', 0) }

// JSON writes a value over several lines.
func JSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// Short is d.String without its zeros: "1m", not "1m0s".
func Short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// Rough is Short with two digits or so.
func Rough(d time.Duration) string {
	for _, unit := range []time.Duration{time.Minute, time.Second, 100 * time.Millisecond} {
		if d >= 10*unit {
			return Short(d.Round(unit))
		}
	}
	return Short(d.Round(time.Millisecond))
}

// Against is how work stands that is so far behind its plan, or ahead of it if that is below 0. Less
// than a little does not count.
func Against(behind, little time.Duration) string {
	switch behind = behind.Round(time.Second); {
	case behind >= little:
		return Short(behind) + " behind its plan"
	case -behind >= little:
		return Short(-behind) + " ahead of its plan"
	}
	return "as planned"
}

// Milliseconds is a duration as JSON carries it.
func Milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Round keeps three digits after the point.
func Round(f float64) float64 { return math.Round(f*1000) / 1000 }

// Package show writes what a command prints: tables, JSON, durations and progress.
package show

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/rivo/uniseg"
	"golang.org/x/term"
)

// A Table aligns cells. On a terminal it is no wider than that, whatever the cells hold.
type Table struct {
	Width int // in columns of a terminal; 0 for any

	rows [][]string
	w    io.Writer
}

// NewTable returns a table with a header.
func NewTable(w io.Writer, header ...any) *Table {
	t := &Table{w: w}
	if f, ok := w.(*os.File); ok {
		t.Width, _, _ = term.GetSize(int(f.Fd())) // 0 if it is no terminal
	}
	t.Row(header...)
	return t
}

// Row adds a row. A text that would break out of its cell is quoted.
func (t *Table) Row(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = Name(fmt.Sprint(c))
	}
	t.rows = append(t.rows, row)
}

const (
	gap      = 3  // between two columns
	narrowed = 12 // no column is cut to less
)

// Flush writes the table. Where it is too wide, the widest columns are cut.
func (t *Table) Flush() {
	widths, all := make([]int, len(t.rows[0])), -gap
	for i := range widths {
		for _, row := range t.rows {
			widths[i] = max(widths[i], uniseg.StringWidth(row[i]))
		}
		all += widths[i] + gap
	}
	for ; t.Width > 0 && all > t.Width; all-- {
		widest := 0
		for i := range widths {
			if widths[i] > widths[widest] {
				widest = i
			}
		}
		if widths[widest] <= narrowed {
			break
		}
		widths[widest]--
	}
	for _, row := range t.rows {
		var line strings.Builder
		for i, cell := range row {
			cell = cut(cell, widths[i])
			line.WriteString(cell + strings.Repeat(" ", widths[i]-uniseg.StringWidth(cell)+gap))
		}
		fmt.Fprintln(t.w, strings.TrimRight(line.String(), " "))
	}
}

// cut shortens a text to a width.
func cut(text string, width int) string {
	if uniseg.StringWidth(text) <= width {
		return text
	}
	short := ""
	for g := uniseg.NewGraphemes(text); g.Next() && uniseg.StringWidth(short+g.Str()) < width; {
		short += g.Str()
	}
	return short + "…"
}

// Name is a name that is data: in quotes if it would break out of a line of text.
func Name(s string) string {
	if quoted := strconv.Quote(s); quoted[1:len(quoted)-1] != s {
		return quoted
	}
	return s
}

// JSON writes a value over several lines.
func JSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// Span is a duration by its two largest units: "847ms", "2.3s", "1m30s", "3d4h".
func Span(d time.Duration) string {
	switch {
	case d < time.Second:
		return max(0, d).Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	units := []struct {
		name    string
		seconds int64
	}{{"y", 365 * 86_400}, {"d", 86_400}, {"h", 3600}, {"m", 60}, {"s", 1}}
	left, text := int64(d.Round(time.Second)/time.Second), ""
	for i, u := range units {
		if left < u.seconds {
			continue
		}
		text = fmt.Sprint(left/u.seconds, u.name)
		if left %= u.seconds; i+1 < len(units) && left >= units[i+1].seconds {
			text += fmt.Sprint(left/units[i+1].seconds, units[i+1].name)
		}
		break
	}
	return text
}

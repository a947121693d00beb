// Package show writes what a command prints: tables, JSON and progress.
package show

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/rivo/uniseg"

	"github.com/sluice-go/sluice/internal/words"
)

// A Table aligns cells. It cuts them to fit a terminal's width, but none to under 12 characters.
type Table struct {
	Width int // at most, in columns of a terminal; 0 for no bound

	rows [][]string
	w    io.Writer
}

func NewTable(w io.Writer, header ...any) *Table {
	t := &Table{Width: widthOf(w), w: w}
	t.Row(header...)
	return t
}

// Row adds a row. A text that would break out of its cell is quoted.
func (t *Table) Row(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = words.Name(fmt.Sprint(c))
	}
	t.rows = append(t.rows, row)
}

const (
	gap       = 3  // between two columns
	narrowest = 12 // to which a column is cut
)

// Flush writes the table, if it has rows below its header. It cuts the widest columns to fit Width, but none below narrowest.
func (t *Table) Flush() {
	if len(t.rows) == 1 {
		return
	}
	widths, total := make([]int, len(t.rows[0])), -gap
	for i := range widths {
		for _, row := range t.rows {
			widths[i] = max(widths[i], uniseg.StringWidth(row[i]))
		}
		total += widths[i] + gap
	}
	for ; t.Width > 0 && total > t.Width; total-- {
		widest := 0
		for i := range widths {
			if widths[i] > widths[widest] {
				widest = i
			}
		}
		if widths[widest] <= narrowest {
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

// JSON writes a value as JSON with indentation.
func JSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

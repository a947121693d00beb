package show

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/term"
)

// widthOf returns the number of columns of a terminal, and 0 for other files.
func widthOf(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil {
			return width
		}
	}
	return 0
}

// IsTerminal reports whether people see at once what is written.
func IsTerminal(w io.Writer) bool { return widthOf(w) > 0 }

// clearLine goes to the beginning of a terminal's line, which it empties.
const clearLine = "\r\x1b[K"

// A Progress shows people how work goes on by a line from time to time, on a terminal in place of the one
// before.
type Progress struct {
	every time.Duration // between lines
	shown time.Time     // the last line
	w     io.Writer
}

// NewProgress returns a progress with so much time between two lines, where there is no terminal. The
// first one is due at once.
func NewProgress(w io.Writer, every time.Duration) *Progress { return &Progress{every: every, w: w} }

// Show shows a line if it is due.
func (p *Progress) Show(line func() string) {
	if IsTerminal(p.w) || time.Since(p.shown) >= p.every {
		p.Line(line())
	}
}

// Line shows a line although none may be due.
func (p *Progress) Line(line string) {
	p.shown = time.Now()
	if width := widthOf(p.w); width > 0 {
		fmt.Fprint(p.w, clearLine+cut(line, width-1))
	} else {
		fmt.Fprintln(p.w, line)
	}
}

// Restart begins to wait for the next line.
func (p *Progress) Restart() { p.shown = time.Now() }

// Clear takes the line away from a terminal, until the next one.
func (p *Progress) Clear() {
	if IsTerminal(p.w) {
		fmt.Fprint(p.w, clearLine)
	}
}

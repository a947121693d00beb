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

// IsTerminal reports whether a writer is a terminal.
func IsTerminal(w io.Writer) bool { return widthOf(w) > 0 }

// clearLine empties the terminal's current line.
const clearLine = "\r\x1b[K"

// A Progress shows from time to time how far work is. On a terminal it is one line that changes, elsewhere each time
// a new line.
type Progress struct {
	every time.Duration // between lines, where there is no terminal
	shown time.Time     // when the last line was
	w     io.Writer
}

// NewProgress returns a progress that writes a line every so often, the first one at once.
func NewProgress(w io.Writer, every time.Duration) *Progress { return &Progress{every: every, w: w} }

// Show shows a line, on a terminal always, elsewhere if one is due.
func (p *Progress) Show(line func() string) {
	if width := widthOf(p.w); width > 0 {
		fmt.Fprint(p.w, clearLine+cut(line(), width-1))
	} else if time.Since(p.shown) >= p.every {
		p.Restart()
		fmt.Fprintln(p.w, line())
	}
}

// Restart makes the next line due when a full interval has passed.
func (p *Progress) Restart() { p.shown = time.Now() }

// Clear removes the line from a terminal, until the next line.
func (p *Progress) Clear() {
	if IsTerminal(p.w) {
		fmt.Fprint(p.w, clearLine)
	}
}

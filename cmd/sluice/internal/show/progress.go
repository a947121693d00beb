package show

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// IsTerminal reports whether people see at once what is written.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// A Progress shows people how work goes on: as a bar on a terminal, elsewhere as a line from time to
// time.
type Progress struct {
	bar   *progressbar.ProgressBar // nil elsewhere
	every time.Duration            // between lines
	shown time.Time                // the last line
	w     io.Writer
}

// NewProgress returns a progress with so much time between two lines. The first one is due at once.
func NewProgress(w io.Writer, every time.Duration) *Progress {
	p := &Progress{every: every, w: w}
	if IsTerminal(w) {
		p.bar = progressbar.NewOptions(1,
			progressbar.OptionSetWriter(w), progressbar.OptionShowCount(), progressbar.OptionSetWidth(30),
			progressbar.OptionSetPredictTime(false), progressbar.OptionClearOnFinish())
	}
	return p
}

// Show shows how much is done. The text is that of the bar. A line is only made if it is due.
func (p *Progress) Show(done, of int, text string, line func() string) {
	switch {
	case p.bar != nil:
		p.bar.ChangeMax(max(1, of))
		p.bar.Describe(text)
		_ = p.bar.Set(done)
	case time.Since(p.shown) >= p.every:
		p.Line(line())
	}
}

// Line shows a line although none may be due, unless there is a bar.
func (p *Progress) Line(line string) {
	if p.bar == nil {
		p.shown = time.Now()
		fmt.Fprintln(p.w, line)
	}
}

// Restart begins to wait for the next line.
func (p *Progress) Restart() { p.shown = time.Now() }

// Clear takes the bar away, until it is shown again.
func (p *Progress) Clear() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}

// Close takes the bar away for good.
func (p *Progress) Close() {
	p.Clear()
	p.bar = nil
}

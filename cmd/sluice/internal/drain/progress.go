package drain

import (
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/internal/words"
)

// showEvery is how often a terminal shows how the drain goes on.
const showEvery = 200 * time.Millisecond

// A Progress shows people how a drain goes on. It is safe for concurrent use.
type Progress struct {
	before int // done when it began
	mu     sync.Mutex
	shown  *show.Progress
	silent time.Time // until then a Redis that does not answer is known
	start  time.Time
	w      io.Writer
}

// NewProgress returns a progress with so much time between two lines, where there is no terminal.
func NewProgress(w io.Writer, every time.Duration) *Progress {
	return &Progress{shown: show.NewProgress(w, every), w: w}
}

// Logger returns a logger that writes among the lines.
func (p *Progress) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(p, nil)) }

// Begin notes where the drain begins.
func (p *Progress) Begin(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.before = c.Done()
	p.start = time.Now()
	p.shown.Restart()
}

// Show shows where the drain has come to, if it is time.
func (p *Progress) Show(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown.Show(func() string { return p.line(c) })
}

// End shows where the drain ended.
func (p *Progress) End(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown.Clear()
	fmt.Fprintln(p.w, p.line(c))
}

// Say prints a message of its own line.
func (p *Progress) Say(format string, args ...any) {
	fmt.Fprintf(p, "sluice: "+format+"\n", args...)
}

// Unanswered reports that Redis did not answer, once a minute.
func (p *Progress) Unanswered(err error) {
	p.mu.Lock()
	known := time.Now().Before(p.silent)
	if !known {
		p.silent = time.Now().Add(time.Minute)
	}
	p.mu.Unlock()
	if !known {
		p.Say("%v", err)
	}
}

// Write lets loggers write whole lines.
func (p *Progress) Write(line []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown.Clear()
	return p.w.Write(line)
}

// line says how far the drain is, how fast, and when all will be done at that rate.
func (p *Progress) line(c Counts) string {
	took := time.Since(p.start)
	text := fmt.Sprintf("%5.0fs  %d of %d jobs done, %d failed", took.Seconds(), c.Done(), c.Jobs, c.Failed)
	done, left := c.Done()-p.before, c.Jobs-c.Done()
	if done == 0 {
		return text
	}
	text += fmt.Sprintf(", %.3g a second", float64(done)/took.Seconds())
	if left == 0 {
		return text
	}
	return text + ", done in about " + words.Span(took*time.Duration(left)/time.Duration(done))
}

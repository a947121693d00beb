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

// showEvery is the time between two updates on a terminal.
const showEvery = 200 * time.Millisecond

// A Progress shows people how far a drain is. It is safe for concurrent use.
type Progress struct {
	w io.Writer

	mu          sync.Mutex
	doneBefore  int // jobs with a result when the drain began
	silentUntil time.Time
	shown       *show.Progress
	start       time.Time
}

// NewProgress returns a progress. The interval is that of show.NewProgress.
func NewProgress(w io.Writer, every time.Duration) *Progress {
	return &Progress{shown: show.NewProgress(w, every), w: w}
}

// Logger returns a logger whose messages appear between the lines of progress.
func (p *Progress) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(p, nil)) }

// Begin notes the counts with which the drain begins.
func (p *Progress) Begin(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.doneBefore = c.Done()
	p.start = time.Now()
	p.shown.Restart()
}

// Show shows the counts, if a line is due.
func (p *Progress) Show(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown.Show(func() string { return p.line(c) })
}

// End shows the counts with which the drain ends.
func (p *Progress) End(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown.Clear()
	fmt.Fprintln(p.w, p.line(c))
}

// Say prints a message on a line of its own.
func (p *Progress) Say(format string, args ...any) {
	fmt.Fprintf(p, "sluice: "+format+"\n", args...)
}

// Unanswered reports an error of Redis, unless it has reported one in the last minute.
func (p *Progress) Unanswered(err error) {
	p.mu.Lock()
	due := !time.Now().Before(p.silentUntil)
	if due {
		p.silentUntil = time.Now().Add(time.Minute)
	}
	p.mu.Unlock()
	if due {
		p.Say("%v", err)
	}
}

// Write writes a whole line of a log.
func (p *Progress) Write(line []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown.Clear()
	return p.w.Write(line)
}

// line returns the counts, the rate so far, and the time that the rest takes at that rate.
func (p *Progress) line(c Counts) string {
	took := time.Since(p.start)
	text := fmt.Sprintf("%5.0fs  %d of %d jobs done, %d failed", took.Seconds(), c.Done(), c.Jobs, c.Failed)
	done, left := c.Done()-p.doneBefore, c.Jobs-c.Done()
	if done == 0 {
		return text
	}
	text += fmt.Sprintf(", %.3g a second", float64(done)/took.Seconds())
	if left == 0 {
		return text
	}
	return text + ", done in about " + words.Span(time.Duration(took.Seconds()/float64(done)*float64(left)*float64(time.Second)))
}

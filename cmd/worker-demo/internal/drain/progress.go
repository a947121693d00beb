package drain

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
)

// A Progress shows people how a drain goes on: as a bar on a terminal, elsewhere as a line
// every few seconds. It is safe for concurrent use.
type Progress struct {
	bar     *progressbar.ProgressBar
	before  int           // done when it began
	every   time.Duration // between lines
	mu      sync.Mutex
	outlook Outlook
	shown   time.Time
	start   time.Time
	w       io.Writer
}

func NewProgress(w io.Writer, every time.Duration) *Progress {
	return &Progress{every: every, w: w}
}

// Logger returns a logger that writes among the lines.
func (p *Progress) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(p, nil)) }

// Begin shows where the drain begins.
func (p *Progress) Begin(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.before = c.Done()
	p.start = time.Now()
	p.shown = p.start
	if f, ok := p.w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.bar = progressbar.NewOptions(c.Jobs,
			progressbar.OptionSetWriter(f), progressbar.OptionShowCount(), progressbar.OptionSetWidth(30),
			progressbar.OptionSetPredictTime(false), progressbar.OptionClearOnFinish())
		p.showBar(c)
	}
}

// Expect keeps when the drain is expected to end, and shows it at once if that was unknown.
func (p *Progress) Expect(o Outlook, c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := p.outlook.At.IsZero() && !o.At.IsZero()
	p.outlook = o
	switch {
	case p.bar != nil:
		p.showBar(c)
	case first && c.Done() == p.before:
		p.line(c)
	}
}

// Show shows where the drain has come to, if it is time.
func (p *Progress) Show(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.bar != nil:
		p.showBar(c)
	case time.Since(p.shown) >= p.every:
		p.shown = time.Now()
		p.line(c)
	}
}

// End shows where the drain ended.
func (p *Progress) End(c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar != nil {
		p.bar.Clear()
		p.bar = nil
	}
	p.line(c)
}

// Say prints a message of its own line.
func (p *Progress) Say(format string, args ...any) {
	fmt.Fprintf(p, "worker-demo: "+format+"\n", args...)
}

// Write lets loggers write whole lines.
func (p *Progress) Write(line []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar != nil {
		p.bar.Clear()
	}
	return p.w.Write(line)
}

func (p *Progress) showBar(c Counts) {
	p.bar.Describe(fmt.Sprintf("%d failed, %d denials%s", c.Failed, c.Denials, p.rest(c)))
	p.bar.Set(c.Done())
}

func (p *Progress) line(c Counts) {
	fmt.Fprintf(p.w, "%5.0fs  %d of %d jobs done, %d failed, %d denials%s\n",
		time.Since(p.start).Seconds(), c.Done(), c.Jobs, c.Failed, c.Denials, p.rest(c))
}

// rest is the rate so far, and when all will be done: by the plan of what is open. Where that knows no
// answer, or only how long it takes at least, the rate counts too.
func (p *Progress) rest(c Counts) string {
	took := time.Since(p.start)
	text, left := "", time.Duration(0)
	if done := c.Done() - p.before; done > 0 && took > 0 {
		rate := float64(done) / took.Seconds()
		text = fmt.Sprintf(", %.3g a second", rate)
		if p.outlook.At.IsZero() || p.outlook.AtLeast {
			left = time.Duration(float64(c.Jobs-c.Done()) / rate * float64(time.Second))
		}
	} else if p.outlook.At.IsZero() {
		return ""
	}
	if c.Done() == c.Jobs {
		return text
	}
	if !p.outlook.At.IsZero() {
		left = max(left, time.Until(p.outlook.At))
	}
	layout := time.TimeOnly
	if left > 12*time.Hour {
		layout = "Jan 2 15:04"
	}
	return fmt.Sprintf("%s, done in about %s, at %s", text, show.Short(left.Round(time.Second)), time.Now().Add(left).Format(layout))
}

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

// A Progress tells people how a drain goes on: as a bar on a terminal, elsewhere as a line
// every few seconds. It is safe for concurrent use.
type Progress struct {
	atBest time.Duration // the whole, by the windows
	bar    *progressbar.ProgressBar
	before int           // done when it began
	every  time.Duration // between lines
	mu     sync.Mutex
	shown  time.Time
	start  time.Time
	w      io.Writer
}

func NewProgress(w io.Writer, every time.Duration) *Progress {
	return &Progress{every: every, w: w}
}

// Logger returns a logger that writes among the lines.
func (p *Progress) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(p, nil)) }

// Begin shows where the drain begins. By its windows it cannot end sooner than atBest from now.
func (p *Progress) Begin(c Counts, atBest time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.atBest, p.before = atBest, c.Done()
	p.start = time.Now()
	p.shown = p.start
	if f, ok := p.w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.bar = progressbar.NewOptions(c.Jobs,
			progressbar.OptionSetWriter(f), progressbar.OptionShowCount(), progressbar.OptionSetWidth(30),
			progressbar.OptionSetPredictTime(false), progressbar.OptionClearOnFinish())
		p.showBar(c)
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
	p.bar.Describe(fmt.Sprintf("%d failed, %d denials%s", c.Failed, c.Denials, p.outlook(c)))
	p.bar.Set(c.Done())
}

func (p *Progress) line(c Counts) {
	fmt.Fprintf(p.w, "%5.0fs  %d of %d jobs done, %d failed, %d denials%s\n",
		time.Since(p.start).Seconds(), c.Done(), c.Jobs, c.Failed, c.Denials, p.outlook(c))
}

// outlook is the rate so far and when all will be done.
func (p *Progress) outlook(c Counts) string {
	took := time.Since(p.start)
	done := c.Done() - p.before
	if done == 0 || took <= 0 {
		return ""
	}
	rate := float64(done) / took.Seconds()
	text := fmt.Sprintf(", %.3g a second", rate)
	if c.Done() == c.Jobs {
		return text
	}
	left := max(time.Duration(float64(c.Jobs-c.Done())/rate*float64(time.Second)), p.atBest-took)
	layout := time.TimeOnly
	if left > 12*time.Hour {
		layout = "Jan 2 15:04"
	}
	return fmt.Sprintf("%s, done in about %s, at %s", text, show.Short(left.Round(time.Second)), time.Now().Add(left).Format(layout))
}

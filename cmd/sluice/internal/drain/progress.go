package drain

import (
	"context"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

const (
	showEvery     = 200 * time.Millisecond
	expectEvery   = time.Second     // how often the rest is planned, or less if that takes long
	expectPart    = 20              // of all time
	expectTimeout = 5 * time.Second // of one plan
)

// An Outlook is when the last job is expected to start.
type Outlook struct {
	At      time.Time // zero if that is unknown
	AtLeast bool      // concurrency windows may delay it more: no plan knows how long calls take
}

// watch shows how the drain goes on until the context ends, with a forecast of the open jobs.
func (d *Drain) watch(ctx context.Context) {
	for next := time.Now(); ctx.Err() == nil; pause(ctx, showEvery) {
		if begun := time.Now(); !begun.Before(next) {
			d.Progress.Expect(d.outlook(ctx), d.Counts())
			next = time.Now().Add(max(expectEvery, expectPart*time.Since(begun)))
		}
		d.Progress.Show(d.Counts())
	}
}

// outlook forecasts the open jobs, by the line as it is now.
func (d *Drain) outlook(ctx context.Context) Outlook {
	d.mu.Lock()
	demands := Demands(d.Limiter, d.Queue, func(yield func(*jobs.Job) bool) {
		for _, w := range d.open {
			if !yield(w.job) {
				return
			}
		}
	})
	d.mu.Unlock()
	for i := range demands {
		demands[i].Joined = demands[i].Count // or they join in a moment
	}
	ctx, cancel := context.WithTimeout(ctx, expectTimeout)
	defer cancel()
	plan, err := inspect.Of(d.Limiter).Plan(ctx, demands, inspect.PlanOptions{})
	if err != nil || !plan.Known || len(demands) == 0 {
		return Outlook{}
	}
	return Outlook{At: plan.Expected, AtLeast: slices.ContainsFunc(d.Limiter.Policies(), func(p throttle.Policy) bool {
		return slices.ContainsFunc(p.Windows, func(w throttle.Window) bool { return w.Algorithm.Leases() })
	})}
}

// Demands returns what jobs ask of the lines of a limiter, equal ones together.
func Demands(limiter *throttle.Limiter, queue string, list iter.Seq[*jobs.Job]) []inspect.Demand {
	demands, indexes := []inspect.Demand{}, map[string]int{}
	for job := range list {
		policy, _ := limiter.Match(job.Type)
		key := fmt.Sprintf("%q %q %v", policy.Name, job.Tenant, job.Cost)
		i, known := indexes[key]
		if !known {
			i = len(demands)
			indexes[key] = i
			demands = append(demands, inspect.Demand{
				Queue: queue, Request: throttle.Request{Cost: job.Cost, Policy: policy.Name, Tenant: job.Tenant},
			})
		}
		demands[i].Count++
	}
	return demands
}

// A Progress shows people how a drain goes on. It is safe for concurrent use.
type Progress struct {
	before  int // done when it began
	mu      sync.Mutex
	outlook Outlook
	shown   *show.Progress
	silent  time.Time // until then a Redis that does not answer is known
	start   time.Time
	w       io.Writer
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

// Expect keeps when the drain is expected to end, and shows it at once if that was unknown.
func (p *Progress) Expect(o Outlook, c Counts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := p.outlook.At.IsZero() && !o.At.IsZero()
	p.outlook = o
	if first && c.Done() == p.before {
		p.shown.Line(p.line(c))
	}
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

func (p *Progress) line(c Counts) string {
	return fmt.Sprintf("%5.0fs  %d of %d jobs done, %d failed%s",
		time.Since(p.start).Seconds(), c.Done(), c.Jobs, c.Failed, p.rest(c))
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
	return fmt.Sprintf("%s, done in about %s", text, words.Span(left))
}

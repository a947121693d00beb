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
	"github.com/sluice-go/sluice/worker"
)

const (
	expectEvery   = time.Second     // how often the rest is planned, or less if that takes long
	expectPart    = 20              // of all time
	expectTimeout = 5 * time.Second // of one plan
)

// An Outlook is when the last job is expected to start.
type Outlook struct {
	At      time.Time // zero if that is unknown
	AtLeast bool      // concurrency windows may hold it up longer: no plan knows how long calls take
}

// expect forecasts the open jobs, again and again, until the context ends.
func (d *Drain) expect(ctx context.Context, client *worker.Client) {
	for {
		begun := time.Now()
		d.Progress.Expect(d.outlook(ctx, client), d.Counts())
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(expectEvery, expectPart*time.Since(begun))):
		}
	}
}

// outlook forecasts the open jobs, by the line as it is now.
func (d *Drain) outlook(ctx context.Context, client *worker.Client) Outlook {
	d.mu.Lock()
	demands := Demands(d.Limiter, d.Queue, func(yield func(*jobs.Job) bool) {
		for id := range d.open {
			if !yield(d.jobs[id]) {
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
	plan, err := client.Plan(ctx, demands, inspect.PlanOptions{})
	if err != nil || !plan.Known || len(demands) == 0 {
		return Outlook{}
	}
	return Outlook{At: plan.Expected, AtLeast: slices.ContainsFunc(d.Limiter.Policies(), func(p throttle.Policy) bool {
		return slices.ContainsFunc(p.Windows, func(w throttle.Window) bool { return w.Algorithm.Leases() })
	})}
}

// Demands returns what jobs ask of the lines of a limiter, equal ones together. Jobs that never wait
// in a line are left out.
func Demands(limiter *throttle.Limiter, queue string, list iter.Seq[*jobs.Job]) []inspect.Demand {
	demands, of := []inspect.Demand{}, map[string]int{}
	for job := range list {
		info, ok := limiter.Match(job.Type)
		if !ok || info.Requeue == throttle.RequeueEarliestReset {
			continue
		}
		key := fmt.Sprintf("%q %q %v", info.Name, job.Tenant, job.Cost)
		i, known := of[key]
		if !known {
			i = len(demands)
			of[key] = i
			demands = append(demands, inspect.Demand{
				Queue: queue, Request: throttle.Request{Cost: job.Cost, Policy: info.Name, Tenant: job.Tenant},
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

// Write lets loggers write whole lines.
func (p *Progress) Write(line []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown.Clear()
	return p.w.Write(line)
}

func (p *Progress) line(c Counts) string {
	return fmt.Sprintf("%5.0fs  %d of %d jobs done, %d failed, %d denials%s",
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
	return fmt.Sprintf("%s, done in about %s", text, words.Span(left))
}

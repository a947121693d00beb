package drain

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A Lesson is what a drain learnt about an API that refused calls of a window.
type Lesson struct {
	Policy    string    `json:"policy"`
	Window    string    `json:"window"`
	Unit      string    `json:"unit"`
	Tenants   int       `json:"tenants"` // that were refused; 0 if all tenants share the limit
	Refusals  int64     `json:"refusals"`
	Since     time.Time `json:"since"`
	Published float64   `json:"published_per_second"`
	Allowed   *float64  `json:"allowed_per_second"` // nil if too few calls were made since
	Fits      *Fit      `json:"would_fit"`          // nil like Allowed
}

// A Fit is the window that grants what an API allows.
type Fit struct {
	Algorithm throttle.Algorithm `json:"algorithm"`
	Burst     int64              `json:"burst"`
	Limit     int64              `json:"limit"`
	PeriodMS  float64            `json:"period_ms"`
}

// fewest is how many calls must have succeeded after a refusal to say what an API allows.
const fewest = 10

// nearly is the part of the published rate from which on an API seems to allow all of it.
const nearly = 0.93

// A Learnt gathers what a drain learns. A nil Learnt learns nothing.
type Learnt struct {
	policies map[string]throttle.Policy

	mu   sync.Mutex
	seen map[string]map[string]*experience // by policy and tenant, which is "" if all share the count
}

type experience struct {
	adapted  throttle.Adapted // at the first refusal
	refusals int64
	answered []success // since
}

// A success is a call that was answered.
type success struct {
	at   time.Time
	cost int64
}

// NewLearnt returns a Learnt for jobs of these policies.
func NewLearnt(policies []throttle.Policy) *Learnt {
	l := &Learnt{policies: map[string]throttle.Policy{}, seen: map[string]map[string]*experience{}}
	for _, p := range policies {
		l.policies[p.Name] = p.WithDefaults()
	}
	return l
}

// whose is the tenant whose count a call is about.
func (l *Learnt) whose(policy, tenant string) string {
	if l.policies[policy].Upstream == throttle.UpstreamShared {
		return ""
	}
	return tenant
}

// Refused learns of a refusal.
func (l *Learnt) Refused(r throttle.Refusal) {
	l.mu.Lock()
	defer l.mu.Unlock()
	seen, tenant := l.seen[r.Policy], l.whose(r.Policy, r.Tenant)
	if seen == nil {
		seen = map[string]*experience{}
		l.seen[r.Policy] = seen
	}
	if seen[tenant] == nil && r.Adapted != nil {
		seen[tenant] = &experience{adapted: *r.Adapted}
	}
	if e := seen[tenant]; e != nil {
		e.refusals++
	}
}

// answered learns that the call of a job succeeded.
func (l *Learnt) answered(ctx context.Context) {
	d, ok := worker.FromContext(ctx).Decision()
	if l == nil || !ok {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.seen[d.Policy][l.whose(d.Policy, d.Tenant)]
	if e == nil {
		return
	}
	cost, ok := d.Reservation.Request.Cost[e.adapted.Unit]
	if !ok && e.adapted.Unit == throttle.Requests {
		cost = 1
	}
	e.answered = append(e.answered, success{time.Now(), cost})
}

// allowed returns the units per second that the API allowed in the later half of the calls, as it
// takes some refusals to find the rate.
func (e *experience) allowed() (perSecond float64, ok bool) {
	n := len(e.answered)
	if n < fewest {
		return 0, false
	}
	units := int64(0)
	for _, call := range e.answered[n/2:] {
		units += call.cost
	}
	took := e.answered[n-1].at.Sub(e.answered[n/2-1].at).Seconds()
	return min(float64(units)/took, e.adapted.Published), took > 0
}

// lessons returns one lesson for each policy whose calls were refused, by name. Where tenants have
// limits of their own, it is about the one in the middle.
func (l *Learnt) lessons() []Lesson {
	lessons := []Lesson{}
	if l == nil {
		return lessons
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, policy := range slices.Sorted(maps.Keys(l.seen)) {
		var lesson *Lesson
		var rates []float64
		largest := int64(1)
		for tenant, e := range l.seen[policy] {
			if lesson == nil {
				lesson = &Lesson{
					Policy: policy, Window: e.adapted.Window, Unit: e.adapted.Unit,
					Published: show.Round(e.adapted.Published), Since: e.adapted.Since,
				}
			}
			lesson.Refusals += e.refusals
			if e.adapted.Since.Before(lesson.Since) {
				lesson.Since = e.adapted.Since
			}
			if tenant != "" {
				lesson.Tenants++
			}
			if rate, ok := e.allowed(); ok {
				rates = append(rates, rate)
			}
			for _, call := range e.answered {
				largest = max(largest, call.cost)
			}
		}
		if lesson == nil {
			continue
		}
		if len(rates) > 0 {
			slices.Sort(rates)
			lesson.learn(l.policies[policy], rates[(len(rates)-1)/2], largest)
		}
		lessons = append(lessons, *lesson)
	}
	return lessons
}

// learn sets what the API seems to allow, and the window that fits it: without bursts, and with the
// published limit or less of it.
func (s *Lesson) learn(p throttle.Policy, rate float64, largest int64) {
	i := slices.IndexFunc(p.Windows, func(w throttle.Window) bool { return w.Name == s.Window })
	if i < 0 {
		return
	}
	w := p.Windows[i]
	if full := s.Published * w.Period.Seconds() / (w.Period + w.Margin).Seconds(); rate >= nearly*full {
		rate = s.Published
	}
	s.Allowed = new(show.Round(rate))
	period, limit := w.Period, int64(math.Floor(rate*w.Period.Seconds()+1e-9))
	if limit < fewest && rate < s.Published { // a whole number would be too coarse
		limit = w.Limit
		period = time.Duration(math.Ceil(float64(limit)/rate*1000)) * time.Millisecond
	}
	s.Fits = &Fit{Algorithm: throttle.AlgorithmGCRA, Burst: largest, Limit: max(1, limit), PeriodMS: show.Milliseconds(period)}
}

// PrintLessons prints what was learnt.
func PrintLessons(w io.Writer, lessons []Lesson) {
	for _, s := range lessons {
		fmt.Fprintf(w, "policy %s, window %s: the API refused %d calls", s.Policy, s.Window, s.Refusals)
		if s.Tenants > 0 {
			fmt.Fprintf(w, " of %d tenants", s.Tenants)
		}
		if s.Fits == nil {
			fmt.Fprintln(w, ": too few succeeded since to say what it allows")
			continue
		}
		allows := fmt.Sprintf("%.3g/s of %.3g/s", *s.Allowed, s.Published)
		if *s.Allowed >= s.Published {
			allows = fmt.Sprintf("%.3g/s, but no bursts", s.Published)
		}
		fmt.Fprintf(w, ": it seems to allow %s.\n", allows)
		fits, period := s.Fits, show.Short(time.Duration(s.Fits.PeriodMS*1e6))
		fmt.Fprintf(w, "  This window would fit: {name: %s, algorithm: %s, limit: %d, period: %s, burst: %d}\n",
			s.Window, fits.Algorithm, fits.Limit, period, fits.Burst)
	}
}

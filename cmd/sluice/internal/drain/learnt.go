package drain

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// A Lesson says that an API refused calls within the limits of a policy, and what was granted then.
type Lesson struct {
	Policy   string           `json:"policy"`
	Refusals int64            `json:"refusals"`
	Adapted  throttle.Adapted `json:"adapted"` // by the last one that changed the rate
}

// A Learnt gathers what a drain learns. The zero value has learnt nothing.
type Learnt struct {
	mu       sync.Mutex
	byPolicy map[string]*Lesson
}

// Refused learns of a refusal.
func (l *Learnt) Refused(r throttle.Refusal) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byPolicy == nil {
		l.byPolicy = map[string]*Lesson{}
	}
	s := l.byPolicy[r.Policy]
	if s == nil {
		s = &Lesson{Policy: r.Policy}
		l.byPolicy[r.Policy] = s
	}
	s.Refusals++
	if r.Adapted != nil {
		s.Adapted = *r.Adapted
	}
}

// lessons returns one lesson for each policy whose rate was changed, by name.
func (l *Learnt) lessons() []Lesson {
	lessons := []Lesson{}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, policy := range slices.Sorted(maps.Keys(l.byPolicy)) {
		if s := l.byPolicy[policy]; s.Adapted.Window != "" {
			lessons = append(lessons, *s)
		}
	}
	return lessons
}

// Print says what was learnt, and which window would grant that, evenly.
func (s Lesson) Print(w io.Writer) {
	limit, period := int64(1), time.Duration(float64(time.Second)/s.Adapted.Rate).Round(time.Millisecond)
	if s.Adapted.Rate >= 10 {
		limit, period = int64(s.Adapted.Rate), time.Second
	}
	a := s.Adapted
	fmt.Fprintf(w, "policy %s, window %s: the API refused %d calls: %s\n", s.Policy, a.Window, s.Refusals, a)
	fmt.Fprintf(w, "  This grants as much, evenly: {name: %s, algorithm: %s, limit: %d, period: %v, burst: 1, unit: %s}\n",
		a.Window, throttle.AlgorithmGCRA, limit, period, a.Unit)
}

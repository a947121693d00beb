package drain

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/throttle"
)

// A WindowUse is the most units that one window counted for one scope, by the throttle's
// decisions.
type WindowUse struct {
	Policy   string  `json:"policy"`
	Window   string  `json:"window"`
	Scope    string  `json:"scope"`
	Limit    int64   `json:"limit"`
	PeriodMS float64 `json:"period_ms"`
	MaxUsed  int64   `json:"max_used"`
}

// Windows keep what decisions say of windows. The zero value knows of none. They are safe for
// concurrent use.
type Windows struct {
	mu   sync.Mutex
	used map[windowOf]WindowUse
}

type windowOf struct{ policy, window, scope string }

// Note learns of a decision.
func (ws *Windows) Note(d throttle.Decision) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.used == nil {
		ws.used = map[windowOf]WindowUse{}
	}
	for _, w := range d.Windows {
		key := windowOf{d.Policy, w.Name, w.Scope.String()}
		ws.used[key] = WindowUse{
			Policy: key.policy, Window: key.window, Scope: key.scope,
			Limit: w.Limit, MaxUsed: max(w.Used, ws.used[key].MaxUsed), PeriodMS: show.Milliseconds(w.Period),
		}
	}
}

// List returns all of them, in the order of the limiter's policies.
func (ws *Windows) List(limiter *throttle.Limiter) []WindowUse {
	order := map[string]int{}
	for _, p := range limiter.Policies() {
		for _, w := range p.Windows {
			order[p.Name+"/"+w.Name] = len(order)
		}
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	list := slices.AppendSeq([]WindowUse{}, maps.Values(ws.used))
	place := func(u WindowUse) int { return order[u.Policy+"/"+u.Window] }
	slices.SortFunc(list, func(a, b WindowUse) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(a.Scope, b.Scope))
	})
	return list
}

// PrintWindows prints, for every window, the scope that came nearest to its limit.
func PrintWindows(w io.Writer, windows []WindowUse) {
	if len(windows) == 0 {
		return
	}
	t := show.Table(w)
	fmt.Fprintln(t, "WINDOW\tLIMIT\tMOST USED\tBY\tSCOPES")
	for rest := windows; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(u WindowUse) bool {
			return u.Window != rest[0].Window || u.Policy != rest[0].Policy
		})
		if n < 0 {
			n = len(rest)
		}
		u := slices.MaxFunc(rest[:n], func(a, b WindowUse) int {
			return cmp.Compare(float64(a.MaxUsed)/float64(a.Limit), float64(b.MaxUsed)/float64(b.Limit))
		})
		period := show.Short(time.Duration(u.PeriodMS * 1e6))
		fmt.Fprintf(t, "%s/%s\t%d per %s\t%d\t%s\t%d\n", u.Policy, u.Window, u.Limit, period, u.MaxUsed, u.Scope, n)
		rest = rest[n:]
	}
	t.Flush()
}

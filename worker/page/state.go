package page

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/usage"
)

// How much trouble something is in. Only trouble has a colour.
const (
	fine  = iota
	watch // it passes without help
	act   // it needs a person
)

// askedWithin is the time within which a queue's server asks for its tasks while some wait.
const askedWithin = 3 * time.Second

// A status is the state of a policy or tenant in a few words. The page shows Word in bold, and How after it. So Word
// has the punctuation between them, such as "Saturated," before "2 tenants starve".
type status struct {
	Trouble   int
	Full      bool // a policy is kept busy by what waits, or a tenant's window is full
	Word, How string
	Filters   []string // of a tenant: the keys of the filters that let it through
}

// Text is a policy's status for headlines, where trouble has a colon for its comma: "Saturated: 2 tenants starve".
func (s status) Text() string {
	word := s.Word
	if before, found := strings.CutSuffix(word, ","); found && s.Trouble != fine {
		word = before + ":"
	}
	return strings.TrimSpace(word + " " + s.How)
}

// Class is the status's class in the style sheet.
func (s status) Class() string {
	if s.Trouble == fine && s.Full {
		return "full"
	}
	return []string{fine: "", watch: "watch", act: "act"}[s.Trouble]
}

// A policyView is a policy in the list. What its state tells of Tenants is of one page of them.
type policyView struct {
	inspect.PolicyState
	Error    string // why the state is not known, or not up to date
	FailOpen bool
	NoServer string // a queue that no server asks for: it does not drain without help
	Status   status
	// From the history:
	Granted float64 // per second: in the last whole minute, or else by its windows
	History string  // the points of a chart
	Refused int64   // in the last hour
	Trend   int64   // how many more wait than a minute ago
	// From the tenants:
	Starving []inspect.State
	Longest  time.Duration // how long the oldest ticket has waited
	Oldest   inspect.State // whose ticket that is
	Drains   time.Time     // when the last ticket starts if nothing new joins; zero if it is not known
	// From the windows that all tenants share:
	Window *throttle.WindowState // the fullest, which binds; nil if there is none
	Limit  string                // of throttle.Requests, such as "of 10"; "own limits" if no window is shared; else ""
	// From operators:
	TenantsPaused []throttle.Pause // tenants' pauses by operators
}

// policy asks for the state of one policy, and describes it.
func (p *Page) policy(ctx context.Context, v *view, q inspect.Query) policyView {
	q.Limit = tenantsAtOnce
	state, err := p.state(ctx, q, v.Asked.Like)
	pv := policyView{PolicyState: state}
	pv.Policy = q.Policy // also if its state is not known
	if err != nil {
		pv.Error = sentence(err.Error())
	}
	info, _ := p.config.Limiter.Lookup(q.Policy)
	pv.FailOpen = info.FailOpen
	pv.Starving = p.starvation.Note(state)
	pv.readHistory(v.history[q.Policy])
	hasAllTenants := pv.Next == "" && q.After == "" && v.Asked.Like == ""
	pv.readTenants(hasAllTenants)
	pv.readWindows()
	for _, pause := range v.InForce.Pauses {
		switch {
		case pause.Policy != pv.Policy:
		case pause.Tenant != "":
			pv.TenantsPaused = append(pv.TenantsPaused, pause)
		case pv.Pause == nil || pause.Until.After(pv.Pause.Until): // the state knows of no longer one
			pv.Pause = &pause
		}
	}
	if !p.isUnserved(ctx, &pv) {
		pv.Status = pv.policyStatus()
	}
	return pv
}

// readHistory reads the points of the last hour, one a minute. The last is under way, and is no whole minute.
func (pv *policyView) readHistory(points []usage.Point) {
	pv.History = sparkOf(points)
	for _, point := range points[max(0, len(points)-60):] {
		pv.Refused += point.Refused
	}
	if n := len(points); n >= 3 && points[n-2].Known {
		whole, before := points[n-2], points[n-3]
		pv.Granted = float64(whole.Granted) / usage.Step.Seconds()
		if before.Known {
			pv.Trend = whole.Waiting - before.Waiting
		}
	}
	pv.Granted = cmp.Or(pv.Granted, pv.PerSecond)
}

// readTenants finds who waits longest, and when the line drains. If only some tenants are known, it drains at the
// rate at which it is granted now.
func (pv *policyView) readTenants(hasAll bool) {
	for _, t := range pv.Tenants {
		if waited := pv.At.Sub(t.Oldest); !t.Oldest.IsZero() && waited > pv.Longest {
			pv.Longest, pv.Oldest = waited, t
		}
		if hasAll && t.Expected.After(pv.Drains) {
			pv.Drains = t.Expected
		}
	}
	if !hasAll && pv.Granted > 0 {
		pv.Drains = pv.At.Add(time.Duration(float64(pv.Waiting) / pv.Granted * float64(time.Second)))
	}
}

// readWindows finds the fullest window, and the limit on requests.
func (pv *policyView) readWindows() {
	fullest := -1.0
	for i, w := range pv.Windows {
		if part := float64(w.Used) / float64(max(1, w.Burst)); part > fullest {
			fullest, pv.Window = part, &pv.Windows[i]
		}
		if w.Unit == throttle.Requests && w.Period > 0 && pv.Limit == "" {
			pv.Limit = "of " + rounded(float64(w.Limit)/w.Period.Seconds())
		}
	}
	if len(pv.Windows) == 0 {
		pv.Limit = "own limits"
	}
}

// isUnserved reports whether tasks wait in a queue from which no server takes, and then sets the status.
func (p *Page) isUnserved(ctx context.Context, pv *policyView) bool {
	for _, q := range pv.Queues {
		askedLately := q.Served && pv.At.Sub(q.Asked) < askedWithin
		if q.Queue == "" || q.Waiting == 0 || askedLately { // calls that wait in place have no queue
			continue
		}
		queue := queueName(q.Queue)
		if p.isPaused(ctx, queue) {
			pv.Status = status{Trouble: watch, Word: "Queue paused:", How: name(queue) + ", by asynq’s tools"}
			return true
		}
		if !q.Served {
			pv.NoServer = queue
			pv.Status = status{Trouble: act, Word: "No server", How: "asks for queue " + name(queue)}
			if q.Asked.Year() > 1970 { // else the time is not known
				pv.Status.How += " since " + clock(q.Asked, pv.At)
			}
			return true
		}
	}
	return false
}

// policyStatus describes a policy whose queues are served.
func (pv *policyView) policyStatus() status {
	full := pv.Window != nil && pv.Window.Remaining == 0
	unknown := pv.At.IsZero() || pv.Error != "" && pv.Waiting == 0 && len(pv.Windows) == 0
	shortOfHandlers := slices.ContainsFunc(pv.Queues, func(q inspect.QueueState) bool { return q.Binds != "" })
	ownLimits := slices.ContainsFunc(pv.Tenants, func(t inspect.State) bool { return len(t.Windows) > 0 })
	switch {
	case unknown:
		return status{Trouble: act, Word: "Unknown"}
	case pv.Pause != nil:
		source := "by the upstream"
		if pv.Pause.ByHand {
			source = "by " + short(pv.Pause.Author)
		}
		return status{Trouble: watch, Word: "Paused until " + clock(pv.Pause.Until, pv.At), How: source}
	case len(pv.Starving) == 1:
		return status{Trouble: watch, Full: full, Word: "Saturated,", How: "1 tenant starves"}
	case len(pv.Starving) > 1:
		return status{Trouble: watch, Full: full, Word: "Saturated,", How: fmt.Sprintf("%d tenants starve", len(pv.Starving))}
	case isSlow(pv.Adapted):
		a := pv.Adapted
		return status{Trouble: watch, Word: "Adapting:",
			How: fmt.Sprintf("%s of %s per s, until %s", rounded(a.Rate), rounded(a.Published), clock(a.Until, pv.At))}
	case pv.Removed:
		return status{Full: pv.Waiting > 0, Word: "Removed:", How: "what waits goes on by its last windows"}
	case pv.Observes:
		return status{Word: "Observing,", How: "denies nothing"}
	case pv.Waiting == 0:
		return status{Word: "Flowing"}
	case shortOfHandlers:
		return status{Trouble: watch, Full: true, Word: "Short of handlers:", How: "more workers would use the limit"}
	case full:
		return status{Full: true, Word: "Saturated"}
	case ownLimits:
		return status{Full: true, Word: "Saturated", How: "by tenants’ own limits"}
	}
	return status{Full: true, Word: "Waiting"}
}

// isSlow reports whether refusals have lowered a rate below half, as the alert SluiceRateLowered does. After
// a refusal or two calls are only spread, and the rate recovers by itself: that is no trouble.
func isSlow(a *throttle.Adapted) bool { return a != nil && a.Rate < a.Published/2 }

// tenantStatus describes a tenant in one queue and class.
func (pv *policyView) tenantStatus(v *view, t inspect.State) status {
	paused, override := v.byHand(pv.Policy, t.Tenant)
	if paused != nil {
		return status{Trouble: watch, Word: "Paused until " + clock(paused.Until, pv.At), How: "by " + short(paused.Author),
			Filters: []string{"paused"}}
	}
	starves := slices.ContainsFunc(pv.Starving, func(s inspect.State) bool {
		return s.Tenant == t.Tenant && s.Queue == t.Queue && s.Class == t.Class
	})
	if starves {
		return status{Trouble: watch, Word: "Starves:", How: "its queue or class gives way", Filters: []string{"starving"}}
	}
	var how []string
	st := status{Word: "Flowing"}
	if override != nil {
		how, st.Filters = append(how, "override until "+clock(override.Until, pv.At)), []string{"overridden"}
	}
	if t.Exempt {
		how = append(how, "exempt")
	}
	st.How = strings.Join(how, ", ")
	switch {
	case t.Pause != nil:
		st.Trouble, st.Word = watch, "Paused until "+clock(t.Pause.Until, pv.At)
		st.Filters = append(st.Filters, "paused")
	case slices.ContainsFunc(t.Windows, func(w throttle.WindowState) bool { return w.Remaining == 0 }):
		st.Full, st.Word = true, "Full"
		st.Filters = append(st.Filters, "full")
	case t.Waiting == 0:
		st.Word = "Idle"
	}
	if st.How != "" && st.Trouble == fine {
		st.Word += ","
	}
	return st
}

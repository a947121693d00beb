package page

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

// How much trouble something is in. Only trouble has a colour.
const (
	fine  = iota
	watch // it passes without help
	act   // it needs a person
)

const starves = "Starves:" // the Word of a tenant that inspect.StarvationDetector finds

// askedWithin is the time within which a queue's server asks for its tasks while some wait.
const askedWithin = 3 * time.Second

// A status is the state of a policy or tenant: its trouble, a word, and what to add.
type status struct {
	Trouble   int
	Full      bool // a policy is kept busy by what waits, or a tenant's window is full
	Word, How string
}

// Text is the status in plain words. Word may end in a comma or colon: the page shows it in bold before How.
func (s status) Text() string {
	word := s.Word
	if s.Trouble != fine || s.How == "" {
		word = strings.TrimRight(word, ",:")
	}
	if s.How == "" || word != strings.TrimRight(word, ",:") || strings.HasPrefix(s.How, "by ") || strings.HasPrefix(s.How, "asks ") {
		return strings.TrimSpace(word + " " + s.How)
	}
	return word + ": " + s.How
}

// Class is the status's class in the style sheet.
func (s status) Class() string {
	switch {
	case s.Trouble == act:
		return "act"
	case s.Trouble == watch:
		return "watch"
	case s.Full:
		return "full"
	}
	return ""
}

// A policyView is a policy in the list.
type policyView struct {
	inspect.PolicyState
	Error    string // why the state is not known, or not up to date
	FailOpen bool
	Granted  float64 // per second: in the last whole minute, or else by its windows
	Limit    string  // of throttle.Requests, by a shared window
	History  string  // the points of a chart
	Status   status
	Trend    int64 // how many more wait than a minute ago
	Drains   time.Time
	Stuck    bool // it does not drain without help
	Longest  time.Duration
	Oldest   inspect.State // whose ticket waits longest
	Window   *throttle.WindowState
	Starving []inspect.State
	ByHand   []throttle.Pause // of its tenants
	Refused  int64            // in the last hour
	NoServer string           // a queue that no server asks for
}

// policy describes the state of one policy.
func (p *Page) policy(ctx context.Context, v *view, q inspect.Query) policyView {
	q.Limit = tenantsAtOnce
	state, err := p.state(ctx, q, v.Asked.Like)
	pv := policyView{PolicyState: state}
	pv.Policy = q.Policy
	if err != nil {
		pv.Error = sentence(err.Error())
	}
	info, _ := p.config.Limiter.Lookup(q.Policy)
	pv.FailOpen = info.FailOpen
	points := v.history[q.Policy]
	pv.History = sparkOf(points)
	for _, point := range points[max(0, len(points)-60):] {
		pv.Refused += point.Refused
	}
	if n := len(points); n >= 3 && points[n-2].Known {
		pv.Granted = float64(points[n-2].Granted) / 60
		if points[n-3].Known {
			pv.Trend = points[n-2].Waiting - points[n-3].Waiting
		}
	}
	pv.Granted = cmp.Or(pv.Granted, pv.PerSecond)
	pv.Starving = p.starvation.Note(state)
	for _, t := range pv.Tenants {
		if !t.Oldest.IsZero() && pv.At.Sub(t.Oldest) > pv.Longest {
			pv.Longest, pv.Oldest = pv.At.Sub(t.Oldest), t
		}
		if t.Expected.After(pv.Drains) {
			pv.Drains = t.Expected
		}
	}
	if pv.Next != "" || q.After != "" || v.Asked.Like != "" { // more wait than are shown
		pv.Drains = time.Time{}
		if pv.Granted > 0 {
			pv.Drains = pv.At.Add(time.Duration(float64(pv.Waiting) / pv.Granted * float64(time.Second)))
		}
	}
	for _, pause := range v.InForce.Pauses {
		switch {
		case pause.Policy == q.Policy && pause.Tenant != "":
			pv.ByHand = append(pv.ByHand, pause)
		case pause.Policy == q.Policy && (pv.Pause == nil || pause.Until.After(pv.Pause.Until)):
			pv.Pause = &pause
		}
	}
	pv.bind()
	for _, qs := range pv.Queues {
		queue := queueName(qs.Queue)
		switch {
		case qs.Queue == "" || qs.Waiting == 0 || qs.Served && pv.At.Sub(qs.Asked) < askedWithin:
		case p.isPaused(ctx, queue):
			pv.Status = status{Trouble: watch, Word: "Queue paused:", How: name(queue) + ", by asynq’s tools"}
			return pv
		case !qs.Served:
			pv.NoServer, pv.Stuck = queue, true
			pv.Status = status{Trouble: act, Word: "No server", How: "asks for queue " + name(queue)}
			if !qs.Asked.IsZero() && qs.Asked.Year() > 1970 {
				pv.Status.How += " since " + clock(qs.Asked, pv.At)
			}
			return pv
		}
	}
	pv.Status = pv.status()
	return pv
}

// isPaused reports whether asynq's tools have paused a queue: no server takes from it.
func (p *Page) isPaused(ctx context.Context, queue string) bool {
	if p.config.Inspector == nil {
		return false
	}
	info, err := remember(&p.asynq, ctx, "paused\x00"+queue, func(context.Context) (*asynq.QueueInfo, error) {
		return p.config.Inspector.GetQueueInfo(queue)
	})
	return err == nil && info.Paused
}

// bind sets the window that binds, the fullest one, and the limit on requests.
func (pv *policyView) bind() {
	most := -1.0
	for i, w := range pv.Windows {
		if part := float64(w.Used) / float64(max(1, w.Burst)); part > most {
			most, pv.Window = part, &pv.Windows[i]
		}
		if w.Unit == throttle.Requests && w.Period > 0 && pv.Limit == "" {
			pv.Limit = "of " + perSecond(float64(w.Limit)/w.Period.Seconds())
		}
	}
	if pv.Limit == "" && len(pv.Windows) == 0 {
		pv.Limit = "own limits"
	}
}

// status describes the policy in a word.
func (pv *policyView) status() status {
	starving := ""
	if n := len(pv.Starving); n > 0 {
		starving = fmt.Sprintf("%d tenant%s", n, map[bool]string{true: " starves", false: "s starve"}[n == 1])
	}
	switch full := pv.Window != nil && pv.Window.Remaining == 0; {
	case pv.At.IsZero() || pv.Error != "" && pv.Waiting == 0 && len(pv.Windows) == 0:
		return status{Trouble: act, Word: "Unknown"}
	case pv.Pause != nil:
		source := "by the upstream"
		if pv.Pause.ByHand {
			source = "by " + short(pv.Pause.Author)
		}
		return status{Trouble: watch, Word: "Paused until " + clock(pv.Pause.Until, pv.At), How: source}
	case starving != "":
		return status{Trouble: watch, Full: full, Word: "Saturated,", How: starving}
	case isSlow(pv.Adapted):
		a := pv.Adapted
		return status{Trouble: watch, Word: "Adapting:",
			How: fmt.Sprintf("%s of %s per s, until %s", perSecond(a.Rate), perSecond(a.Published), clock(a.Until, pv.At))}
	case pv.Removed:
		return status{Full: pv.Waiting > 0, Word: "Removed:", How: "what waits goes on by its last windows"}
	case pv.Observes:
		return status{Word: "Observing,", How: "denies nothing"}
	case pv.Waiting > 0 && slices.ContainsFunc(pv.Queues, func(q inspect.QueueState) bool { return q.Binds != "" }):
		return status{Trouble: watch, Full: true, Word: "Short of handlers:", How: "more workers would use the limit"}
	case pv.Waiting > 0 && full:
		return status{Full: true, Word: "Saturated"}
	case pv.Waiting > 0 && slices.ContainsFunc(pv.Tenants, func(t inspect.State) bool { return len(t.Windows) > 0 }):
		return status{Full: true, Word: "Saturated", How: "by tenants’ own limits"}
	case pv.Waiting > 0:
		return status{Full: true, Word: "Waiting"}
	}
	return status{Word: "Flowing"}
}

// isSlow reports whether refusals have lowered a rate below half, as the alert SluiceRateLowered does. After
// a refusal or two calls are only spread, and the rate recovers by itself: that is no trouble.
func isSlow(a *throttle.Adapted) bool { return a != nil && a.Rate < a.Published/2 }

// tenant describes a tenant in a word.
func (pv *policyView) tenant(v view, t inspect.State) status {
	for _, pause := range v.InForce.Pauses {
		if pause.Policy == pv.Policy && pause.Tenant == t.Tenant {
			return status{Trouble: watch, Word: "Paused until " + clock(pause.Until, pv.At), How: "by " + short(pause.Author)}
		}
	}
	var how []string
	for _, o := range v.InForce.Overrides {
		if o.Policy == pv.Policy && o.Tenant == t.Tenant {
			how = append(how, "override until "+clock(o.Until, pv.At))
		}
	}
	if t.Exempt {
		how = append(how, "exempt")
	}
	st := status{Word: "Flowing", How: strings.Join(how, ", ")}
	switch {
	case slices.ContainsFunc(pv.Starving, func(s inspect.State) bool {
		return s.Tenant == t.Tenant && s.Queue == t.Queue && s.Class == t.Class
	}):
		st = status{Trouble: watch, Word: starves, How: "its queue or class gives way"}
	case t.Pause != nil:
		st.Trouble, st.Word = watch, "Paused until "+clock(t.Pause.Until, pv.At)
	case slices.ContainsFunc(t.Windows, func(w throttle.WindowState) bool { return w.Remaining == 0 }):
		st.Full, st.Word = true, "Full"
	case t.Waiting == 0:
		st.Word = "Idle"
	}
	if st.How != "" && st.Trouble == fine {
		st.Word += ","
	}
	return st
}

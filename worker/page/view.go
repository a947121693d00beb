package page

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/usage"
)

const (
	policiesAtOnce = 50 // in the list of policies
	tenantsAtOnce  = 50 // in the list of a policy's tenants
	changesAtOnce  = 20 // of the log

	tenantsSearched = 5000 // the most, for a part of a name
)

// A question has the parameters in the address of the page.
type question struct {
	After  string // inspect.Query.After: where a page of Policy's tenants begins
	Find   string // a task's ID, a tenant's or policy's name
	From   string // the first policy in the list
	Like   string // a part of tenants' names
	Only   string // the key of a filter of tenants
	Policy string // the chosen one; if empty, all are listed
	Queue  string // of Task
	Sort   string // by what the list is sorted; if empty, by trouble
	Span   string // of the charts
	Task   string // by its ID
	Tenant string // of Policy
	done   string // what has just been changed: a key of notices
}

func questionOf(r *http.Request) question {
	q := r.URL.Query()
	return question{
		After: q.Get("after"), Find: strings.TrimSpace(q.Get("find")), From: q.Get("from"), Like: q.Get("like"),
		Only: q.Get("only"), Policy: q.Get("policy"), Queue: q.Get("queue"), Sort: q.Get("sort"), Span: q.Get("span"),
		Task: q.Get("task"), Tenant: q.Get("tenant"), done: q.Get("done"),
	}
}

// Link returns the address of the page of this policy with one parameter set anew.
func (q question) Link(name, value string) string {
	query := url.Values{
		"policy": {q.Policy}, "tenant": {q.Tenant}, "only": {q.Only}, "like": {q.Like}, "sort": {q.Sort}, "span": {q.Span},
	}
	maps.DeleteFunc(query, func(_ string, values []string) bool { return values[0] == "" })
	query.Set(name, value)
	return "./?" + query.Encode()
}

// A view has the data that the templates show: Found if that is set, else Chosen if that is, else the list of policies.
type view struct {
	Asked      question
	At         time.Time
	Asynqmon   string   // its address; "" if tasks link nowhere
	Session    *session // nil if nobody is signed in
	CanSignIn  bool
	HasControl bool
	Title      string // of the browser's tab, before "Sluice"; may be ""
	// Of the page alone, not of its news:
	NewsQuery string   // the query with which the browser asks for news
	Notice    string   // what has been done
	Problem   string   // what could not be done
	Preview   *preview // what is to be confirmed
	// Of the page and its news; nil if there is none:
	Down   *down // while Redis does not answer
	Found  *foundView
	Chosen *chosenView
	// The list of policies:
	Headline                headline
	Waiting, Trend, Refused int64      // sums of its policies'
	Slowest                 policyView // of its policies, the one that makes somebody wait longest; zero if nobody waits
	Workers                 *workers   // nil if they are not known
	OtherPolicies           string     // what processes run besides the published policies; "" if that is no trouble
	Groups                  []group
	FirstList               bool   // it begins with the first policy
	NextFrom                string // question.From of the next list; "" if this is the last
	controlled
	history map[string][]usage.Point // by policy, of the last hour
}

// controlled is what a control.Store tells. Without a store it is empty.
type controlled struct {
	InForce   control.State
	Changes   []control.Change    // the newest
	processes map[string][]string // names, by the policies that they run: as control.Store.Processes
}

// byHand returns what operators have put in force for a tenant or, for "", for a policy: nil where there is nothing.
func (c controlled) byHand(policy, tenant string) (paused *throttle.Pause, override *throttle.TenantOverride) {
	for _, pause := range c.InForce.Pauses {
		if pause.Policy == policy && pause.Tenant == tenant {
			paused = &pause
		}
	}
	for _, o := range c.InForce.Overrides {
		if o.Policy == policy && o.Tenant == tenant {
			override = &o
		}
	}
	return paused, override
}

// A headline is the worst trouble, with the first policies that are in trouble. Without trouble it has only a Text.
type headline struct {
	Class, Text string
	More        []policyView
}

type workers struct{ Servers, Slots, Busy int64 } // the servers of asynq, and their slots for handlers

// A group lists policies that are in the same trouble.
type group struct {
	Name, Note string
	Policies   []policyView
}

// A down is an outage of Redis, as the page shows it.
type down struct {
	Since, LastGood time.Time // since when it lasts, and when Redis answered last
	FailsOpen       []string  // policies that run without limits meanwhile
}

var notices = map[string]string{
	control.Overridden: "The override is in force.",
	control.Cleared:    "The override has ended.",
	control.Paused:     "The pause has begun.",
	control.Resumed:    "The pause has ended.",
	control.WasReset:   "The windows were reset.",
	control.Dropped:    "The tasks were dropped.",
	stillDropping:      "The drop is under way. Look how many tasks wait, and drop them again if they stay.",
	setLimit:           "The limit is set.",
	front:              "The tenant goes first.",
	"in":               "You are signed in.",
	"out":              "You are signed out.",
}

// view collects the answer to the question, as far as Redis answers in time.
func (p *Page) view(ctx context.Context, q question, s *session) view {
	ctx, cancel := context.WithTimeout(ctx, viewWithin)
	defer cancel()
	v := view{
		Asked: q, At: time.Now(), Asynqmon: p.config.Asynqmon, Session: s, CanSignIn: p.guard != nil && s == nil,
		HasControl: p.config.Control != nil, Notice: notices[q.done],
	}
	all := slices.Sorted(slices.Values(inspect.Of(p.config.Limiter).Policies()))
	shown := []string{q.Policy}
	if q.Policy == "" {
		begin, _ := slices.BinarySearch(all, q.From)
		end := min(begin+policiesAtOnce, len(all))
		shown, v.FirstList = all[begin:end], begin == 0
		if end < len(all) {
			v.NextFrom = all[end]
		}
	}
	var reads sync.WaitGroup
	reads.Go(func() { v.controlled = p.inForce(ctx) })
	reads.Go(func() { v.history = p.points(ctx, shown, time.Hour) })
	reads.Wait()
	switch {
	case q.Find != "" || q.Task != "":
		v.Found = p.find(ctx, q, all)
		v.Title = "Search"
	case q.Policy != "":
		v.Chosen = p.chosen(ctx, &v)
		v.Title = name(q.Policy) + ": " + v.Chosen.Status.Text()
	default:
		p.home(ctx, &v, shown)
	}
	if since, lastGood := p.limiterAnswers.outage(); !since.IsZero() {
		v.Title, v.Down = "Redis does not answer", &down{Since: since, LastGood: lastGood}
		for _, policy := range p.config.Limiter.Policies() {
			if policy.FailOpen {
				v.Down.FailsOpen = append(v.Down.FailsOpen, policy.Name)
			}
		}
	}
	return v
}

// home shows the policies of one list, in order of their trouble.
func (p *Page) home(ctx context.Context, v *view, names []string) {
	policies := make([]policyView, len(names))
	var err error
	var reads sync.WaitGroup
	reads.Go(func() { v.Workers, err = p.workers(ctx) })
	for i, name := range names {
		reads.Go(func() { policies[i] = p.policy(ctx, v, inspect.Query{Policy: name}) })
	}
	reads.Wait()
	policies = slices.DeleteFunc(policies, func(pv policyView) bool { return pv.Removed && pv.Waiting == 0 })
	slices.SortFunc(policies, func(a, b policyView) int {
		return cmp.Or(cmp.Compare(b.Status.Trouble, a.Status.Trouble), cmp.Compare(b.Longest, a.Longest), cmp.Compare(a.Policy, b.Policy))
	})
	v.headline(policies)
	if err != nil {
		v.Workers = nil // from an earlier answer
		v.Headline.Class, v.Headline.Text = "act", "The Redis of the queues: "+err.Error()
	}
	if v.Headline.Class != "" {
		v.Title = v.Headline.Text
	}
	v.sum(policies)
	v.OtherPolicies = v.otherPolicies()
	switch v.Asked.Sort {
	case "name":
		slices.SortFunc(policies, func(a, b policyView) int { return cmp.Compare(a.Policy, b.Policy) })
	case "waiting":
		slices.SortStableFunc(policies, func(a, b policyView) int { return cmp.Compare(b.Waiting, a.Waiting) })
	}
	groups := []group{
		fine:  {Name: "Fine", Note: "nothing to do"},
		watch: {Name: "Watch", Note: "gets by without you"},
		act:   {Name: "Needs you", Note: "does not get by alone"},
	}
	for _, pv := range policies {
		g := &groups[pv.Status.Trouble]
		g.Policies = append(g.Policies, pv)
	}
	slices.Reverse(groups) // the worst first
	if v.Asked.Sort != "" {
		groups = []group{{Name: "All", Policies: policies}}
	}
	v.Groups = slices.DeleteFunc(groups, func(g group) bool { return len(g.Policies) == 0 })
}

// headline sets the headline. The policies are in order of their trouble. It works on a copy, as the list shows all.
func (v *view) headline(policies []policyView) {
	troubled := slices.DeleteFunc(slices.Clone(policies), func(pv policyView) bool { return pv.Status.Trouble == fine })
	switch {
	case len(troubled) > 0:
		worst := troubled[0]
		v.Headline = headline{Class: worst.Status.Class(), More: troubled[:min(len(troubled), 5)]}
		v.Headline.Text = name(worst.Policy) + ": " + worst.Status.Text()
	case v.FirstList && v.NextFrom == "":
		v.Headline.Text = "Nothing needs you"
	default: // other lists may have trouble
		v.Headline.Text = "None of these policies needs you"
	}
}

// sum fills the strip's sums over the policies.
func (v *view) sum(policies []policyView) {
	for _, pv := range policies {
		v.Waiting, v.Trend, v.Refused = v.Waiting+pv.Waiting, v.Trend+pv.Trend, v.Refused+pv.Refused
		if pv.Longest > v.Slowest.Longest {
			v.Slowest = pv
		}
	}
}

// otherPolicies tells which processes run policies other than the published. If nothing is published, all run policies
// of their own: these are told only if they differ.
func (v *view) otherPolicies() string {
	var others []string
	for _, policies := range slices.Sorted(maps.Keys(v.processes)) {
		if policies != fmt.Sprint("published version ", v.InForce.Version) {
			others = append(others, fmt.Sprintf("%d of the processes: %s", len(v.processes[policies]), policies))
		}
	}
	if v.InForce.Version == 0 && len(others) == 1 {
		return ""
	}
	return strings.Join(others, "; ")
}

func trendOf(perMinute int64) string {
	switch {
	case perMinute > 0:
		return "▲ " + number(perMinute) + "/min"
	case perMinute < 0:
		return "▼ " + number(-perMinute) + "/min"
	}
	return ""
}

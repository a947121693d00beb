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

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/words"
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
	After  string // a page of tenants of Policy
	Find   string // a task's ID, a tenant's or policy's name
	From   string // the first policy in the list
	Like   string // a part of tenants' names
	Only   string // the key of a filter of tenants
	Policy string
	Queue  string // of Task
	Sort   string
	Span   string // of the charts
	Task   string // by its ID
	Tenant string // of Policy
	done   string // what has just been changed
}

func questionOf(r *http.Request) question {
	q := r.URL.Query()
	return question{
		After: q.Get("after"), Find: strings.TrimSpace(q.Get("find")), From: q.Get("from"), Like: q.Get("like"),
		Only: q.Get("only"), Policy: q.Get("policy"), Queue: q.Get("queue"), Sort: q.Get("sort"), Span: q.Get("span"),
		Task: q.Get("task"), Tenant: q.Get("tenant"), done: q.Get("done"),
	}
}

// A view has the data that the templates show.
type view struct {
	Asked      question
	At         time.Time
	Asynqmon   string
	Session    *session // nil if nobody is signed in
	CanSignIn  bool
	HasControl bool
	News       string // the query for news of the page
	Notice     string // of what has been done
	Problem    string // of what could not be done
	Title      string

	Headline headline
	Strip    []fact
	Groups   []group // of the list of policies
	From     string  // the first policy of the next list; "" at its end
	First    bool    // it is the first list
	Chosen   *chosenView
	Found    *foundView
	Preview  *preview
	Down     *down

	controlled

	history map[string][]usage.Point
}

// controlled has what operators have put in force, the newest changes, and the processes by the policies they run.
type controlled struct {
	InForce   control.State
	Changes   []control.Change
	processes map[string][]string
}

// A headline is the worst trouble, with the first policies that are in trouble.
type headline struct {
	Class, Text string
	More        []policyView
}

// A fact is a number in the strip.
type fact struct{ Name, Value, Class, Note string }

// A group lists policies that are in the same trouble.
type group struct {
	Name, Note string
	Policies   []policyView
}

// A down is an outage of Redis, as the page shows it.
type down struct {
	Since, Good time.Time // since when, and when it answered last
	Open        []string  // policies that run without limits
}

// A chosenView is one policy, in detail.
type chosenView struct {
	policyView
	Charts    *charts
	Used      []usage.Use              // in the last hour, of all tenants
	Tenant    string                   // if set, only this tenant is shown
	LastState *inspect.State           // its tickets that are expected to start last
	Tickets   int64                    // its tickets that wait, in all queues
	Override  *throttle.TenantOverride // of Tenant, or if none is chosen for all
	Paused    *throttle.Pause          // of Tenant, or if none is chosen of the policy
	Rows      []tenantRow
	Filters   []filter
	Config    throttle.Policy
}

// A tenantRow is a tenant in the list.
type tenantRow struct {
	inspect.State
	Status status
}

// A filter of the list of tenants lets N of them through.
type filter struct {
	Key, Name string
	N         int
}

var notices = map[string]string{
	control.Overridden: "The override is in force.",
	control.Cleared:    "The override has ended.",
	control.Paused:     "The pause has begun.",
	control.Resumed:    "The pause has ended.",
	control.WasReset:   "The windows were reset.",
	control.Dropped:    "The tasks were dropped.",
	dropping:           "The drop is under way. Look how many tasks wait, and drop them again if they stay.",
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
		HasControl: p.config.Control != nil, Notice: notices[q.done], Title: "Sluice",
	}
	names := slices.Sorted(slices.Values(inspect.Of(p.config.Limiter).Policies()))
	var all sync.WaitGroup
	all.Go(func() { v.controlled = p.inForce(ctx) })
	list := names
	from, _ := slices.BinarySearch(names, q.From)
	if v.First = from == 0; q.Policy == "" {
		if list = names[from:]; len(list) > policiesAtOnce {
			v.From, list = list[policiesAtOnce], list[:policiesAtOnce]
		}
	} else {
		list = []string{q.Policy}
	}
	all.Go(func() { v.history = p.points(ctx, list, time.Hour) })
	all.Wait()
	switch {
	case q.Find != "" || q.Task != "":
		v.Found = p.find(ctx, q, names)
		v.Title = "Search · Sluice"
	case q.Policy != "":
		v.Chosen = p.chosen(ctx, &v)
		v.Title = name(q.Policy) + ": " + v.Chosen.Status.Text() + " · Sluice"
	default:
		p.home(ctx, &v, list)
	}
	if since, good := p.recent.outage(); !since.IsZero() {
		v.Down = &down{Since: since, Good: good, Open: p.open()}
		v.Title = "Redis does not answer · Sluice"
	}
	return v
}

// open returns the policies that run without limits while Redis does not answer.
func (p *Page) open() (names []string) {
	for _, policy := range p.config.Limiter.Policies() {
		if policy.FailOpen {
			names = append(names, policy.Name)
		}
	}
	return names
}

func (p *Page) servers(ctx context.Context) ([]*asynq.ServerInfo, error) {
	if p.config.Inspector == nil {
		return nil, nil
	}
	return remember(&p.asynq, ctx, "servers", func(context.Context) ([]*asynq.ServerInfo, error) {
		return p.config.Inspector.Servers()
	})
}

// home shows the policies of one list, in order of their trouble.
func (p *Page) home(ctx context.Context, v *view, names []string) {
	policies := make([]policyView, len(names))
	var servers []*asynq.ServerInfo
	var err error
	var all sync.WaitGroup
	all.Go(func() { servers, err = p.servers(ctx) })
	for i, name := range names {
		all.Go(func() { policies[i] = p.policy(ctx, v, inspect.Query{Policy: name}) })
	}
	all.Wait()
	policies = slices.DeleteFunc(policies, func(pv policyView) bool { return pv.Removed && pv.Waiting == 0 })
	slices.SortFunc(policies, func(a, b policyView) int {
		return cmp.Or(cmp.Compare(b.Status.Trouble, a.Status.Trouble), cmp.Compare(b.Longest, a.Longest), cmp.Compare(a.Policy, b.Policy))
	})
	v.headline(policies)
	if err != nil {
		servers = nil // they are from an earlier answer
		v.Headline = headline{Class: "act", More: v.Headline.More, Text: "The Redis of the queues: " + err.Error()}
		v.Title = v.Headline.Text + " · Sluice"
	}
	v.strip(policies, servers)
	switch v.Asked.Sort {
	case "name":
		slices.SortFunc(policies, func(a, b policyView) int { return cmp.Compare(a.Policy, b.Policy) })
	case "waiting":
		slices.SortStableFunc(policies, func(a, b policyView) int { return cmp.Compare(b.Waiting, a.Waiting) })
	}
	groups := []group{{Name: "Needs you", Note: "does not get by alone"}, {Name: "Watch", Note: "gets by without you"}, {Name: "Fine", Note: "nothing to do"}}
	for _, pv := range policies {
		g := &groups[act-pv.Status.Trouble] // the worst first
		g.Policies = append(g.Policies, pv)
	}
	if v.Asked.Sort != "" {
		groups = []group{{Name: "All", Policies: policies}}
	}
	v.Groups = slices.DeleteFunc(groups, func(g group) bool { return len(g.Policies) == 0 })
}

// headline sets the headline: the worst trouble. The policies are in order of their trouble.
func (v *view) headline(policies []policyView) {
	troubled := slices.DeleteFunc(slices.Clone(policies), func(pv policyView) bool { return pv.Status.Trouble == fine })
	if len(troubled) == 0 {
		v.Headline.Text = map[bool]string{true: "Nothing needs you", false: "None of these policies needs you"}[v.First && v.From == ""]
		return
	}
	first := troubled[0]
	v.Headline = headline{Class: first.Status.Class(), More: troubled[:min(len(troubled), 5)]}
	v.Headline.Text = name(first.Policy) + ": " + first.Status.Text()
	v.Title = v.Headline.Text + " · Sluice"
}

// strip fills the strip with sums over the policies of the list.
func (v *view) strip(policies []policyView, servers []*asynq.ServerInfo) {
	var waiting, trend, refused int64
	var oldest policyView
	for _, pv := range policies {
		waiting, trend, refused = waiting+pv.Waiting, trend+pv.Trend, refused+pv.Refused
		if pv.Longest > oldest.Longest {
			oldest = pv
		}
	}
	v.Strip = []fact{{Name: "Waiting", Value: number(waiting), Note: trendOf(trend)}}
	longest := fact{Name: "Longest wait", Value: "none"}
	if oldest.Longest > 0 {
		longest.Value, longest.Note = words.Span(oldest.Longest), name(oldest.Policy)+", "+short(oldest.Oldest.Tenant)
	}
	v.Strip = append(v.Strip, longest, fact{Name: "Refusals, last hour", Value: number(refused)})
	if servers != nil {
		slots, busy := 0, 0
		for _, s := range servers {
			slots, busy = slots+s.Concurrency, busy+len(s.ActiveWorkers)
		}
		f := fact{Name: "Workers", Value: number(int64(len(servers))), Note: number(int64(busy)) + " of " + number(int64(slots)) + " slots busy"}
		if len(servers) == 0 {
			f.Class, f.Note = "act", "none is there"
		}
		v.Strip = append(v.Strip, f)
	}
	if v.HasControl {
		f, allowed := fact{Name: "Policies", Value: "none published"}, 1 // how many other policies are no trouble
		if v.InForce.Version > 0 {
			f.Value, allowed = "version "+number(v.InForce.Version), 0
		}
		var others []string
		for _, runs := range slices.Sorted(maps.Keys(v.processes)) {
			if runs != fmt.Sprint("published version ", v.InForce.Version) {
				others = append(others, fmt.Sprintf("%d of the processes: %s", len(v.processes[runs]), runs))
			}
		}
		if len(others) > allowed {
			f.Class, f.Note = "watch", strings.Join(others, "; ")
		}
		v.Strip = append(v.Strip, f)
	}
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

// chosen describes the policy that the question asks for.
func (p *Page) chosen(ctx context.Context, v *view) *chosenView {
	q := v.Asked
	c := &chosenView{Tenant: q.Tenant}
	for _, policy := range append(p.config.Limiter.Policies(), v.InForce.Removed...) {
		if policy.Name == q.Policy {
			c.Config = policy
		}
	}
	c.policyView = p.policy(ctx, v, inspect.Query{After: q.After, Policy: q.Policy, Tenant: q.Tenant})
	span := spans[0]
	for _, s := range spans {
		if s.Name == q.Span {
			span = s
		}
	}
	c.Charts = chartsOf(p.points(ctx, []string{q.Policy}, span.Length)[q.Policy], span.Name, c.policyView)
	if q.Tenant == "" {
		c.Used, _ = remember(&p.recent, ctx, "used\x00"+q.Policy, func(ctx context.Context) ([]usage.Use, error) {
			return usage.Top(ctx, p.config.Limiter, q.Policy, 10)
		})
	}
	for i, pause := range v.InForce.Pauses {
		if pause.Policy == q.Policy && pause.Tenant == q.Tenant {
			c.Paused = &v.InForce.Pauses[i]
		}
	}
	for i, o := range v.InForce.Overrides {
		if o.Policy == q.Policy && o.Tenant == q.Tenant {
			c.Override = &v.InForce.Overrides[i]
		}
	}
	for i, t := range c.Tenants {
		if q.Tenant != "" && (i == 0 || t.Expected.After(c.LastState.Expected)) {
			c.LastState = &c.Tenants[i]
		}
		c.Tickets += t.Waiting
	}
	c.tenants(*v)
	return c
}

// tenants filters and sorts the tenants that are shown.
func (c *chosenView) tenants(v view) {
	matches := map[string]func(tenantRow) bool{
		"starving":   func(r tenantRow) bool { return r.Status.Word == starves },
		"paused":     func(r tenantRow) bool { return strings.HasPrefix(r.Status.Word, "Paused") },
		"overridden": func(r tenantRow) bool { return strings.Contains(r.Status.How, "override") },
		"full":       func(r tenantRow) bool { return r.Status.Full },
	}
	var rows []tenantRow
	for _, t := range c.Tenants {
		rows = append(rows, tenantRow{t, c.tenant(v, t)})
	}
	c.Filters = []filter{{"", "All", len(rows)}}
	for _, key := range []string{"starving", "paused", "overridden", "full"} {
		n := 0
		for _, r := range rows {
			if matches[key](r) {
				n++
			}
		}
		c.Filters = append(c.Filters, filter{key, sentence(key), n})
	}
	only := matches[v.Asked.Only]
	c.Rows = slices.DeleteFunc(rows, func(r tenantRow) bool { return only != nil && !only(r) })
	slices.SortStableFunc(c.Rows, func(a, b tenantRow) int {
		switch v.Asked.Sort {
		case "name":
			return cmp.Compare(a.Tenant, b.Tenant)
		case "waiting":
			return cmp.Compare(b.Waiting, a.Waiting)
		case "longest":
			return a.Oldest.Compare(b.Oldest)
		case "last":
			return b.Expected.Compare(a.Expected)
		}
		return cmp.Or(cmp.Compare(b.Status.Trouble, a.Status.Trouble), a.Oldest.Compare(b.Oldest))
	})
}

// inForce reads what is in force from the store, if there is one.
func (p *Page) inForce(ctx context.Context) controlled {
	if p.config.Control == nil {
		return controlled{}
	}
	got, _ := remember(&p.recent, ctx, "control", func(ctx context.Context) (c controlled, err error) {
		if c.InForce, err = p.config.Control.State(ctx); err == nil {
			c.Changes, err = p.config.Control.Changes(ctx, changesAtOnce)
		}
		if err == nil {
			c.processes, err = p.config.Control.Processes(ctx)
		}
		return c, err
	})
	return got
}

// state asks the limiter. With a part of a name it searches more tenants for names with that part.
func (p *Page) state(ctx context.Context, r inspect.Query, like string) (inspect.PolicyState, error) {
	key := strings.Join([]string{"state", r.Policy, r.After, r.Tenant, like}, "\x00")
	return remember(&p.recent, ctx, key, func(ctx context.Context) (found inspect.PolicyState, err error) {
		if like != "" {
			r.Limit = 0 // the most
		}
		for looked := 0; ; {
			page, err := inspect.Of(p.config.Limiter).State(ctx, r)
			if err != nil {
				return page, err
			}
			looked += len(page.Tenants)
			other := func(t inspect.State) bool { return !strings.Contains(t.Tenant, like) }
			page.Tenants = append(found.Tenants, slices.DeleteFunc(page.Tenants, other)...)
			found = page
			if r.After = page.Next; like == "" || r.After == "" || len(found.Tenants) >= tenantsAtOnce || looked >= tenantsSearched {
				return found, nil
			}
		}
	})
}

// Link returns the address of the page with these parameters set, pairs of name and value, and the others as they are.
func (q question) Link(pairs ...string) string {
	query := url.Values{}
	for key, value := range map[string]string{
		"policy": q.Policy, "tenant": q.Tenant, "only": q.Only, "like": q.Like, "sort": q.Sort, "span": q.Span,
	} {
		if value != "" {
			query.Set(key, value)
		}
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		query.Set(pairs[i], pairs[i+1])
	}
	return "./?" + query.Encode()
}

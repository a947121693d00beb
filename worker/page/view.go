package page

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/usage"
)

const (
	policiesAtOnce = 20 // in the list of policies
	tenantsAtOnce  = 50 // in that of a policy's tenants
	changesAtOnce  = 20 // of the log
)

// A question is what is asked for in the address of the page.
type question struct {
	After  string // a page of tenants of Policy
	Find   string // a task's ID or a tenant's name
	From   string // the first policy in the list
	Policy string
	Queue  string // of Task
	Task   string // by its ID
	Tenant string // of Policy
	done   string // what has just been changed
}

func questionOf(r *http.Request) question {
	q := r.URL.Query()
	return question{
		After: q.Get("after"), Find: strings.TrimSpace(q.Get("find")), From: q.Get("from"), Policy: q.Get("policy"),
		Queue: q.Get("queue"), Task: q.Get("task"), Tenant: q.Get("tenant"), done: q.Get("done"),
	}
}

// A view is what the templates show.
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

	Policies []policyView
	From     string // the first policy of the next list; "" at its end
	First    bool   // it is the first list
	Chosen   *chosenView
	Found    *foundView

	InForce      control.State
	InForceError string
	Changes      []control.Change
}

// A policyView is a policy in the list.
type policyView struct {
	inspect.PolicyState
	Name   string
	Error  string                  // why State is not known
	Paused *throttle.OperatorPause // of the whole policy, by hand
}

// A chosenView is one policy, in detail.
type chosenView struct {
	policyView
	Charts   []chart
	Used     []usage.Use // in the last hour, of all tenants
	Tenant   string      // only this one is shown
	Own      *inspect.TenantState
	Override *throttle.TenantOverride // of Tenant
	Held     *throttle.OperatorPause  // of Tenant
	Limits   []throttle.Window        // that can be overridden for a tenant
}

var notices = map[string]string{
	control.Overridden: "The override is in force.",
	control.Cleared:    "The override has ended.",
	control.Paused:     "The pause has begun.",
	control.Resumed:    "The pause has ended.",
	"in":               "You are signed in.",
	"out":              "You are signed out.",
}

// view collects what is asked for.
func (p *Page) view(ctx context.Context, q question, s *session) view {
	v := view{
		Asked: q, At: time.Now(), Asynqmon: p.config.Asynqmon, Session: s, CanSignIn: p.guard != nil && s == nil,
		HasControl: p.config.Control != nil, Notice: notices[q.done],
	}
	v.InForce, v.Changes, v.InForceError = p.inForce(ctx)
	policies := p.config.Limiter.Policies()
	slices.SortFunc(policies, func(a, b throttle.Policy) int { return cmp.Compare(a.Name, b.Name) })
	from, _ := slices.BinarySearchFunc(policies, q.From, func(p throttle.Policy, name string) int {
		return cmp.Compare(p.Name, name)
	})
	v.First = from == 0
	list := policies[from:]
	if len(list) > policiesAtOnce {
		v.From, list = list[policiesAtOnce].Name, list[:policiesAtOnce]
	}
	for _, policy := range list {
		v.Policies = append(v.Policies, p.policy(ctx, v, inspect.Query{Policy: policy.Name}))
	}
	if q.Policy != "" {
		v.Chosen = p.chosen(ctx, v, policies)
	}
	if q.Find != "" || q.Task != "" {
		v.Found = p.find(ctx, q, policies)
	}
	return v
}

// policy describes how one policy stands.
func (p *Page) policy(ctx context.Context, v view, r inspect.Query) policyView {
	r.Limit = tenantsAtOnce
	state, err := p.state(ctx, r)
	pv := policyView{PolicyState: state, Name: r.Policy}
	if err != nil {
		pv.Error = said(err)
	}
	pv.Paused = pauseOf(v.InForce.Pauses, r.Policy, "")
	pv.Pause = besides(pv.Pause, pv.Paused)
	return pv
}

// besides leaves out a pause that an operator's own is: a limiter that follows Control shows it too.
func besides(pause *throttle.Pause, own ...*throttle.OperatorPause) *throttle.Pause {
	for _, p := range own {
		if p != nil && pause != nil && pause.ByHand && pause.By == p.By {
			return nil
		}
	}
	return pause
}

func pauseOf(pauses []throttle.OperatorPause, policy, tenant string) *throttle.OperatorPause {
	for i := range pauses {
		if pauses[i].Policy == policy && pauses[i].Tenant == tenant {
			return &pauses[i]
		}
	}
	return nil
}

// chosen describes the policy that is asked for.
func (p *Page) chosen(ctx context.Context, v view, policies []throttle.Policy) *chosenView {
	q := v.Asked
	c := &chosenView{Tenant: q.Tenant}
	c.policyView = p.policy(ctx, v, inspect.Query{After: q.After, Policy: q.Policy, Tenant: q.Tenant})
	c.Charts = p.history.charts(q.Policy, v.At)
	if q.Tenant == "" {
		p.used(ctx, c)
		return c
	}
	c.Held = pauseOf(v.InForce.Pauses, q.Policy, q.Tenant)
	if len(c.Tenants) > 0 {
		own := c.Tenants[0] // others are shown the same state
		own.Pause = besides(own.Pause, c.Held, c.Paused)
		c.Own = &own
	}
	for i, o := range v.InForce.Overrides {
		if o.Policy == q.Policy && o.Tenant == q.Tenant {
			c.Override = &v.InForce.Overrides[i]
		}
	}
	for _, policy := range policies {
		if policy.Name != q.Policy {
			continue
		}
		for _, w := range policy.Windows {
			if slices.Contains(w.Scope.Attributes(), throttle.TenantAttribute) {
				c.Limits = append(c.Limits, w)
			}
		}
	}
	return c
}

// used lists who was granted most by the policy.
func (p *Page) used(ctx context.Context, c *chosenView) {
	if p.config.Used == nil || c.Error != "" {
		return
	}
	used, err := remember(&p.recent, ctx, "used\x00"+c.Name, func(ctx context.Context) ([]usage.Use, error) {
		return p.config.Used(ctx, c.Name)
	})
	if err != nil {
		c.Error = said(err)
	}
	c.Used = used
}

// inForce returns what operators have put in force, and the newest changes.
func (p *Page) inForce(ctx context.Context) (state control.State, changes []control.Change, problem string) {
	if p.config.Control == nil {
		return state, nil, ""
	}
	type both struct {
		state   control.State
		changes []control.Change
	}
	got, err := remember(&p.recent, ctx, "control", func(ctx context.Context) (b both, err error) {
		if b.state, err = p.config.Control.State(ctx); err == nil {
			b.changes, err = p.config.Control.Changes(ctx, "", changesAtOnce)
		}
		return b, err
	})
	if err != nil {
		problem = said(err)
	}
	return got.state, got.changes, problem
}

// state asks the limiter, and notes what it says for the charts.
func (p *Page) state(ctx context.Context, r inspect.Query) (inspect.PolicyState, error) {
	key := strings.Join([]string{"state", r.Policy, r.After, r.Tenant}, "\x00")
	return remember(&p.recent, ctx, key, func(ctx context.Context) (inspect.PolicyState, error) {
		s, err := inspect.Of(p.config.Limiter).State(ctx, r)
		if err == nil && r.After == "" && r.Tenant == "" {
			p.history.note(s, time.Now())
		}
		return s, err
	})
}

// said is an error in the words of the page.
func said(err error) string { return sentence(err.Error()) }

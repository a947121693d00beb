package page

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	policiesAtOnce = 20 // in the list of policies
	tenantsAtOnce  = 50 // in that of a policy's tenants
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
}

func questionOf(r *http.Request) question {
	q := r.URL.Query()
	return question{
		After: q.Get("after"), Find: strings.TrimSpace(q.Get("find")), From: q.Get("from"), Policy: q.Get("policy"),
		Queue: q.Get("queue"), Task: q.Get("task"), Tenant: q.Get("tenant"),
	}
}

// A view is what the templates show.
type view struct {
	Asked    question
	At       time.Time
	Asynqmon string

	Policies []policyView
	From     string // the first policy of the next list; "" at its end
	First    bool   // it is the first list
	Chosen   *chosenView
	Found    *foundView
}

// A policyView is a policy in the list.
type policyView struct {
	throttle.PolicyState
	Name  string
	Error string // why State is not known
}

// A chosenView is one policy, in detail.
type chosenView struct {
	policyView
	Charts []chart
	Tenant string // only this one is shown
	Own    *throttle.TenantState
}

// view collects what is asked for.
func (p *Page) view(ctx context.Context, q question) view {
	v := view{Asked: q, At: time.Now(), Asynqmon: p.config.Asynqmon}
	policies := p.config.Limiter.Policies()
	slices.SortFunc(policies, func(a, b throttle.Policy) int { return cmp.Compare(a.Name, b.Name) })
	from, _ := slices.BinarySearchFunc(policies, q.From, func(a throttle.Policy, name string) int { return cmp.Compare(a.Name, name) })
	v.First = from == 0
	list := policies[from:]
	if len(list) > policiesAtOnce {
		v.From, list = list[policiesAtOnce].Name, list[:policiesAtOnce]
	}
	for _, policy := range list {
		v.Policies = append(v.Policies, p.policy(ctx, throttle.StateRequest{Policy: policy.Name}))
	}
	if q.Policy != "" {
		v.Chosen = p.chosen(ctx, v)
	}
	if q.Find != "" || q.Task != "" {
		v.Found = p.find(ctx, q, policies)
	}
	return v
}

// policy tells how one policy stands.
func (p *Page) policy(ctx context.Context, r throttle.StateRequest) policyView {
	r.Limit = tenantsAtOnce
	state, err := p.state(ctx, r)
	pv := policyView{PolicyState: state, Name: r.Policy}
	if err != nil {
		pv.Error = said(err)
	}
	return pv
}

// chosen tells all about the policy that is asked for.
func (p *Page) chosen(ctx context.Context, v view) *chosenView {
	q := v.Asked
	c := &chosenView{Tenant: q.Tenant}
	c.policyView = p.policy(ctx, throttle.StateRequest{After: q.After, Policy: q.Policy, Tenant: q.Tenant})
	c.Charts = p.history.charts(q.Policy, v.At)
	if q.Tenant != "" && len(c.Tenants) > 0 {
		c.Own = &c.Tenants[0]
	}
	return c
}

// state asks the limiter, and notes what it says for the charts.
func (p *Page) state(ctx context.Context, r throttle.StateRequest) (throttle.PolicyState, error) {
	key := strings.Join([]string{"state", r.Policy, r.After, r.Tenant}, "\x00")
	return remember(&p.recent, ctx, key, func(ctx context.Context) (throttle.PolicyState, error) {
		s, err := p.config.Limiter.State(ctx, r)
		if err == nil && r.After == "" && r.Tenant == "" {
			p.history.note(s, time.Now())
		}
		return s, err
	})
}

// said is an error in the words of the page.
func said(err error) string { return sentence(err.Error()) }

package page

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
)

// How far a search goes.
const (
	maxPolicies = 100 // in which a tenant is looked for
	maxQueues   = 50  // in which a task is looked for
)

// A foundView shows what the search has found.
type foundView struct {
	Asked    string // the task's ID, or the word
	Wider    bool   // a word was typed in: tenants and policies are looked for, too
	Problems []string
	Tasks    []worker.Explanation
	Tenants  []inspect.State
	Policies []string
}

// find looks for the task with an ID, in its queue. A word that was typed in may be the ID of a task in one of the first queues,
// a tenant's name, or a part of policies' names.
func (p *Page) find(ctx context.Context, q question, policies []string) *foundView {
	if q.Task != "" {
		f := &foundView{Asked: q.Task}
		p.findTask(ctx, f, q.Queue)
		return f
	}
	f := &foundView{Asked: q.Find, Wider: true}
	for _, queue := range p.queues(ctx, f) {
		p.findTask(ctx, f, queue)
	}
	p.findTenant(ctx, f, policies)
	for _, policy := range policies {
		if strings.Contains(strings.ToLower(policy), strings.ToLower(f.Asked)) {
			f.Policies = append(f.Policies, policy)
		}
	}
	return f
}

// addProblem adds an error once, however many queues or policies have it.
func (f *foundView) addProblem(err error) {
	if text := sentence(err.Error()); !slices.Contains(f.Problems, text) {
		f.Problems = append(f.Problems, text)
	}
}

// queues returns the first queues of asynq.
func (p *Page) queues(ctx context.Context, f *foundView) []string {
	if p.config.Inspector == nil || p.config.Client == nil {
		return nil
	}
	queues, err := cached(ctx, &p.asynqAnswers, "queues", func(context.Context) ([]string, error) { return p.config.Inspector.Queues() })
	if err != nil {
		f.addProblem(err)
	}
	return queues[:min(len(queues), maxQueues)]
}

// findTask adds a task of a queue. One that is not there has no State: it is shown if nothing else was looked for.
func (p *Page) findTask(ctx context.Context, f *foundView, queue string) {
	if p.config.Client == nil || queue == "" {
		return
	}
	key := strings.Join([]string{"task", queue, f.Asked}, "\x00")
	e, err := cached(ctx, &p.asynqAnswers, key, func(ctx context.Context) (worker.Explanation, error) {
		return p.config.Client.Explain(ctx, queue, f.Asked)
	})
	switch {
	case err != nil:
		f.addProblem(err)
	case e.State != "" || !f.Wider:
		f.Tasks = append(f.Tasks, e)
	}
}

// findTenant adds the tenant of the name in each policy where it waits, is paused or has used something.
func (p *Page) findTenant(ctx context.Context, f *foundView, policies []string) {
	if len(f.Asked) > throttle.MaxValueBytes {
		return
	}
	if len(policies) > maxPolicies {
		f.addProblem(fmt.Errorf("the tenant is looked for in the first %d policies only", maxPolicies))
	}
	for _, policy := range policies[:min(len(policies), maxPolicies)] {
		state, err := p.state(ctx, inspect.Query{Policy: policy, Tenant: f.Asked}, "")
		if err != nil {
			f.addProblem(err)
			continue
		}
		for _, t := range state.Tenants {
			hasUsed := slices.ContainsFunc(t.Windows, func(w throttle.WindowState) bool { return w.Used > 0 })
			if t.Waiting > 0 || hasUsed || t.Pause != nil {
				f.Tenants = append(f.Tenants, t)
			}
		}
	}
}

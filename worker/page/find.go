package page

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
)

// How far a search goes.
const (
	maxSearched = 100 // policies, for a tenant
	maxQueues   = 50  // for a task
)

// A foundView shows what the search has found.
type foundView struct {
	Asked    string
	Problems []string
	Tasks    []worker.Explanation
	Tenants  []inspect.State
	Policies []string
	Wider    bool // whether tenants and policies were looked for, too
}

// find looks for the task with an ID, in one queue or in the first 50. For a word that was typed in, it also looks
// for the tenant of that name, and for policies with it in their names.
func (p *Page) find(ctx context.Context, q question, policies []string) *foundView {
	f := &foundView{Asked: q.Task, Wider: q.Task == ""}
	queues := []string{q.Queue}
	if f.Wider {
		f.Asked, queues = q.Find, p.queues(ctx, f)
	}
	for _, queue := range queues {
		p.findTask(ctx, f, queue)
	}
	if f.Wider {
		p.findTenant(ctx, f, policies)
		for _, policy := range policies {
			if strings.Contains(strings.ToLower(policy), strings.ToLower(f.Asked)) {
				f.Policies = append(f.Policies, policy)
			}
		}
	}
	return f
}

func (f *foundView) problem(err error) {
	if text := sentence(err.Error()); !slices.Contains(f.Problems, text) {
		f.Problems = append(f.Problems, text)
	}
}

// queues returns the queues of asynq.
func (p *Page) queues(ctx context.Context, f *foundView) []string {
	if p.config.Inspector == nil || p.config.Client == nil {
		return nil
	}
	queues, err := remember(&p.asynq, ctx, "queues", func(context.Context) ([]string, error) { return p.config.Inspector.Queues() })
	if err != nil {
		f.problem(err)
	}
	return queues[:min(len(queues), maxQueues)]
}

func (p *Page) findTask(ctx context.Context, f *foundView, queue string) {
	if p.config.Client == nil || queue == "" {
		return
	}
	key := strings.Join([]string{"task", queue, f.Asked}, "\x00")
	e, err := remember(&p.asynq, ctx, key, func(ctx context.Context) (worker.Explanation, error) {
		return p.config.Client.Explain(ctx, queue, f.Asked)
	})
	switch {
	case err != nil:
		f.problem(err)
	case e.State != "" || !f.Wider:
		f.Tasks = append(f.Tasks, e)
	}
}

func (p *Page) findTenant(ctx context.Context, f *foundView, policies []string) {
	if len(f.Asked) > throttle.MaxValueBytes {
		return
	}
	if len(policies) > maxSearched {
		f.problem(errors.New("the tenant is looked for in the first 100 policies only"))
	}
	for _, policy := range policies[:min(len(policies), maxSearched)] {
		s, err := p.state(ctx, inspect.Query{Policy: policy, Tenant: f.Asked}, "")
		if err != nil {
			f.problem(err)
			continue
		}
		for _, t := range s.Tenants {
			used := slices.ContainsFunc(t.Windows, func(w throttle.WindowState) bool { return w.Used > 0 })
			if t.Waiting > 0 || used || t.Pause != nil {
				f.Tenants = append(f.Tenants, t)
			}
		}
	}
}

package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

// RequestOf returns what the task asks of the policy that matches it, if it is enqueued with the
// options. It is an error if no policy with a line matches, if the task has no tenant, or if its
// policy can never grant it: a wrapped *throttle.RequestError or *throttle.NeverFitsError.
func (c *Client) RequestOf(task *asynq.Task, opts ...asynq.Option) (throttle.Request, error) {
	if c.client == nil {
		return throttle.Request{}, errZeroClient
	}
	if task == nil {
		return throttle.Request{}, errors.New("worker: RequestOf: task is nil")
	}
	policy, ok := c.limiter.Match(task.Type())
	if !ok || policy.Requeue == throttle.RequeueEarliestReset {
		return throttle.Request{}, fmt.Errorf("worker: task type %q: must match a policy without requeue earliest-reset", task.Type())
	}
	return c.requestBy(context.Background(), policy, task, opts)
}

// Plan returns when tasks would have started: throttle.Line.Plan. Nothing is enqueued. A demand's
// Queue is asynq's, and its Request that of RequestOf. Its Count may be 0.
func (c *Client) Plan(ctx context.Context, demands []inspect.Demand, o inspect.PlanOptions) (
	inspect.Plan, error) {
	if c.client == nil {
		return inspect.Plan{}, errZeroClient
	}
	identity, err := c.asynq.Identity(ctx)
	if err != nil {
		return inspect.Plan{}, err
	}
	lines, of := map[string][]inspect.Demand{}, map[string][]int{} // by line: demands, and their places
	finishes := slices.Repeat([]inspect.Finish{{Known: true}}, len(demands))
	for i, d := range demands {
		if d.Count == 0 {
			continue
		}
		d.Queue = identity + "/" + d.Queue
		line := c.limiter.LineOf(d.Request.Policy, d.Request.Tenant)
		lines[line], of[line] = append(lines[line], d), append(of[line], i)
	}
	at := time.Now()
	for line, demands := range lines {
		plan, err := inspect.Of(c.limiter).Plan(ctx, line, demands, o)
		if err != nil {
			return inspect.Plan{}, err
		}
		at = plan.At
		for j, i := range of[line] {
			finishes[i] = plan.Demands[j]
		}
	}
	return inspect.PlanOf(at, finishes), nil
}

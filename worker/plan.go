package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"

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

// Plan returns when tasks would have ended: inspect.Inspector.Plan. Nothing is enqueued. A demand's Queue
// is asynq's, as in PlanOptions.Slots, and its Request that of RequestOf.
func (c *Client) Plan(ctx context.Context, demands []inspect.Demand, o inspect.PlanOptions) (
	inspect.Plan, error) {
	if c.client == nil {
		return inspect.Plan{}, errZeroClient
	}
	identity, err := c.asynq.Identity(ctx)
	if err != nil {
		return inspect.Plan{}, err
	}
	demands, slots := slices.Clone(demands), map[string]int{}
	for i := range demands {
		demands[i].Queue = identity + "/" + demands[i].Queue
	}
	for queue, n := range o.Slots {
		slots[identity+"/"+queue] = n
	}
	o.Slots = slots
	return inspect.Of(c.limiter).Plan(ctx, demands, o)
}

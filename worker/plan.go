package worker

import (
	"context"
	"slices"

	"github.com/sluice-go/sluice/throttle/inspect"
)

// Plan returns when tasks would have ended: inspect.Inspector.Plan. Nothing is enqueued. A demand's Queue
// is asynq's, as in PlanOptions.Slots, and its Request that of RequestOf.
func (c *Client) Plan(ctx context.Context, demands []inspect.Demand, o inspect.PlanOptions) (
	inspect.Plan, error) {
	identity, err := c.asynq.Identity(ctx)
	if err != nil {
		return inspect.Plan{}, err
	}
	demands, o.Slots = slices.Clone(demands), slices.Clone(o.Slots)
	for i := range demands {
		demands[i].Queue = identity + "/" + demands[i].Queue
	}
	for i := range o.Slots {
		o.Slots[i].Queues = slices.Clone(o.Slots[i].Queues)
		for k, queue := range o.Slots[i].Queues {
			o.Slots[i].Queues[k] = identity + "/" + queue
		}
	}
	return inspect.Of(c.limiter).Plan(ctx, demands, o)
}

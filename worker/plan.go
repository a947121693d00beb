package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// A Planned is tasks like one, for Client.Plan.
type Planned struct {
	Count  int         // how many, those in line included
	Joined int         // how many of them are enqueued and stand in line already
	Task   *asynq.Task // one of them; its payload matters only to the functions of ClientConfig
}

// Plan returns when tasks would have started that one policy matches: throttle.Line.Plan. Nothing
// is enqueued. Of the options it knows asynq.Queue and Class, as given to EnqueueBatch.
func (c *Client) Plan(ctx context.Context, planned []Planned, o throttle.PlanOptions, opts ...asynq.Option) (throttle.Plan, error) {
	identity, err := c.asynq.Identity(ctx)
	if err != nil {
		return throttle.Plan{}, err
	}
	queue, given := "default", throttle.Class("")
	for _, o := range opts {
		switch o.Type() {
		case asynq.QueueOpt:
			queue = o.Value().(string)
		case option{}.Type():
			if c, ok := o.(class); ok {
				given = c.value.(throttle.Class)
			}
		}
	}
	policy := ""
	finishes, lines := make([]throttle.Finish, len(planned)), map[string][]throttle.Demand{}
	of := map[string][]int{} // by line: the places in planned
	for i, p := range planned {
		if p.Task == nil {
			return throttle.Plan{}, errors.New("worker: Planned.Task is nil: must be one of the tasks to plan")
		}
		matched, ok := c.limiter.Match(p.Task.Type())
		if !ok || policy != "" && matched.Name != policy {
			return throttle.Plan{}, fmt.Errorf("worker: task type %q: must match the same policy as the others of a plan", p.Task.Type())
		}
		policy = matched.Name
		request, err := c.identify.request(policy, p.Task)
		if err != nil {
			return throttle.Plan{}, err
		}
		if given != "" {
			request.Class = given
		}
		line := c.limiter.LineOf(policy, request.Tenant)
		lines[line] = append(lines[line], throttle.Demand{Count: p.Count, Joined: p.Joined, Queue: identity + "/" + queue, Request: request})
		of[line] = append(of[line], i)
	}
	at := time.Now()
	for line, demands := range lines {
		plan, err := c.limiter.Line(line).Plan(ctx, demands, o)
		if err != nil {
			return throttle.Plan{}, err
		}
		at = plan.At
		for j, i := range of[line] {
			finishes[i] = plan.Demands[j]
		}
	}
	return throttle.PlanOf(at, finishes), nil
}

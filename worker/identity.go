package worker

import (
	"fmt"
	"net/url"
	"strconv"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// The headers that carry an Identity. Their values are percent-encoded: asynq keeps headers as
// text, while names of tenants are any bytes.
const (
	attributesHeader = "sluice-attributes" // user=bob&ip=10.0.0.1
	costHeader       = "sluice-cost"       // requests=1&tokens=1500
	tenantHeader     = "sluice-tenant"     // acme
)

// An Identity is whose a task is and what it takes.
type Identity struct {
	Attributes map[string]string // what scopes other than the tenant count it by
	Cost       map[string]int64  // units, by the name of the unit; 1 throttle.Requests unless it says otherwise
	Tenant     string            // any bytes
}

// NewTask is asynq.NewTask for a task that carries its identity in its headers, where the
// middleware finds it. Retries keep it.
func NewTask(id Identity, typename string, payload []byte, opts ...asynq.Option) *asynq.Task {
	headers := map[string]string{}
	if id.Tenant != "" {
		headers[tenantHeader] = url.PathEscape(id.Tenant)
	}
	attributes, cost := url.Values{}, url.Values{}
	for name, value := range id.Attributes {
		attributes.Set(name, value)
	}
	for unit, n := range id.Cost {
		cost.Set(unit, strconv.FormatInt(n, 10))
	}
	if len(attributes) > 0 {
		headers[attributesHeader] = attributes.Encode()
	}
	if len(cost) > 0 {
		headers[costHeader] = cost.Encode()
	}
	return asynq.NewTaskWithHeaders(typename, payload, headers, opts...)
}

// IdentityOf returns what NewTask put into the task's headers. It is empty for other tasks, and
// an error if somebody else wrote those headers in another form.
func IdentityOf(task *asynq.Task) (Identity, error) {
	headers := task.Headers()
	bad := func(header string, mend any) (Identity, error) {
		return Identity{}, fmt.Errorf("worker: task type %q: header %s %q: %v", task.Type(), header, headers[header], mend)
	}
	tenant, err := url.PathUnescape(headers[tenantHeader])
	if err != nil {
		return bad(tenantHeader, err)
	}
	id := Identity{Tenant: tenant}
	attributes, err := url.ParseQuery(headers[attributesHeader])
	if err != nil {
		return bad(attributesHeader, err)
	}
	for name := range attributes {
		if id.Attributes == nil {
			id.Attributes = make(map[string]string, len(attributes))
		}
		id.Attributes[name] = attributes.Get(name)
	}
	cost, err := url.ParseQuery(headers[costHeader])
	if err != nil {
		return bad(costHeader, err)
	}
	for unit := range cost {
		n, err := strconv.ParseInt(cost.Get(unit), 10, 64)
		if err != nil {
			return bad(costHeader, "must be whole numbers of units, such as requests=1&tokens=1500")
		}
		if id.Cost == nil {
			id.Cost = make(map[string]int64, len(cost))
		}
		id.Cost[unit] = n
	}
	return id, nil
}

// identify is how tasks are told apart: by the user's functions, else by their headers.
type identify struct {
	attributes func(*asynq.Task) map[string]string
	cost       func(*asynq.Task) map[string]int64
	tenant     func(*asynq.Task) string
}

// request returns what to ask the limiter for the task. A task without a tenant is an error,
// also where no window counts by it: fairness does.
func (i identify) request(policy string, task *asynq.Task) (throttle.Request, error) {
	id, err := IdentityOf(task)
	if err != nil && (i.attributes == nil || i.cost == nil || i.tenant == nil) {
		return throttle.Request{}, err
	}
	if i.attributes != nil {
		id.Attributes = i.attributes(task)
	}
	if i.cost != nil {
		id.Cost = i.cost(task)
	}
	if i.tenant != nil {
		id.Tenant = i.tenant(task)
	}
	if id.Tenant == "" {
		return throttle.Request{}, fmt.Errorf("worker: task type %q: no tenant, and policy %q matches it: "+
			"make the task with worker.NewTask, or set Config.Tenant", task.Type(), policy)
	}
	return throttle.Request{Attributes: id.Attributes, Cost: id.Cost, Policy: policy, Tenant: id.Tenant}, nil
}

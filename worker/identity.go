package worker

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"strconv"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// The headers that carry an Identity. Their values are percent-encoded: asynq keeps headers as
// text, and a tenant's name may be any bytes.
const (
	attributesHeader = "sluice-attributes" // user=bob&ip=10.0.0.1
	classHeader      = "sluice-class"      // batch
	costHeader       = "sluice-cost"       // requests=1&tokens=1500
	tenantHeader     = "sluice-tenant"     // acme
)

// An Identity is a task's tenant, attributes, class and cost.
type Identity struct {
	Attributes map[string]string // by which other scopes than the tenant count it
	Class      throttle.Class    // who goes first in line, by the task's header alone; the default is throttle.ClassLive
	Cost       map[string]int64  // per unit; the default is 1 throttle.Requests
	Tenant     string            // any bytes
}

// NewTask is asynq.NewTask for a task that carries its identity in its headers, where the
// middleware finds it. Retries keep it.
func NewTask(id Identity, typename string, payload []byte, opts ...asynq.Option) *asynq.Task {
	attributes, cost := url.Values{}, url.Values{}
	for name, value := range id.Attributes {
		attributes.Set(name, value)
	}
	for unit, n := range id.Cost {
		cost.Set(unit, strconv.FormatInt(n, 10))
	}
	headers := map[string]string{
		attributesHeader: attributes.Encode(),
		classHeader:      string(id.Class),
		costHeader:       cost.Encode(),
		tenantHeader:     url.PathEscape(id.Tenant),
	}
	maps.DeleteFunc(headers, func(_, text string) bool { return text == "" })
	return asynq.NewTaskWithHeaders(typename, payload, headers, opts...)
}

// IdentityOf returns the identity that NewTask put into the task's headers. For other tasks it is
// empty. It is an error if those headers have another form.
func IdentityOf(task *asynq.Task) (Identity, error) {
	if task == nil {
		return Identity{}, errors.New("worker: IdentityOf: task is nil")
	}
	headers := task.Headers()
	bad := func(header string, hint any) (Identity, error) {
		return Identity{}, fmt.Errorf("worker: task type %q: header %s %q: %v", task.Type(), header, headers[header], hint)
	}
	tenant, err := url.PathUnescape(headers[tenantHeader])
	if err != nil {
		return bad(tenantHeader, err)
	}
	id := Identity{Class: throttle.Class(headers[classHeader]), Tenant: tenant}
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

// match returns the request by which a task that is due joins a line, and false if it joins none. One that
// waited in a line goes on by a policy that was removed.
func (s *Server) match(m asynqredis.Message, waited bool) (request throttle.Request, ok bool) {
	policy, ok := s.config.Limiter.Match(m.Type(), waited)
	if !ok || policy.Requeue == throttle.RequeueEarliestReset {
		return throttle.Request{}, false
	}
	defer func() {
		if recover() != nil { // the middleware calls the function again, and asynq reports it
			ok = false
		}
	}()
	task := asynq.NewTaskWithHeaders(m.Type(), m.Payload(), m.Headers())
	request, err := s.request(policy.Name, task, m)
	return request, err == nil // else the middleware returns the error
}

// request returns what a task asks of a policy, before it has a ticket.
func (s *Server) request(policy string, task *asynq.Task, m asynqredis.Message) (throttle.Request, error) {
	r, err := requestOf(s.config.Identify, policy, task)
	r.Deadline, r.MaxHold = m.Deadline(), m.TimeLimit(time.Now())
	r.Front, r.Key = m.Retried() > 0, m.JoinKey()
	return r, err
}

// requestOf returns what the task asks of a policy, by its identity. A task without a tenant is an error,
// even where no window counts by it: fairness does.
func requestOf(identify func(*asynq.Task) (Identity, error), policy string, task *asynq.Task) (throttle.Request, error) {
	if identify == nil {
		identify = IdentityOf
	}
	id, err := identify(task)
	if err != nil {
		return throttle.Request{}, err
	}
	if id.Tenant == "" {
		return throttle.Request{}, fmt.Errorf("worker: task type %q: no tenant, and policy %q matches it: "+
			"make the task with worker.NewTask, or set Config.Identify", task.Type(), policy)
	}
	class := throttle.Class(task.Headers()[classHeader])
	return throttle.Request{Attributes: id.Attributes, Class: class, Cost: id.Cost, Policy: policy, Tenant: id.Tenant}, nil
}

package worker

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// identityHeader has an Identity, such as "attribute.user=bob&class=batch&cost.tokens=1500&tenant=acme". It is
// percent-encoded, as asynq keeps headers as text, and a tenant's name may be any bytes.
const identityHeader = "sluice-identity"

// An Identity is a task's tenant, attributes, class and cost.
type Identity struct {
	Attributes map[string]string // by which scopes count the task, besides the tenant
	Class      throttle.Class    // who goes first in line; only a header sets it, not Identify. The default is throttle.ClassLive
	Cost       map[string]int64  // per unit; the default is 1 throttle.Requests
	Tenant     string            // any bytes
}

// NewTask is asynq.NewTask for a task with its identity in a header, where the middleware finds it. Retries keep it.
func NewTask(id Identity, typename string, payload []byte, opts ...asynq.Option) *asynq.Task {
	headers := map[string]string{}
	if text := id.text(); text != "" {
		headers[identityHeader] = text
	}
	return asynq.NewTaskWithHeaders(typename, payload, headers, opts...)
}

// text returns the header for the identity, "" if that is empty.
func (id Identity) text() string {
	values := url.Values{"class": {string(id.Class)}, "tenant": {id.Tenant}}
	maps.DeleteFunc(values, func(_ string, list []string) bool { return list[0] == "" })
	for name, value := range id.Attributes {
		values.Set("attribute."+name, value)
	}
	for unit, n := range id.Cost {
		values.Set("cost."+unit, strconv.FormatInt(n, 10))
	}
	return values.Encode()
}

// IdentityOf returns the identity that NewTask put into the header, or an empty one. A malformed header is an error.
func IdentityOf(task *asynq.Task) (Identity, error) {
	if task == nil {
		return Identity{}, errors.New("worker: IdentityOf: task is nil")
	}
	text := task.Headers()[identityHeader]
	if text == "" {
		return Identity{}, nil
	}
	values, err := url.ParseQuery(text)
	id := Identity{
		Attributes: map[string]string{},
		Class:      throttle.Class(values.Get("class")),
		Cost:       map[string]int64{},
		Tenant:     values.Get("tenant"),
	}
	for name := range values {
		if attribute, ok := strings.CutPrefix(name, "attribute."); ok {
			id.Attributes[attribute] = values.Get(name)
		} else if unit, ok := strings.CutPrefix(name, "cost."); ok {
			n, bad := strconv.ParseInt(values.Get(name), 10, 64)
			if id.Cost[unit] = n; bad != nil {
				err = errors.New("a cost must be a whole number, such as cost.tokens=1500")
			}
		}
	}
	if err != nil {
		return Identity{}, fmt.Errorf("worker: task type %q: header %s %q: %w", task.Type(), identityHeader, text, err)
	}
	return id, nil
}

// match returns the request with which a task joins a line or leaves it, and false if it does neither. A task that
// has waited in a line may match a policy that was removed.
func (s *Server) match(m asynqredis.Message, waited bool) (request throttle.Request, ok bool) {
	policy, ok := s.limiter.Match(m.Type(), waited)
	if !ok || policy.EarliestReset {
		return throttle.Request{}, false
	}
	defer func() {
		if recover() != nil { // of Identify: in the middleware it panics again, and asynq reports that
			ok = false
		}
	}()
	task := asynq.NewTaskWithHeaders(m.Type(), m.Payload(), m.Headers())
	request, err := s.request(policy.Name, task, m)
	return request, err == nil // the middleware meets the error again, and returns it
}

// request returns a task's request to a policy, without a ticket.
func (s *Server) request(policy string, task *asynq.Task, m asynqredis.Message) (throttle.Request, error) {
	r, err := requestOf(s.config.Identify, policy, task)
	r.Deadline, r.MaxHold = m.Deadline(), m.TimeLimit(time.Now())
	r.Front, r.Key = m.HadTurn(), m.JoinKey()
	return r, err
}

// requestOf returns a task's request to a policy, with its identity: by `identify`, if that is not nil, else by the
// header, which gives the class in any case. It returns an error for a task without a tenant: even where no window
// counts by tenant, lines are fair between tenants.
func requestOf(identify func(*asynq.Task) (Identity, error), policy string, task *asynq.Task) (throttle.Request, error) {
	header, err := IdentityOf(task)
	id := header
	if identify != nil {
		id, err = identify(task)
	}
	if err != nil {
		return throttle.Request{}, err
	}
	if id.Tenant == "" {
		return throttle.Request{}, fmt.Errorf("worker: task type %q: no tenant, and policy %q matches it: "+
			"make the task with worker.NewTask, or set Config.Identify", task.Type(), policy)
	}
	return throttle.Request{Attributes: id.Attributes, Class: header.Class, Cost: id.Cost, Policy: policy, Tenant: id.Tenant}, nil
}

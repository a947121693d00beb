package throttle

import (
	"cmp"
	"context"
	"errors"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Line has the tickets that wait for one policy. It is first come, first served for one tenant,
// class, attributes and queue, and fair between tenants by weight. It is safe for concurrent use. For a
// job queue, call Join in its clients, and Take in its servers when they have free slots: see the example.
type Line struct {
	limiter *Limiter
	name    string
}

// Line returns the line of a policy, or with Policy.Shards the line that LineOf or Lines names.
// Methods of a line without a policy return ErrUnknownPolicy.
func (l *Limiter) Line(name string) *Line { return &Line{l, name} }

// Lines returns the names of the lines that a server should take from: also those of policies that
// SetPolicies removed, until nobody has waited there for some seconds.
func (l *Limiter) Lines() []string {
	var names []string
	for cp := range l.policies.Load().live {
		names = append(names, cp.line)
	}
	return names
}

// A LineDecision is the answer to one request of Line.Join or Line.Reserve. Of a ticket that joined, the Decision says
// when it is expected to start: RetryIn is 0 if it fits now. With BySlots, RetryIn is an estimate, by the rate at which
// servers took tickets of the queue in the last minute.
type LineDecision struct {
	Decision

	// Err says why there is no decision, or why the ticket did not join. A *RequestError or *DeniedError does not
	// affect the other requests. The first other error is also the call's.
	Err error

	// Nudge says that no server asks by the time at which the ticket may start: have one server call Take.
	Nudge bool
}

// Join puts requests in line by their tickets, even if they fit now, and returns a decision for each, in order: a few
// hundred at once. A ticket that is in line keeps its position. With another tenant, class or attribute of a scope it
// leaves that position, and joins as if new, unless it is refused. A request of an exempt tenant, or of a policy that
// observes, does not join (Decision.Exempt). The line may be a removed policy's, but not a former shard's of a policy
// in force. After an error, tickets of Queued decisions have joined, and others may have. Errors are Take's and the
// TenantFunc's.
func (n *Line) Join(ctx context.Context, requests []Request) ([]LineDecision, error) {
	isRemoved := !n.limiter.policies.Load().inForce(script.PolicyOf(n.name))
	decisions, err := n.ask(ctx, requests, isRemoved, (*operation).joinRequest)
	for _, d := range decisions {
		if err == nil || d.Queued {
			tell(n.limiter, d)
		}
	}
	return decisions, err
}

// Reserve is Limiter.Reserve for several requests, in few calls to Redis. It returns a decision for each, in order, with
// what Limiter.Reserve returns, even if others fail. It never fails open. Errors are Take's and the TenantFunc's.
func (n *Line) Reserve(ctx context.Context, requests []Request) ([]LineDecision, error) {
	return n.ask(ctx, requests, onlyInForce, func(o *operation) (script.Request, bool, error) {
		return o.reserveRequest(), true, nil
	})
}

// ask prepares the requests, and sends those that prepare selects; others are exempt or invalid. The error may be a
// TenantFunc's.
func (n *Line) ask(
	ctx context.Context, requests []Request, removedToo bool,
	prepare func(*operation) (ask script.Request, selected bool, err error),
) ([]LineDecision, error) {
	cp, err := n.limiter.policyOfLine(n.name, removedToo)
	if err != nil {
		return nil, err
	}
	cp.emptyCounts.Store(0)
	decisions := make([]LineDecision, len(requests))
	operations := make([]*operation, 0, len(requests))
	asks := make([]script.Request, 0, len(requests))
	var asker []int // for each of asks, the index of its request
	for i, r := range requests {
		ask, selected := script.Request{}, false
		o, err := n.checked(ctx, cp, r)
		if err == nil {
			ask, selected, err = prepare(o)
		}
		if selected {
			operations, asks, asker = append(operations, o), append(asks, ask), append(asker, i)
			continue
		}
		decisions[i] = LineDecision{Decision: Decision{Exempt: err == nil, Policy: cp.Name, Tenant: r.Tenant}, Err: err}
	}
	answers, err := cp.group.Do(ctx, cp.script, asks...)
	err = classify(ctx, cp.Name, err)
	for j, a := range answers {
		d := &decisions[asker[j]]
		if d.Nudge, d.Err = a.Nudge, classify(ctx, cp.Name, a.Err); d.Err == nil {
			d.Decision, d.Err = n.limiter.decided(operations[j], asks[j], a)
		}
	}
	for _, d := range decisions {
		if d.Err != nil && !errors.As(d.Err, new(*RequestError)) && !errors.As(d.Err, new(*DeniedError)) {
			err = cmp.Or(err, d.Err)
		}
	}
	return decisions, err
}

// checked prepares a request for capacity of the line's policy.
func (n *Line) checked(ctx context.Context, cp *compiledPolicy, r Request) (*operation, error) {
	policy := r.Policy
	if r.Policy = cp.Name; policy != "" && policy != cp.Name {
		return nil, r.bad("policy", policy, "must be that of the line, or empty")
	}
	if line := cp.lineOf(r.Tenant); line != cp.line {
		return nil, r.bad(TenantAttribute, r.Tenant, "must wait in its own line, "+line)
	}
	return n.limiter.checkedFor(ctx, cp, r)
}

// Tickets calls do with pages of some hundred tickets in line, until do returns an error. The tickets are those of one
// tenant, or with "" all; either way it reads the whole line. It leaves out calls that wait in place and, for a tenant,
// tickets that joined by other scopes than the policy has now. A ticket may come twice. Errors are Take's and do's.
func (n *Line) Tickets(ctx context.Context, tenant string, do func([]Ticket) error) error {
	cp, err := n.limiter.policyOfLine(n.name, orRemoved)
	if err != nil {
		return err
	}
	var failed error // of do
	err = n.limiter.runner.Tickets(ctx, cp.line, func(page []script.Ticket) error {
		var tickets []Ticket
		for _, t := range page {
			if r, ok := cp.requestOf(t.Flow, "", 1); tenant == "" || ok && r.Tenant == tenant {
				tickets = append(tickets, Ticket{Queue: t.Queue, ID: t.ID})
			}
		}
		failed = do(tickets)
		return failed
	})
	return cmp.Or(failed, classify(ctx, cp.Name, err))
}

// Len returns how many tickets and calls that wait in place are in line, by one short command. Errors are Take's.
func (n *Line) Len(ctx context.Context) (int64, error) {
	cp, err := n.limiter.policyOfLine(n.name, orRemoved)
	if err != nil {
		return 0, err
	}
	waiting, err := n.limiter.runner.CountTickets(ctx, cp.line)
	return waiting, classify(ctx, cp.Name, err)
}

// Leave withdraws tickets from the line. It ignores tickets that do not wait. Errors are Take's.
func (n *Line) Leave(ctx context.Context, tickets ...Ticket) error {
	cp, err := n.limiter.policyOfLine(n.name, orRemoved)
	if err != nil {
		return err
	}
	names := make([]string, len(tickets))
	for i, t := range tickets {
		names[i] = t.name()
	}
	return cp.leave(ctx, names...)
}

// leave withdraws tickets, or claims, by the names that the script knows them by.
func (cp *compiledPolicy) leave(ctx context.Context, tickets ...string) error {
	asks := make([]script.Request, len(tickets))
	for i, name := range tickets {
		asks[i] = script.Request{Op: script.Leave, Ticket: name, Keys: make([]string, len(cp.scopes))} // the verb reads no scope
	}
	_, err := cp.decide(ctx, asks...)
	return err
}

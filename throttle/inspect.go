package throttle

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/internal/algorithm"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Standing describes how the tickets of one flow stand in line, or how a request would. Package inspect
// makes its views of Standings: programs use that package.
type Standing struct {
	// Flow is the name of the flow in its line. By default it is the flow of the Request.
	Flow string

	// Costs are those of one ticket of the flow, or of all Waiting ones, as the line writes them. LineWeight is in
	// thousandths. Rank is that of the first ticket, in 16 digits, if the flow waits at a node. Tag is that of its
	// tenant: each take moves it. It is 0 if windows count by other attributes, too.
	Costs, Rank, Tag    string
	Waiting, LineWeight int64

	// Ticket is the name of a ticket in the line. The default is the last one of the flow.
	Ticket string

	// Request is that of the Flow, as far as it is known there. Without either, only what all tenants share is asked.
	Request Request

	// Ask asks Redis. Without it, all windows count as empty.
	Ask bool

	Decision Decision // AlreadyQueued: it waits
	Err      error    // a *RequestError: the rest is not known
	Policy   Policy   // of the line
	Removed  bool     // the policy is in force no more
	Weight   float64  // of its tenant
	Free     bool     // only Pauses may deny it: the tenant is exempt, or the policy observes
	Pauses   []Pause  // by operators, in force: of the policy, and of the tenant

	operation *operation
}

// Stand asks how the flows or requests stand, and fills in the answers. Errors are Take's and the TenantFunc's.
func (n *Line) Stand(ctx context.Context, standings ...*Standing) error {
	cp, err := n.limiter.policyOfLine(n.name, true)
	if err != nil {
		return err
	}
	var asks []script.Request
	var asked []*Standing
	for _, s := range standings {
		s.Policy, s.Removed = cp.Policy, cp.removed.Load()
		switch err := n.stand(ctx, cp, s); {
		case errors.As(err, new(*RequestError)):
			s.Err = err
			continue
		case err != nil:
			return err
		case !s.Ask:
			s.Decision = s.operation.decision(script.Answer{Used: make([]int64, len(cp.Windows))})
			continue
		}
		ask := s.operation.lineRequest(script.Expect, "")
		ask.Cost, ask.Ticket, ask.Entry.Flow = "", s.Ticket, s.Flow
		if s.Flow == "" {
			ask.Entry = nil
		}
		asks, asked = append(asks, ask), append(asked, s)
	}
	answers, err := cp.decide(ctx, asks...)
	for i := range asked {
		if err == nil {
			asked[i].Decision = asked[i].operation.decision(answers[i])
		}
	}
	return err
}

func (n *Line) stand(ctx context.Context, cp *compiledPolicy, s *Standing) (err error) {
	queue := s.Request.Ticket.Queue
	switch {
	case s.Flow != "":
		var ok bool
		s.Request, ok = cp.requestOf(s.Flow, s.Costs, s.Waiting)
		if !ok {
			return s.Request.bad("flow", s.Flow, "joined by other scopes than the policy has now")
		}
		maps.DeleteFunc(s.Request.Cost, func(unit string, _ int64) bool { return !slices.Contains(cp.units, unit) })
		queue, s.Request.Ticket = s.Request.Ticket.Queue, Ticket{}
		asked := s.Request
		if s.Ask && s.Ticket == "" {
			asked.Cost = map[string]int64{Requests: 0} // an average may be above a limit that was cut
		}
		s.operation, err = n.limiter.checkedFor(ctx, cp, asked)
	case s.Request.Policy != "":
		s.Request.Ticket = Ticket{}
		if s.operation, err = n.checked(ctx, cp, s.Request); err == nil {
			s.Flow = cp.flow(script.Escape(queue), s.Request)
		}
	default:
		s.operation, err = cp.newOperation(Request{}, n.limiter.interventions.Load().applyTo(cp, "", Tenant{}))
	}
	if s.Request.Ticket.Queue = queue; s.operation != nil {
		s.Weight, s.Free = float64(s.operation.weight())/1000, s.operation.free
		for _, p := range s.operation.tenant.pauses {
			if p != (Pause{}) {
				s.Pauses = append(s.Pauses, p)
			}
		}
	}
	return err
}

// Simulated returns how a window counts in a simulation, the largest cost that fits it, and the period over
// which batches use it evenly, 0 if they do not. Sections are those of its scope's value, by name and kind
// (internal/script/lua/scope.lua): what it has counted is among them. `limit` replaces the window's, unless
// the tenant has its own limit.
func (s *Standing) Simulated(i int, limit int64, sections map[string]string, c algorithm.Counted) (
	w algorithm.Simulated, capacity int64, paced time.Duration) {
	window := s.operation.windows[i]
	a := algorithms[window.Algorithm]
	if s.operation.tenant.Windows[window.Name].Limit == 0 {
		window = window.With(Override{Limit: limit})
	}
	numbers := window.numbers()
	if a.Paced != nil {
		paced = a.Paced(numbers)
	}
	c.Payload = sections[window.Name+a.Kind]
	return a.Simulate(numbers, c), a.Capacity(numbers), paced
}

// PerSecond returns what the window has granted in a second, lately; 0 if that is not known.
func (w WindowState) PerSecond(at time.Time) float64 {
	lately := algorithms[w.Algorithm].Lately
	if lately == nil {
		return 0
	}
	return float64(w.Used) / lately(w.Period, w.ResetsAt.Sub(at)).Seconds()
}

// Read calls f with the client of the line and what its keys begin with. Errors are Take's.
func (n *Line) Read(ctx context.Context, f func(client redis.UniversalClient, prefix string) error) error {
	r := &n.limiter.runner
	return classify(ctx, script.PolicyOf(n.name), f(r.Client, script.Prefix(r.Prefix, n.name)))
}

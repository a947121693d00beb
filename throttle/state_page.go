package throttle

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A page is some tenants of one line.
type page struct {
	limiter *Limiter
	*compiledPolicy
	queues  []script.Queue
	only    string // tenant
	tenants []TenantState
}

// alike reports whether a tenant has one flow in a queue and class: none differs in other
// attributes.
func (p *page) alike() bool { return len(p.flowBy) == 1 }

// A row is a tenant of a page, with its flows.
type row struct {
	operation *operation // nil if the flows are of other scopes than the policy has now
	request   Request
	flows     []script.Standing
	state     TenantState
}

// read reads about n tenants behind a cursor, and returns the next one.
func (p *page) read(ctx context.Context, cursor uint64, n int) (uint64, error) {
	var flows []script.Standing
	var err error
	if p.only != "" && p.alike() {
		cursor = 0
		flows = []script.Standing{{Name: p.flow("", Request{Tenant: p.only})}} // in whichever queue
	} else if flows, cursor, err = p.limiter.runner.FlowPage(ctx, p.line, cursor, int64(n)); err != nil {
		return 0, classify(ctx, p.Name, err)
	}
	rows, err := p.rows(ctx, flows)
	if err != nil {
		return 0, err
	}
	if err := p.fill(ctx, rows); err != nil {
		return 0, err
	}
	slices.SortStableFunc(p.tenants, func(a, b TenantState) int {
		return cmp.Or(-cmp.Compare(a.Waiting, b.Waiting), cmp.Compare(a.Tenant, b.Tenant))
	})
	return cursor, nil
}

// rows puts flows of one tenant together: those of other queues and of the other class too. Only
// the first of them in order makes a row, as the others come with other pages.
func (p *page) rows(ctx context.Context, flows []script.Standing) ([]*row, error) {
	var names []string
	for _, f := range flows {
		_, rest, _ := strings.Cut(f.Name, "|")
		for _, q := range p.queues {
			if q.Tickets > 0 {
				names = append(names, q.Name+"|"+rest)
			}
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	byRest := map[string][]script.Standing{}
	for part := range slices.Chunk(names, 1000) {
		all, err := p.limiter.runner.FlowsOf(ctx, p.line, part)
		if err != nil {
			return nil, classify(ctx, p.Name, err)
		}
		for _, f := range all {
			_, rest, _ := strings.Cut(f.Name, "|")
			byRest[rest] = append(byRest[rest], f)
		}
	}
	var rows []*row
	for _, f := range flows {
		_, rest, _ := strings.Cut(f.Name, "|")
		all := byRest[rest]
		switch {
		case f.Tickets == 0 && len(all) == 0: // the tenant that is asked for does not wait
			all = []script.Standing{f}
		case len(all) == 0 || f.Tickets > 0 && f.Name != all[0].Name:
			continue
		}
		r, err := p.row(ctx, all)
		if err != nil {
			return nil, err
		}
		if p.only == "" || r.request.Tenant == p.only {
			rows = append(rows, r)
		}
	}
	return rows, nil
}

func (p *page) row(ctx context.Context, flows []script.Standing) (*row, error) {
	r := &row{flows: flows}
	var ok bool
	r.request, ok = p.requestOf(flows[0].Name, "")
	r.request.Ticket, r.request.Class = Ticket{}, ""
	t, err := p.limiter.tenant(ctx, p.compiledPolicy, r.request.Tenant)
	if err != nil {
		return nil, err
	}
	if ok {
		if r.operation, err = p.newOperation(r.request, t); err != nil {
			r.operation = nil // nobody can wait so
		}
	}
	return r, nil
}

// fill asks about the flows of rows, and makes states of the answers.
func (p *page) fill(ctx context.Context, rows []*row) error {
	var flows []script.Standing
	var asks []script.Request
	var of []*row
	for _, r := range rows {
		for _, f := range r.flows {
			if r.operation == nil {
				continue
			}
			ask := r.operation.scriptRequest(script.Expect, "")
			ask.Cost, ask.Place = "", r.operation.place()
			ask.Place.Flow = f.Name
			flows, asks, of = append(flows, f), append(asks, ask), append(of, r)
		}
	}
	ranks, err := p.limiter.runner.FirstRanks(ctx, p.line, flows)
	if err != nil {
		return classify(ctx, p.Name, err)
	}
	answers, err := p.decide(ctx, asks...)
	if err != nil {
		return err
	}
	weights := map[string]int64{}
	for _, q := range p.queues {
		weights[q.Name] = q.Weights
	}
	for _, r := range rows {
		s := &r.state
		s.Tenant, s.Attributes, s.Windows = r.request.Tenant, maps.Clone(r.request.Attributes), []WindowState{}
		most := int64(0)
		for _, f := range r.flows {
			queue, _, _ := strings.Cut(f.Name, "|")
			s.Waiting += f.Tickets
			if strings.HasSuffix(queue, "!") {
				s.Batch += f.Tickets
			}
			if f.Tickets > most {
				most = f.Tickets
				s.Weight = float64(f.Weight) / 1000
				s.Share = min(1, float64(f.Weight)/float64(max(1, weights[queue])))
			}
		}
		if s.Weight == 0 && r.operation != nil {
			s.Weight = float64(r.operation.weight()) / 1000
		}
		s.Weight = cmp.Or(s.Weight, 1)
	}
	for i, a := range answers {
		of[i].state.add(of[i].operation, a, ranks[i])
	}
	for _, r := range rows {
		p.tenants = append(p.tenants, r.state)
	}
	return nil
}

// add adds what is known of a tenant's tickets in one queue and class.
func (s *TenantState) add(o *operation, a script.Answer, rank int64) {
	d := o.decision(a)
	o.hold(&d)
	s.Exempt = o.tenant.Exempt
	if a.Status == script.WaitedBefore {
		if oldest := time.UnixMicro(script.JoinedAt(rank)); rank > 0 && (s.Oldest.IsZero() || oldest.Before(s.Oldest)) {
			s.Oldest = oldest
		}
		if expected, latest := d.times(); expected.After(s.Expected) {
			s.Binds, s.Expected, s.Latest = o.binds(a, d), expected, latest
		}
	}
	s.Pause, s.Adapted, s.Windows = d.Pause, d.Adapted, s.Windows[:0]
	for _, w := range d.Windows {
		if len(w.Scope.Attributes) > 0 {
			s.Windows = append(s.Windows, w)
		}
	}
	s.PerSecond = perSecond(s.Windows, d.At)
}

package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A snapshot is all of a line that simulations start from.
type snapshot struct {
	*line
	shared  *throttle.Standing
	flows   []flow               // that wait, the first one first
	waiting []*throttle.Standing // of these flows
	values  map[string]string    // of the scopes of all, by key
}

// snapshot reads a line, with the requests of demands. What is taken while it reads counts twice. If it was
// read before, by another limiter, it stands as it did then.
func (i Inspector) snapshot(ctx context.Context, name string, before *snapshot, demands ...*throttle.Standing) (
	*snapshot, error) {
	s := &snapshot{line: i.line(name), shared: &throttle.Standing{Ask: true}, values: map[string]string{}}
	if before != nil {
		s.flows, s.values = before.flows, before.values
	} else if flows, err := s.all(ctx); err != nil {
		return nil, err
	} else {
		s.flows = flows
	}
	for _, f := range s.flows {
		s.waiting = append(s.waiting, &throttle.Standing{Flow: f.name, Costs: f.costs()})
	}
	all := slices.Concat(demands, s.waiting)
	if err := s.Stand(ctx, append(all, s.shared)...); err != nil {
		return nil, err
	}
	return s, s.readValues(ctx, all)
}

// readValues reads the scopes of standings.
func (s *snapshot) readValues(ctx context.Context, standings []*throttle.Standing) error {
	return s.Read(ctx, func(client redis.UniversalClient, prefix string) error {
		pipe, read := client.Pipeline(), map[string]*redis.StringCmd{}
		for _, standing := range standings {
			for _, w := range standing.Decision.Windows {
				key := script.ScopeKey(w.Scope.Attributes, w.Scope.Values)
				if _, known := s.values[key]; !known && read[key] == nil {
					read[key] = pipe.Get(ctx, prefix+key)
				}
			}
		}
		_, err := pipe.Exec(ctx)
		if errors.Is(err, redis.Nil) { // some scopes count nothing
			err = nil
		}
		for key, value := range read {
			s.values[key] = value.Val()
		}
		return err
	})
}

// sections returns the sections of a scope's value, by name and kind: see internal/script/lua/scope.lua.
func sections(value string) map[string]string {
	found := map[string]string{}
	for i := 8; i+11 <= len(value); {
		head := i + 11 + int(value[i+10])
		end := head + int(value[i+7])<<16 + int(value[i+8])<<8 + int(value[i+9])
		if end > len(value) {
			break
		}
		found[value[i+11:head]] = value[head:end]
		i = end
	}
	return found
}

// costsOf returns what a request takes, by window: nothing if it is exempt.
func costsOf(s *throttle.Standing) []int64 {
	costs := make([]int64, len(s.Decision.Windows))
	for i, w := range s.Decision.Windows {
		if !s.Decision.Granted {
			costs[i] = s.Request.CostOf(w.Unit)
		}
	}
	return costs
}

// A prepared plan has all that is known of its lines. It may be run by several limits.
type prepared struct {
	PlanOptions
	snapshots []*snapshot
	works     []work // in the order in which they wait
	now       int64
	hold      int64 // how long tickets that are no demand hold what they take, 0 if that is unknown
}

// A work is equal requests of one flow, which become tickets in a simulation.
type work struct {
	*throttle.Standing
	count    int
	demanded bool
	hold     int64
	line     int
	tenant   string // Finish.Tenant
}

func (i Inspector) prepare(ctx context.Context, demands []Demand, o PlanOptions) (*prepared, error) {
	p := &prepared{PlanOptions: o, now: time.Now().UnixMicro()}
	var names []string
	var works []work
	asked, byLine, joined := map[string]*throttle.Standing{}, map[string][]*throttle.Standing{}, map[*throttle.Standing]int{}
	total := int64(0)
	for _, d := range demands {
		r := d.Request
		r.Key, r.Ticket = "", throttle.Ticket{Queue: d.Queue}
		if d.Count < 0 || d.Joined < 0 || d.Joined > d.Count || d.Hold < 0 {
			return nil, &throttle.RequestError{Policy: r.Policy, Field: "demand",
				Value: fmt.Sprintf("of %d, %d joined, hold %v", d.Count, d.Joined, d.Hold),
				Hint:  "must not be below 0; all of them may have joined, and no more"}
		}
		if d.Count == 0 {
			continue
		}
		name := i.limiter.LineOf(r.Policy, r.Tenant)
		if byLine[name] == nil {
			names = append(names, name)
		}
		// Equal ones are asked for once.
		key := fmt.Sprintf("%q %q %q %q %#v %#v", d.Queue, r.Policy, r.Tenant, r.Class, r.Attributes, r.Cost)
		s := asked[key]
		if s == nil {
			s = &throttle.Standing{Request: r, Ask: true}
			asked[key], byLine[name] = s, append(byLine[name], s)
		}
		joined[s] += d.Joined
		hold := d.Hold.Microseconds()
		works = append(works, work{s, d.Count, true, hold, slices.Index(names, name), cmp.Or(d.Tenant, r.Tenant)})
		p.hold, total = p.hold+int64(d.Count)*hold, total+int64(d.Count)
	}
	p.hold /= max(1, total)
	for _, name := range names {
		l, err := i.snapshot(ctx, name, nil, byLine[name]...)
		if err != nil {
			return nil, err
		}
		byFlow := map[string]int{}
		for _, s := range byLine[name] {
			byFlow[s.Flow] += joined[s]
		}
		p.add(l, false, byFlow)
	}
	p.works = append(p.works, works...)
	known := p.limits()
	for name, n := range o.Limits {
		if known[name] == 0 || n < 1 {
			return nil, &throttle.RequestError{Field: "limit", Value: fmt.Sprintf("%s=%d", name, n),
				Hint: "must be at least 1, of one of " + strings.Join(slices.Sorted(maps.Keys(known)), ", ")}
		}
	}
	return p, nil
}

// add adds a line and what waits there, without the tickets of demands, by flow.
func (p *prepared) add(l *snapshot, demanded bool, joined map[string]int) {
	for i, s := range l.waiting {
		if n := int(l.flows[i].tickets) - joined[s.Flow]; n > 0 && (demanded || s.Err == nil) {
			p.works = append(p.works, work{s, n, demanded, p.hold, len(p.snapshots), s.Request.Tenant})
		}
	}
	p.snapshots, p.now = append(p.snapshots, l), l.shared.Decision.At.UnixMicro()
}

// run simulates the plan with raised limits, and returns it.
func (p *prepared) run(ctx context.Context, raised map[string]int64) (Plan, error) {
	sim, unknown := p.newSimulation(raised), map[string]bool{}
	tenants := map[string]*finish{}
	for _, w := range p.works {
		var ended *finish
		if w.demanded {
			if ended = tenants[w.tenant]; ended == nil {
				ended = &finish{Finish: Finish{Tenant: w.tenant}}
				tenants[w.tenant] = ended
			}
			ended.Count += w.count
			if never := new(throttle.RequestError); errors.As(w.Err, &never) {
				if ended.NeverFits = never.Window; never.Window == "" {
					return Plan{}, never
				}
				continue
			}
			if w.hold == 0 || len(sim.slots[w.Request.Ticket.Queue]) == 0 {
				unknown[throttle.BySlots] = true
			}
			for _, window := range w.Decision.Windows {
				if window.Algorithm.Leases() && w.hold == 0 && w.Request.CostOf(window.Unit) > 0 {
					unknown[window.Name] = true
				}
			}
		}
		sim.lines[w.line].flowOf(w.Standing).add(ended, int64(w.count), costsOf(w.Standing), w.hold)
	}
	if err := sim.run(ctx); err != nil {
		return Plan{}, fmt.Errorf("throttle: %w", err)
	}
	made := Plan{At: time.UnixMicro(p.now), Tenants: []Finish{}, Unknown: slices.Sorted(maps.Keys(unknown))}
	made.Expected = made.At
	for _, f := range tenants {
		if !p.By.IsZero() {
			f.Late = f.Count - f.inTime
		}
		if f.left == 0 && f.last <= sim.end && f.NeverFits == "" {
			f.Expected = time.UnixMicro(max(p.now, f.last))
		}
		made.Tenants = append(made.Tenants, f.Finish)
	}
	slices.SortFunc(made.Tenants, func(x, y Finish) int {
		return cmp.Or(-cmp.Compare(x.Count, y.Count), cmp.Compare(x.Tenant, y.Tenant))
	})
	for _, f := range made.Tenants {
		made.Count, made.Late = made.Count+f.Count, made.Late+f.Late
		if !made.Expected.IsZero() && (f.Expected.IsZero() || f.Expected.After(made.Expected)) {
			made.Binds, made.Expected = f.Binds, f.Expected
		}
	}
	return made, nil
}

// A finish counts how far the demands of a tenant are in a simulation.
type finish struct {
	Finish
	inTime int   // how many end until PlanOptions.By
	last   int64 // when the last one ends that has started
	left   int64 // how many have not started
}

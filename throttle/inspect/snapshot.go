package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A Snapshot holds the state of some lines, the tickets that wait there, and demands. All its plans start from it.
type Snapshot struct {
	// Limits are the limits in force of tenants without their own, by the names of windows: of several
	// windows of one name the least. Under throttle.BySlots it has the Count of the first Slots.
	Limits map[string]int64

	backlogs []*backlog
	slots    []Slots
	finishes []Finish       // of all demands, and then of tenants
	byTenant map[string]int // indexes of finishes
	total    int64          // tickets
	now      int64          // us since 1970
	hold     int64          // us for which tickets that are no demand hold what they take; 0 if unknown
}

// A backlog is all of a line that simulations start from.
type backlog struct {
	*line
	flows   []flow // that wait, the first one first
	demands []tickets
	joined  map[string]int64  // by flow: how many of its tickets are among the demands, and do not count twice
	values  map[string]string // of the scopes of all, by key
	tickets []tickets         // in the order in which they wait
}

// Tickets are equal tickets of one flow.
type tickets struct {
	*throttle.Standing
	finish int   // its index in Snapshot.finishes; 0 if they are no demand
	left   int64 // that have not started
	hold   int64 // us for which each holds what it takes; 0 if unknown, then it ends when it starts
	rank   int64 // of the first one

	costs []int64 // of each, by simFlow.windows
	lump  int64   // so many go as one
}

// Snapshot reads the lines of demands. An error may be a *throttle.RequestError of a demand.
//
// It calls Redis for pages of what waits and has counted.
func (i Inspector) Snapshot(ctx context.Context, demands []Demand, slots ...Slots) (*Snapshot, error) {
	s := newSnapshot()
	if s.slots = slots; len(slots) > 0 {
		s.Limits[throttle.BySlots] = int64(slots[0].Count)
	}
	var backlogs []*backlog
	lines, standings := map[string]*backlog{}, map[string]*throttle.Standing{}
	for _, d := range demands {
		r := d.Request
		r.Key = ""
		if d.Count < 0 || d.Joined < 0 || d.Joined > d.Count || d.Hold < 0 {
			return nil, &throttle.RequestError{Policy: r.Policy, Field: "demand",
				Value: fmt.Sprintf("of %d, %d joined, hold %v", d.Count, d.Joined, d.Hold),
				Hint:  "must not be below 0; all of them may have joined, and no more"}
		}
		if d.Count == 0 {
			continue
		}
		name := i.limiter.LineOf(r.Policy, r.Tenant)
		b := lines[name]
		if b == nil {
			b = &backlog{line: i.line(name), joined: map[string]int64{}}
			lines[name], backlogs = b, append(backlogs, b)
		}
		key := fmt.Sprintf("%q %q %q %q %#v %#v", r.Ticket.Queue, r.Policy, r.Tenant, r.Class, r.Attributes, r.Cost)
		standing := standings[key]
		if standing == nil {
			standing = &throttle.Standing{Request: r}
			if err := b.Stand(ctx, standing); err != nil {
				return nil, err
			}
			standings[key] = standing
		}
		t := tickets{Standing: standing, finish: s.finishOf(cmp.Or(d.Tenant, r.Tenant)), left: int64(d.Count), hold: d.Hold.Microseconds()}
		b.demands, s.hold = append(b.demands, t), max(s.hold, t.hold)
		b.joined[standing.Flow] += int64(d.Joined)
	}
	for _, b := range backlogs {
		if err := s.read(ctx, b, false); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func newSnapshot() *Snapshot {
	return &Snapshot{Limits: map[string]int64{}, finishes: []Finish{{}}, byTenant: map[string]int{}, now: time.Now().UnixMicro()}
}

// finishOf returns the index of a tenant's finish.
func (s *Snapshot) finishOf(tenant string) int {
	if s.byTenant[tenant] == 0 {
		s.byTenant[tenant], s.finishes = len(s.finishes), append(s.finishes, Finish{Tenant: tenant})
	}
	return s.byTenant[tenant]
}

// read reads a line, and adds b.demands and what else waits there, the latter as demands if `demand` is set. What is
// taken while it reads counts twice. A backlog with values was read before, and stands as it did then.
func (s *Snapshot) read(ctx context.Context, b *backlog, demand bool) (err error) {
	if b.values == nil {
		b.values = map[string]string{}
		if b.flows, err = b.all(ctx); err != nil {
			return err
		}
	}
	all := []*throttle.Standing{{Ask: true}} // the first one stands for all tenants together
	for _, f := range b.flows {
		all = append(all, &throttle.Standing{Flow: f.name, Costs: f.costs()})
	}
	if err := b.Stand(ctx, all...); err != nil {
		return err
	}
	s.backlogs, s.now = append(s.backlogs, b), all[0].Decision.At.UnixMicro()
	for _, w := range all[0].Decision.Windows {
		s.Limits[w.Name] = min(w.Limit, cmp.Or(s.Limits[w.Name], w.Limit))
	}
	for i, f := range b.flows {
		t := tickets{Standing: all[1+i], left: f.tickets - b.joined[f.name], hold: s.hold}
		if demand {
			t.finish = s.finishOf(t.Request.Tenant)
		}
		if t.left > 0 {
			err = cmp.Or(err, s.add(b, t))
		}
	}
	for _, t := range b.demands {
		err = cmp.Or(err, s.add(b, t))
	}
	return cmp.Or(err, b.readValues(ctx))
}

// add adds tickets to a backlog. Demands that never fit are only counted, and what never fits and is no demand is left out.
func (s *Snapshot) add(b *backlog, t tickets) error {
	never := new(throttle.RequestError)
	errors.As(t.Err, &never)
	if t.finish > 0 {
		for _, f := range []*Finish{&s.finishes[0], &s.finishes[t.finish]} {
			f.Count, f.left = f.Count+int(t.left), f.left+t.left
			f.NeverFits = cmp.Or(never.Window, f.NeverFits)
		}
	}
	switch {
	case t.Err == nil:
		t.rank = s.total
		b.tickets, s.total = append(b.tickets, t), s.total+t.left
	case t.finish > 0 && never.Window == "":
		return never
	}
	return nil
}

// readValues reads the scopes of all tickets.
func (b *backlog) readValues(ctx context.Context) error {
	return b.Read(ctx, func(client redis.UniversalClient, prefix string) error {
		pipe, read := client.Pipeline(), map[string]*redis.StringCmd{}
		for _, t := range b.tickets {
			for _, w := range t.Decision.Windows {
				key := script.ScopeKey(w.Scope.Attributes, w.Scope.Values)
				if _, known := b.values[key]; !known && read[key] == nil {
					read[key] = pipe.Get(ctx, prefix+key)
				}
			}
		}
		_, err := pipe.Exec(ctx)
		if errors.Is(err, redis.Nil) { // some scopes count nothing
			err = nil
		}
		for key, value := range read {
			b.values[key] = value.Val()
		}
		return err
	})
}

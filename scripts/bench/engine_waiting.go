package main

import (
	"context"
	"strconv"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// engineWaiting: the cost of a join behind a long line, and the memory of a ticket.
func engineWaiting(ctx context.Context, o scenarioOptions) ([]figure, error) {
	n := o.of(50_000, 1_000_000)
	if o.waiting > 0 {
		n = o.waiting
	}
	s, err := newSite(o)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.learnIdle(ctx, nil); err != nil {
		return nil, err
	}
	policies := []throttle.Policy{lineOf("long")}
	for i := range o.rounds * (turns + 1) {
		policies = append(policies, lineOf("empty-"+strconv.Itoa(i)))
	}
	joins, err := newJoins(s.addr(), policies)
	if err != nil {
		return nil, err
	}
	defer joins.close()

	if err := joins.many(ctx, "empty-0", 1); err != nil { // loads the scripts
		return nil, err
	}
	if err := s.clear(ctx); err != nil {
		return nil, err
	}
	before, err := s.memory(ctx)
	if err != nil {
		return nil, err
	}
	const step = 50_000
	filling := 0.
	for from := 0; from < n; from += step {
		o.say("%d of %d wait", from, n)
		_, cpu, err := s.spent(ctx, func() error { return joins.many(ctx, "long", min(step, n-from)) })
		if err != nil {
			return nil, err
		}
		filling += cpu
	}
	after, err := s.memory(ctx)
	if err != nil {
		return nil, err
	}
	opened := 0
	each := o.of(50, 200)
	figures, err := medians(o.rounds, func(round int) ([]figure, error) {
		long := func() (int, error) { return each, joins.one(ctx, "long", each) }
		empty := func() (int, error) {
			opened++
			return each, joins.one(ctx, policies[opened].Name, each)
		}
		costs, err := s.inTurns(ctx, empty, long)
		if err != nil {
			return nil, err
		}
		o.say("round %d of %d: an empty line %v; a long one %v", round+1, o.rounds, costs[0], costs[1])
		return []figure{{Name: "a join behind " + strconv.Itoa(n) + ": Redis CPU, beside a join of an empty line", Value: costs[1].cpu / costs[0].cpu, AtMost: new(1.2)}}, nil
	})
	return append(figures,
		figure{Name: "memory of a ticket", Value: float64(after-before) / float64(n), Unit: "bytes", AtMost: new(300.)},
		figure{Name: "Redis CPU a ticket, joined by hundreds", Value: filling / float64(n), Unit: "us"},
	), err
}

// lineOf returns a policy. No server takes from its line.
func lineOf(name string) throttle.Policy {
	return throttle.Policy{Name: name, Windows: []throttle.Window{
		shared("shared", 100, time.Second),
		{Name: "tenant", Limit: 20, Period: time.Second},
	}}
}

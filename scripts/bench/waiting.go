package main

import (
	"context"
	"strconv"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// caseWaiting: the cost of a join at the end of a long line, and the memory of a ticket.
func caseWaiting(ctx context.Context, o scenarioOptions) []figure {
	n := o.size(50_000, 1_000_000)
	if o.waiting > 0 {
		n = o.waiting
	}
	s := newTestbed(o)
	s.learnIdle(ctx, nil)
	policies := []throttle.Policy{lineOf("long")}
	for i := range o.rounds * (turns + 1) {
		policies = append(policies, lineOf("empty-"+strconv.Itoa(i)))
	}
	joiner := s.newJoiner(policies...)

	joiner.inBulk(ctx, "empty-0", 1) // loads the scripts
	s.clear(ctx)
	emptyMemory := s.memory(ctx)
	fillCPU := s.fill(ctx, joiner, "long", n)
	filledMemory := s.memory(ctx)
	opened := 0
	each := o.size(50, 200)
	figures := medians(o.rounds, func(round int) []figure {
		long := func() int { joiner.oneByOne(ctx, "long", each); return each }
		empty := func() int { opened++; joiner.oneByOne(ctx, policies[opened].Name, each); return each }
		costs := s.inTurns(ctx, empty, long)
		o.say("round %d of %d: an empty line %v; a long one %v", round+1, o.rounds, costs[0], costs[1])
		name := "a join behind " + strconv.Itoa(n) + ": Redis CPU, beside a join of an empty line"
		return []figure{{Name: name, Value: costs[1].cpu / costs[0].cpu, AtMost: new(1.2)}}
	})
	return append(figures,
		figure{Name: "memory of a ticket", Value: float64(filledMemory-emptyMemory) / float64(n), Unit: "bytes", AtMost: new(300.)},
		figure{Name: "Redis CPU a ticket, joined by hundreds", Value: fillCPU / float64(n), Unit: "us"},
	)
}

// lineOf returns a policy. No server takes from its line.
func lineOf(name string) throttle.Policy {
	return throttle.Policy{Name: name, Windows: []throttle.Window{
		shared("shared", 100, time.Second),
		{Name: "tenant", Limit: 20, Period: time.Second},
	}}
}

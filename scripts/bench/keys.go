package main

import (
	"context"
	"strconv"
)

// caseKeys: how many keys each grant adds. Some keys exist in any case.
func caseKeys(ctx context.Context, o scenarioOptions) []figure {
	s := newReserveTestbed(ctx, o, 16)
	reserve := ourReserve(s.askers, "bench", twoExact()...)
	c := crew{policy: new(unbound()), slots: 32}
	const few, many = 200, 1200
	var figures []figure
	for _, way := range []struct {
		name  string
		grant func(n int)
	}{
		{"reserve", func(n int) {
			s.clear(ctx)
			inParallel(n, 16, func(i int) { reserve(ctx, "tenant-"+strconv.Itoa(i%10), 1) })
		}},
		{"task of our client", func(n int) { s.drainOurs(ctx, c, tasks(n, 10)) }},
		{"task of a plain client", func(n int) { s.drainPlain(ctx, c, tasks(n, 10)) }},
	} {
		way.grant(few)
		fewKeys := s.ourKeys(ctx)
		way.grant(many)
		manyKeys := s.ourKeys(ctx)
		o.say("%s: %d keys after %d grants, %d after %d", way.name, fewKeys, few, manyKeys, many)
		figures = append(figures, figure{
			Name: "keys a grant, " + way.name, Value: max(0, float64(manyKeys-fewKeys)/(many-few)), AtMost: new(0.)})
	}
	return figures
}

// ourKeys returns how many keys in Redis are ours.
func (s *testbed) ourKeys(ctx context.Context) int {
	return len(must(s.control.Keys(ctx, "*sluice*").Result()))
}

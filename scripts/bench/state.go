package main

import (
	"context"
	"strconv"
	"time"

	"github.com/sluice-go/sluice/throttle/inspect"
)

// caseState: what it costs an operator to look at a long line of many tenants.
func caseState(ctx context.Context, o scenarioOptions) []figure {
	n, tenants := o.of(50_000, 1_000_000), o.of(5_000, 100_000)
	s := newSite(o)
	joins := s.newJoins(lineOf("long"))
	joins.tenants = tenants
	s.fill(ctx, joins, "long", n)
	name := func(what string) string {
		return what + ", " + strconv.Itoa(n) + " tickets of " + strconv.Itoa(tenants) + " tenants"
	}
	var pages, explanations []time.Duration
	after, seen := "", 0
	for page := 0; page == 0 || after != "" && page < 500; page++ {
		begin := time.Now()
		st := must(inspect.Of(joins.limiter).State(ctx, inspect.Query{Policy: "long", After: after}))
		pages = append(pages, time.Since(begin))
		seen += len(st.Tenants)
		after = st.Next
	}
	const looks = 100
	for i := range looks {
		begin := time.Now()
		must(inspect.Of(joins.limiter).Explain(ctx, "long", joins.joined[i*len(joins.joined)/looks]))
		explanations = append(explanations, time.Since(begin))
	}
	return []figure{
		{Name: name("a page of the state, p50"), Value: milliseconds(quantile(pages, 0.5)), Unit: "ms"},
		{Name: name("a page of the state, p99"), Value: milliseconds(quantile(pages, 0.99)), Unit: "ms"},
		{Name: "tenants a page", Value: float64(seen) / float64(len(pages))},
		{Name: name("why a ticket waits, p50"), Value: milliseconds(quantile(explanations, 0.5)), Unit: "ms"},
		{Name: name("why a ticket waits, p99"), Value: milliseconds(quantile(explanations, 0.99)), Unit: "ms"},
	}
}

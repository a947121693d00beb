package inspect_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// An operator asks who waits, in pages of tenants, and why the last ticket of one does.
func ExampleInspector_State() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name:    "github-api",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 2, Period: time.Hour}},
	}}})
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	check(err)
	ctx := context.Background()
	for i := range 5 {
		r := throttle.Request{
			Policy: "github-api", Tenant: "acme", Ticket: throttle.Ticket{Queue: "mail", ID: fmt.Sprint("task ", i)},
		}
		_, err = limiter.Reserve(ctx, r)
		check(err)
	}
	var detector inspect.StarvationDetector // an exporter of metrics keeps it, and notes each state that it reads
	for q := (inspect.Query{Policy: "github-api"}); ; {
		state, err := inspect.Of(limiter).State(ctx, q)
		check(err)
		for _, t := range state.Tenants {
			w := t.Windows[0]
			fmt.Println(t.Tenant, t.Waiting, t.Expected.Sub(state.At).Round(time.Hour), w.Scope, w.Used, w.PerSecond(state.At) > 0)
		}
		fmt.Println("starving:", len(detector.Note(state)), "removed:", state.Removed, "observes:", state.Observes)
		if q.After = state.Next; q.After == "" {
			break
		}
	}
	why, err := inspect.Of(limiter).Explain(ctx, throttle.Ticket{Queue: "mail", ID: "task 4"})
	check(err)
	fmt.Println(why.Position, why.Waiting, why.Binds)
	orphans, err := inspect.Of(limiter).Orphans(ctx) // of policies that a deployment has lost
	check(err)
	fmt.Println(orphans)
	// Output:
	// acme 3 2h0m0s tenant=acme 2 true
	// starving: 0 removed: false observes: false
	// 3 3 per-hour
	// map[]
}

// When would 10 more requests have started, behind what waits already? Nothing joins the line.
func ExampleSnapshot_Plan() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name:    "geocoder",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 4, Period: time.Hour}},
	}}})
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	check(err)
	demand := inspect.Demand{Count: 10, Request: throttle.Request{Policy: "geocoder", Tenant: "acme"}}
	ctx := context.Background()
	snapshot, err := inspect.Of(limiter).Snapshot(ctx, []inspect.Demand{demand})
	check(err)
	plan, err := snapshot.Plan(ctx, inspect.PlanOptions{})
	check(err)
	fmt.Println(plan.Expected.Sub(plan.At).Round(time.Hour), plan.Binds, plan.NeverFits == "")
	// Output: 2h0m0s per-hour true
}

// Would another limit help those that wait?
func ExampleInspector_Simulate() {
	policy := throttle.Policy{
		Name:    "geocoder",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 2, Period: time.Hour}},
	}
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{policy}})
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	check(err)
	var waiting []throttle.Request
	for i := range 6 {
		waiting = append(waiting, throttle.Request{Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}})
	}
	_, err = limiter.Line("geocoder").Join(context.Background(), waiting)
	check(err)
	raised := policy.WithDefaults()
	raised.Windows[0].Limit = 3
	now, then, err := inspect.Of(limiter).Simulate(context.Background(), raised)
	check(err)
	for _, s := range []inspect.Plan{now, then} {
		fmt.Println(s.Count, "waiting, the last starts in", s.Expected.Sub(s.At).Round(time.Hour))
	}
	// Output:
	// 6 waiting, the last starts in 2h0m0s
	// 6 waiting, the last starts in 1h0m0s
}

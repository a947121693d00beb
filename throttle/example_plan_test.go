package throttle_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// When would 10 more requests have started, behind what waits already? Nothing joins the line.
func ExampleLine_Plan() {
	limiter, end := exampleLimiter(throttle.Policy{
		Name:    "geocoder",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 4, Period: time.Hour}},
	})
	defer end()
	demand := throttle.Demand{Count: 10, Request: throttle.Request{Tenant: "acme"}}
	plan, err := limiter.Line("geocoder").Plan(context.Background(), []throttle.Demand{demand}, throttle.PlanOptions{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(plan.Expected.Sub(plan.At).Round(time.Hour), plan.Binds)
	// Output: 2h0m0s per-hour
}

// Would another limit help those that wait?
func ExampleLimiter_Simulate() {
	policy := throttle.Policy{
		Name:    "geocoder",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 2, Period: time.Hour}},
	}
	limiter, end := exampleLimiter(policy)
	defer end()
	var waiting []throttle.Request
	for i := range 6 {
		waiting = append(waiting, throttle.Request{Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}})
	}
	if _, err := limiter.Line("geocoder").Join(context.Background(), waiting); err != nil {
		log.Fatal(err)
	}
	raised := policy.WithDefaults()
	raised.Windows[0].Limit = 3
	simulations, err := limiter.Simulate(context.Background(), policy, raised)
	if err != nil {
		log.Fatal(err)
	}
	for _, s := range simulations {
		fmt.Println(s.Waiting, "waiting, the last starts in", s.Expected.Sub(s.At).Round(time.Hour))
	}
	// Output:
	// 6 waiting, the last starts in 2h0m0s
	// 6 waiting, the last starts in 1h0m0s
}

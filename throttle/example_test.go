package throttle_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func ExampleLimiter_Reserve() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name: "github-api",
		Windows: []throttle.Window{
			{Name: "per-minute", Limit: 20, Period: time.Minute},
			{Name: "burst", Limit: 5, Period: 3 * time.Second},
		},
	}}})
	if err != nil {
		log.Fatal(err)
	}
	for range 6 {
		d, err := limiter.Reserve(context.Background(), throttle.Request{Policy: "github-api", Tenant: "acme"})
		if err != nil {
			log.Fatal(err)
		}
		if !d.Granted {
			fmt.Println("come back within 3 s:", 0 < d.EarliestReset() && d.RetryIn <= 3*time.Second)
			break
		}
		fmt.Println("granted, remaining:", d.Windows[0].Remaining, d.Windows[1].Remaining)
	}
	// Output:
	// granted, remaining: 19 4
	// granted, remaining: 18 3
	// granted, remaining: 17 2
	// granted, remaining: 16 1
	// granted, remaining: 15 0
	// come back within 3 s: true
}

// An estimate is reserved, and corrected when the real cost is known.
func ExampleReservation_Settle() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name:    "llm",
		Windows: []throttle.Window{{Name: "spend", Limit: 10_000, Period: time.Hour, Unit: "tokens"}},
	}}})
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	check(err)
	ctx := context.Background()
	request := throttle.Request{Policy: "llm", Tenant: "acme", Cost: map[string]int64{"tokens": 1500}}

	d, err := limiter.Reserve(ctx, request)
	if err != nil || !d.Granted {
		log.Fatal(d.Reason(), err)
	}
	_, err = d.Reservation.Settle(ctx, map[string]int64{"tokens": 900})
	check(err)
	d, err = limiter.Reserve(ctx, request)
	if err != nil || !d.Granted {
		log.Fatal(d.Reason(), err)
	}
	fmt.Println("used:", d.Windows[0].Used, "by the second:", d.Reservation.CostOf("tokens"))

	refund, err := d.Reservation.Cancel(ctx) // the second call was not made after all
	check(err)
	fmt.Println("used:", refund.Windows[0].Used)
	// Output:
	// used: 2400 by the second: 1500
	// used: 900
}

func ExampleLimiter_Wait() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name:    "github-api",
		Windows: []throttle.Window{{Name: "steady", Limit: 2, Period: 100 * time.Millisecond}},
	}}})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for i := range 4 {
		if _, err := limiter.Wait(ctx, throttle.Request{Policy: "github-api", Tenant: "acme"}); err != nil {
			log.Fatal(err) // a *throttle.DeniedError, at once, if the minute is too short
		}
		fmt.Println("call", i+1)
	}
	// Output:
	// call 1
	// call 2
	// call 3
	// call 4
}

// A slot of a Concurrency window is kept for as long as the work goes on.
func ExampleReservation_Hold() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name:    "renders",
		Windows: []throttle.Window{{Name: "at-once", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Shared: true}},
	}}})
	if err != nil {
		log.Fatal(err)
	}
	render := func(ctx context.Context) error {
		d, err := limiter.Reserve(ctx, throttle.Request{Policy: "renders"})
		if err != nil {
			return err
		}
		if !d.Granted {
			return &throttle.DeniedError{Decision: d}
		}
		work := d.Reservation.Hold(ctx)
		defer d.Reservation.Release(ctx)
		second, err := limiter.Reserve(work, throttle.Request{Policy: "renders"})
		fmt.Println("a second one beside it:", second.Granted, "of a lease:", second.Windows[0].Algorithm.Leases())
		return err // or context.Cause(work): throttle.ErrLeaseLost if the slot was lost
	}
	for range 2 {
		if err := render(context.Background()); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// a second one beside it: false of a lease: true
	// a second one beside it: false of a lease: true
}

// Adapters for another job queue and another client library, as packages worker and httpthrottle are for theirs.
func ExampleLine() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name:    "llm",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 2, Period: time.Hour, Shared: true}},
	}}})
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	check(err)
	ctx, line := context.Background(), limiter.Line(limiter.LineOf("llm", "acme")) // of Limiter.Lines

	jobs := map[string]throttle.Request{} // the queue
	var requests []throttle.Request
	for _, job := range []struct{ tenant, id string }{{"acme", "1"}, {"beta", "2"}, {"acme", "3"}} {
		r := throttle.Request{Policy: "llm", Tenant: job.tenant, Ticket: throttle.Ticket{Queue: "default", ID: job.id}}
		jobs[job.id], requests = r, append(requests, r)
	}
	join := func(requests ...throttle.Request) {
		decisions, err := line.Join(ctx, requests)
		check(err)
		for i, decision := range decisions {
			fmt.Println("job", requests[i].Ticket.ID, "starts in", decision.RetryIn.Round(time.Hour))
			if decision.Nudge {
				fmt.Println("a server is woken: none asks by then")
			}
		}
	}
	join(requests...)

	call := func(ctx context.Context, status string) { // the client library, which a handler uses
		caller, sent := throttle.CallerFrom(ctx), time.Now()
		r := throttle.Request{Policy: "llm", Tenant: caller.Request.Tenant, MaxHold: time.Minute}
		if !caller.Counted("llm") { // else the job's cost has the call
			_, err := limiter.Wait(ctx, r)
			check(err)
		}
		if fmt.Println("answer:", status); status != "429" {
			caller.Answered("llm", sent)
			return
		}
		caller.Refused("llm", time.Minute)
		_, err := limiter.Attach(throttle.Reservation{Request: r}).Pause(ctx, time.Minute, status)
		check(err)
	}
	for _, status := range []string{"200", "429"} { // a server
		taken, err := line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"urgent": 2, "default": 1}, Strict: true, Max: 2})
		check(err)
		t, at := taken.Tickets[0], time.Now()
		check(line.PutBack(ctx, append(taken.Others, taken.Tickets[1:]...))) // what cannot start now keeps its place
		d, r := t.Decision, jobs[t.ID]
		if r.Policy == "" { // the job was deleted
			check(line.Refund(ctx, taken.Tickets[:1]))
			continue
		}
		if t.NeverFits { // its limit was lowered
			fmt.Println("job", t.ID, "fails")
			continue
		}
		if time.Since(at) > time.Second || !line.Matches(t, r) { // it was held up, or has changed
			d, err = line.ReserveAgain(ctx, t, r)
			if check(err); !d.Granted {
				continue // it waits again
			}
		}
		fmt.Println("job", t.ID, "of", d.Tenant, "waited", t.Waited.Round(time.Hour))
		caller := &throttle.Caller{Decision: d, Request: throttle.Request{Policy: r.Policy, Tenant: r.Tenant}}
		call(d.Reservation.Hold(throttle.WithCaller(ctx, caller)), status)
		check(d.Reservation.Release(ctx))
		if _, _, refused := caller.Refusal(); refused {
			r.Front, r.Since = true, t.Since
			join(r)
		}
	}
	check(line.Acknowledge(ctx))                                // no Take follows
	e := &throttle.Expectation{Request: requests[2], Ask: true} // what a page about acme shows
	check(line.Expect(ctx, e))
	fmt.Println("acme's last job starts in", e.Decision.RetryIn.Round(time.Hour), "as", e.Decision.Binds, "binds")
	check(line.Leave(ctx, requests[2].Ticket)) // somebody deletes it
	// Output:
	// job 1 starts in 0s
	// a server is woken: none asks by then
	// job 2 starts in 0s
	// job 3 starts in 1h0m0s
	// job 1 of acme waited 0s
	// answer: 200
	// job 2 of beta waited 0s
	// answer: 429
	// job 2 starts in 1h0m0s
	// acme's last job starts in 1h0m0s as per-hour binds
}

func ExampleLimiter_SetPolicies() {
	policy := throttle.Policy{
		Name:    "github-api",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 1, Period: time.Hour}},
	}
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{policy}})
	check(err)
	reserve := func() {
		d, err := limiter.Reserve(context.Background(), throttle.Request{Policy: "github-api", Tenant: "acme"})
		check(err)
		fmt.Println(d.Granted, d.Windows[0].Used, "of", d.Windows[0].Limit)
	}
	reserve()
	reserve()
	policy.Windows[0].Limit = 2 // what was counted stays counted
	check(limiter.SetPolicies([]throttle.Policy{policy}))
	reserve()
	// Output:
	// true 1 of 1
	// false 1 of 1
	// true 2 of 2
}

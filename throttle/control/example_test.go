package control_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A tool of operators changes what programs do while they run. Each program has a limiter that follows the store.
func Example() {
	limiter, err := throttle.New(throttle.Config{Client: throttletest.Embedded(), Policies: []throttle.Policy{{
		Name: "api", Match: []string{"api:*"},
		Windows: []throttle.Window{{Name: "per-hour", Limit: 1, Period: time.Hour}},
	}}})
	ctx, anna := context.Background(), control.Author{Who: "anna", Why: "migration, INC-7"}
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	check(err)
	store := control.StoreOf(limiter)
	follower := store.Follow(ctx, control.FollowConfig{})
	defer follower.Close()

	policies := limiter.Policies()
	policies[0].Windows[0].Limit = 3
	fmt.Println(control.Differences(limiter.Policies(), policies))
	version, err := store.Publish(ctx, policies, 0, anna)
	check(err)
	for runs := map[string][]string{}; len(runs[fmt.Sprint("published version ", version)]) < 1; time.Sleep(time.Millisecond) {
		runs, err = store.Processes(ctx)
		check(err)
	}
	for range 4 {
		d, err := limiter.Reserve(ctx, throttle.Request{Policy: "api", Tenant: "acme"})
		check(err)
		fmt.Println(d.Granted)
	}
	state, err := store.State(ctx)
	check(err)
	first, err := state.Front("api", "acme", 2*time.Hour)
	check(err)
	check(store.SetOverride(ctx, first, 2*time.Hour, anna))
	fmt.Println("acme", control.DescribeOverride(first))
	err = store.SetOverride(ctx, first, 0, anna)
	fmt.Println("the caller's mistake:", errors.As(err, new(control.InputError)))

	follower.Close()
	// A limiter that does not follow takes the policies and overrides of now. What it does itself, the tool logs.
	check(store.Record(ctx, control.Change{Author: anna, Kind: control.WasReset, Policy: "api", Tenant: "acme"}))
	state, err = store.State(ctx)
	check(errors.Join(err, state.PoliciesErr))
	inForce, others := state.Effective()
	check(limiter.SetPolicies(inForce, state.Removed...))
	limiter.SetInterventions(others)
	_, err = limiter.Reset(ctx, "api", "acme")
	check(err)
	fmt.Println("overrides by", state.Overrides[0].Author, "now and tomorrow:", len(state.Overrides), len(state.InForce(state.At.Add(24*time.Hour)).Overrides))
	// Output:
	// api/per-hour 1/h -> 3/h
	// true
	// true
	// true
	// false
	// acme goes first
	// the caller's mistake: true
	// overrides by anna now and tomorrow: 1 0
}

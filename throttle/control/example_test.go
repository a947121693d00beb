package control_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
)

// A limit of one tenant is raised while programs run. A worker and a client have a limiter each, and both follow.
func Example() {
	server, err := miniredis.Run() // in production, a Redis
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	ctx := context.Background()
	policies := []throttle.Policy{{
		Name: "api", Match: []string{"api:*"},
		Windows: []throttle.Window{{Name: "per-hour", Limit: 1, Period: time.Hour}},
	}}

	limiter, err := throttle.New(throttle.Config{Client: client, Policies: policies})
	if err != nil {
		log.Fatal(err)
	}
	store := control.StoreOf(limiter)
	follower := store.Follow(ctx, control.FollowConfig{})
	defer follower.Close()

	by := control.Author{Who: "anna", Why: "migration, INC-7"}
	more := throttle.TenantOverride{Policy: "api", Tenant: "acme", Windows: map[string]throttle.Override{"per-hour": {Limit: 3}}}
	if err := store.SetOverride(ctx, more, 2*time.Hour, by); err != nil {
		log.Fatal(err)
	}

	for len(limiter.Interventions().Overrides) == 0 { // within a second
		time.Sleep(time.Millisecond)
	}
	for range 4 {
		d, err := limiter.Reserve(ctx, throttle.Request{Policy: "api", Tenant: "acme"})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Granted)
	}
	// Output:
	// true
	// true
	// true
	// false
}

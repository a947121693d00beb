package throttle_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

func ExampleLimiter_Reserve() {
	server, err := miniredis.Run() // any Redis will do
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()

	limiter, err := throttle.New(throttle.Config{
		Client: client,
		Policies: []throttle.Policy{{
			Name: "github-api",
			Windows: []throttle.Window{
				{Name: "per-minute", Limit: 20, Period: time.Minute},
				{Name: "burst", Limit: 5, Period: 3 * time.Second},
			},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	for range 6 {
		d, err := limiter.Reserve(context.Background(), throttle.Request{Policy: "github-api", Tenant: "acme"})
		if err != nil {
			log.Fatal(err)
		}
		if !d.Granted {
			fmt.Println("come back within 3 s:", 0 < d.RetryIn && d.RetryIn <= 3*time.Second)
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

func ExampleReservation_Cancel() {
	server, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()

	limiter, err := throttle.New(throttle.Config{
		Client: client,
		Policies: []throttle.Policy{{
			Name:    "llm",
			Windows: []throttle.Window{{Name: "spend", Limit: 10_000, Period: time.Hour, Unit: "tokens"}},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	d, err := limiter.Reserve(context.Background(), throttle.Request{
		Policy: "llm", Tenant: "acme", Cost: map[string]int64{"tokens": 1500},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("used:", d.Windows[0].Used)
	d, err = d.Reservation.Cancel(context.Background()) // the call was not made after all
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("used:", d.Windows[0].Used)
	// Output:
	// used: 1500
	// used: 0
}

// An operator stops a policy for one tenant, and lets it go on.
func ExampleLimiter_Pause() {
	server, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	limiter, err := throttle.New(throttle.Config{
		Client: client,
		Policies: []throttle.Policy{{
			Name:    "llm",
			Windows: []throttle.Window{{Name: "requests", Limit: 10, Period: time.Minute}},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()

	acme := throttle.Request{Policy: "llm", Tenant: "acme"}
	if err := limiter.Pause(ctx, acme, time.Hour); err != nil {
		log.Fatal(err)
	}
	d, err := limiter.Peek(ctx, acme)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("granted:", d.Granted, "retry in about", d.RetryIn.Round(time.Hour))
	if err := limiter.Resume(ctx, acme); err != nil {
		log.Fatal(err)
	}
	d, err = limiter.Peek(ctx, acme)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("granted:", d.Granted)
	// Output:
	// granted: false retry in about 1h0m0s
	// granted: true
}

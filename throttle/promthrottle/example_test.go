package promthrottle_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/promthrottle"
)

// A limiter with metrics. A program serves the registry by promhttp.HandlerFor.
func Example() {
	server, err := miniredis.Run() // in production, a Redis
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	policies := []throttle.Policy{{
		Name: "api", Match: []string{"api:*"},
		Windows: []throttle.Window{{Name: "per-hour", Limit: 1, Period: time.Hour}},
	}}

	registry := prometheus.NewRegistry()
	metrics, err := promthrottle.New(registry)
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := throttle.New(throttle.Config{Client: client, Observer: metrics.Observe, Policies: policies})
	if err != nil {
		log.Fatal(err)
	}
	metrics.Watch(limiter)

	for range 3 {
		if _, err := limiter.Reserve(context.Background(), throttle.Request{Policy: "api", Tenant: "acme"}); err != nil {
			log.Fatal(err)
		}
	}
	families, err := registry.Gather()
	if err != nil {
		log.Fatal(err)
	}
	for _, family := range families {
		if name := family.GetName(); name == "sluice_grants_total" || name == "sluice_denials_total" {
			sum := 0.0
			for _, series := range family.GetMetric() {
				sum += series.GetCounter().GetValue()
			}
			fmt.Println(name, sum)
		}
	}
	// Output:
	// sluice_denials_total 2
	// sluice_grants_total 1
}

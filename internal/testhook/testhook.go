// Package testhook lets tests hand a limiter its clock and edit its scripts, wherever they live, and wake a worker.
package testhook

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// A Client is a connection to Redis with hooks for the one limiter that throttle.New makes with it, or
// for the one server that worker.NewServer makes with it.
type Client struct {
	redis.UniversalClient

	// Edit, if not nil, changes the text of every script.
	Edit func(text string) string

	// Now, if not nil, returns the time in microseconds that the scripts go by; 0 is the clock of Redis.
	Now func() int64

	// Gathered returns how many bundles of requests of a policy wait for the call that is under way. New sets it.
	Gathered func(policy string) int

	// Look has the worker ask each of its lines where tasks wait. NewServer sets it.
	Look func()

	// Refresh does at once what the first take after SetPolicies does in the background: tenants'
	// weights and own limits apply to the tickets in line. New sets it.
	Refresh func(ctx context.Context, policy string) error
}

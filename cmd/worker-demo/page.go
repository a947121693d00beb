package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/usage"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/page"
)

// tokenVariable holds the token of the page.
const tokenVariable = "SLUICE_PAGE_TOKEN"

// servePage serves the page of a limiter at an address such as localhost:8080, until the context ends
// or stop is called. It says on stderr where. Who knows the token in the environment may change
// something.
func (c *workersCommand) servePage(
	ctx context.Context, addr, asynqmon string, server *redisconn.Server, limiter *throttle.Limiter,
) (stop func(), err error) {
	token, _ := c.Env(tokenVariable)
	store, err := control.NewStore(server.Client, c.Prefix)
	if err != nil {
		return nil, inputError{err}
	}
	client, err := worker.NewClient(server.Opt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		return nil, err
	}
	p, err := page.New(page.Config{
		Asynqmon: asynqmon, Client: client, Control: store, Inspector: asynq.NewInspectorFromRedisClient(server.Client),
		Limiter: limiter, Token: token,
		Used: func(ctx context.Context, policy string) ([]usage.Use, error) {
			return c.mostUsed(ctx, server, policy)
		},
	})
	if err != nil {
		client.Close()
		return nil, inputError{err}
	}
	// The page shows what is in force.
	follower, err := control.Follow(ctx, control.FollowConfig{Limiter: limiter, Store: store})
	if err != nil {
		client.Close()
		return nil, err
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		follower.Close()
		client.Close()
		return nil, inputError{fmt.Errorf("--http %q: %w", addr, err)}
	}
	ctx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() { defer close(watched); p.Run(ctx) }()
	web := &http.Server{Handler: p, ReadHeaderTimeout: 10 * time.Second}
	go web.Serve(listener)
	context.AfterFunc(ctx, func() { web.Close() })
	fmt.Fprintf(c.Stderr, "The page is at http://%s/\n", listener.Addr())
	return func() {
		cancel()
		<-watched
		follower.Close()
		client.Close()
	}, nil
}

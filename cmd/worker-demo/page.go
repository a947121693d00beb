package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/page"
)

// servePage serves the page of a limiter at an address such as localhost:8080, until the context ends
// or stop is called. It tells on stderr where.
func servePage(ctx context.Context, addr, asynqmon string, server *redisconn.Server, limiter *throttle.Limiter, stderr io.Writer) (stop func(), err error) {
	client, err := worker.NewClient(server.Opt, worker.ClientConfig{Limiter: limiter})
	if err != nil {
		return nil, err
	}
	p, err := page.New(page.Config{
		Asynqmon: asynqmon, Client: client, Inspector: asynq.NewInspectorFromRedisClient(server.Client), Limiter: limiter,
	})
	if err != nil {
		client.Close()
		return nil, inputError{err}
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		client.Close()
		return nil, inputError{fmt.Errorf("--http %q: %w", addr, err)}
	}
	ctx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() { defer close(watched); p.Run(ctx) }()
	web := &http.Server{Handler: p, ReadHeaderTimeout: 10 * time.Second}
	go web.Serve(listener)
	context.AfterFunc(ctx, func() { web.Close() })
	fmt.Fprintf(stderr, "The page is at http://%s/\n", listener.Addr())
	return func() {
		cancel()
		<-watched
		client.Close()
	}, nil
}

package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/hibiken/asynq"
	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/page"
)

// tokenVariable names the environment variable with the page's token.
const tokenVariable = "SLUICE_PAGE_TOKEN"

// pageCommand serves the page until it is interrupted. Changes need the token.
func (m *Main) pageCommand() *cli.Command {
	c := &workersCommand{Main: m}
	var asynqmon string
	return &cli.Command{
		Name: "page", ArgsUsage: "[ADDRESS]", Usage: "serve all of it as a page for browsers",
		Flags: c.liveFlags(&cli.StringFlag{Name: "asynqmon", Destination: &asynqmon,
			Usage: "link tasks to the asynqmon at `URL`"}),
		Action: onFleet(c.inForce, func(ctx context.Context, f *fleet, cmd *cli.Command) error {
			return c.servePage(ctx, cmp.Or(cmd.Args().First(), "localhost:8080"), asynqmon, f)
		}),
	}
}

func (c *workersCommand) servePage(ctx context.Context, addr, asynqmon string, f *fleet) error {
	token, _ := c.Env(tokenVariable)
	client, err := worker.NewClient(f.server.Opt, worker.ClientConfig{Limiter: f.limiter})
	if err != nil {
		return err
	}
	defer client.Close()
	p, err := page.New(page.Config{
		Asynqmon: asynqmon, Client: client, Control: f.store,
		Inspector: asynq.NewInspectorFromRedisClient(f.server.Client), Limiter: f.limiter, Token: token,
	})
	if err != nil {
		return inputError{err}
	}
	// The page shows what is in force now, also after a change.
	defer f.store.Follow(ctx, control.FollowConfig{KeepPolicies: f.file != nil}).Close()
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return badInput("the page's address %q: %w", addr, err)
	}
	go p.Run(ctx)
	web := &http.Server{Handler: p, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() { web.Close() })()
	fmt.Fprintf(c.Stderr, "The page is at http://%s/\n", listener.Addr())
	if err := web.Serve(listener); ctx.Err() == nil {
		return err
	}
	return nil
}

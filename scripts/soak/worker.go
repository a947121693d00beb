package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/rpc"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// workerCommand is the hidden subcommand by which the soak starts itself as a worker.
const workerCommand = "worker"

// slots is how many tasks a worker runs at once.
const slots = 8

var errFault = errors.New("a failure of the test")

// A reporter runs tasks, and reports to the journal.
type reporter struct {
	holder  string
	journal *rpc.Client
}

// work runs a worker until SIGTERM, or until the parent is gone.
func work(args []string) error {
	flags := flag.NewFlagSet(workerCommand, flag.ContinueOnError)
	holder := flags.String("holder", "", "name of this process")
	journal := flags.String("journal", "", "address")
	redisAddr := flags.String("redis", "", "address")
	cluster := flags.Bool("cluster", false, "the address is that of a Redis Cluster")
	throttled := flags.Bool("throttled", false, "with Sluice")
	if err := flags.Parse(args); err != nil {
		return err
	}
	logging.Disable()
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(1) // the parent is gone
	}()
	client, err := rpc.Dial("tcp", *journal)
	if err != nil {
		return err
	}
	r := &reporter{*holder, client}
	opt := redisOpt{*redisAddr, *cluster}
	config := asynq.Config{
		Concurrency:              slots,
		DelayedTaskCheckInterval: time.Second,
		LogLevel:                 asynq.ErrorLevel,
		RetryDelayFunc:           func(int, error, *asynq.Task) time.Duration { return time.Second },
		TaskCheckInterval:        100 * time.Millisecond,
	}
	var server interface {
		Start(asynq.Handler) error
		Shutdown()
	}
	if *throttled {
		limits := opt.client()
		defer limits.Close()
		limiter, err := throttle.New(throttle.Config{Client: limits, Policies: []throttle.Policy{soakPolicy()}})
		if err != nil {
			return err
		}
		server, err = worker.NewServer(opt, config, worker.Config{
			Limiter: limiter, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)), OnDecision: r.decided,
		})
		if err != nil {
			return err
		}
	} else {
		server = asynq.NewServer(opt, config)
	}
	if err := server.Start(asynq.HandlerFunc(r.handle)); err != nil {
		return err
	}
	<-ctx.Done()
	server.Shutdown()
	return nil
}

func (r *reporter) decided(ctx context.Context, _ *asynq.Task, d throttle.Decision) {
	if !d.Granted {
		id, _ := asynq.GetTaskID(ctx)
		r.journal.Go("Journal.Deny", Denied{id, d.At.Add(d.RetryIn)}, &None{}, nil)
	}
}

// handle runs a task as the journal says.
func (r *reporter) handle(ctx context.Context, task *asynq.Task) error {
	id, _ := asynq.GetTaskID(ctx)
	retried, _ := asynq.GetRetryCount(ctx)
	identity, err := worker.IdentityOf(task)
	if err != nil {
		return err
	}
	begin := Started{Task: id, Tenant: identity.Tenant, Holder: r.holder, Retried: retried}
	if d, ok := worker.FromContext(ctx).Decision(); ok && d.FailedOpen == nil {
		begin.Granted = d.At
	}
	var verdict Verdict
	if err := r.journal.Call("Journal.Start", begin, &verdict); err != nil {
		return fmt.Errorf("reporting to the journal: %w", err)
	}
	time.Sleep(verdict.Work)
	if err := r.journal.Call("Journal.End", Ended{verdict.Run, verdict.Fail}, &None{}); err != nil {
		return fmt.Errorf("reporting to the journal: %w", err)
	}
	switch {
	case verdict.Fail && verdict.Panic:
		panic(errFault)
	case verdict.Fail:
		return errFault
	}
	return nil
}

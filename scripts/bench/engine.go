package main

import (
	"context"
	"io"
	"time"
)

// engine measures what throttling costs end to end, against plain asynq and other limiters.
func engine(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	s := suite{name: "engine", scenarios: engineScenarios()}
	flags := s.flags(stderr, "about half an hour in place of some minutes")
	flags.IntVar(&s.options.rounds, "rounds", 3, "`measurements` of each side, in turn; the median counts")
	flags.IntVar(&s.options.waiting, "waiting", 0, "`tickets` in the case waiting; 0 is its own number")
	if err := flags.Parse(args); err != nil {
		return &usageError{err}
	}
	if s.options.rounds < 1 || s.options.waiting < 0 || flags.NArg() > 0 {
		return wrongUsage(stderr, "-rounds must be at least 1, -waiting at least 0, and nothing may follow the flags")
	}
	return s.run(ctx, stdout, stderr)
}

func engineScenarios() []scenario {
	return []scenario{
		{"enqueue", "our client against asynq's: 16 goroutines enqueue one task a call, limits never bind",
			engineEnqueue},
		{"enqueue-batch", "our client against asynq's: 500 tasks a call", engineEnqueueBatch},
		{"run-10", "Sluice against plain asynq: limits never bind, 10 tenants",
			engineRun(20_000, 10, 32, 0, 0.80)},
		{"run-1000", "Sluice against plain asynq: limits never bind, 1,000 tenants",
			engineRun(20_000, 1000, 32, 0, 0.80)},
		{"run-5ms", "Sluice against plain asynq: limits never bind, handlers of 5 ms on 32 slots",
			engineRun(20_000, 10, 32, 5*time.Millisecond, 0.90)},
		{"run-2ms", "Sluice against plain asynq: limits never bind, handlers of 2 ms on 10 slots",
			engineRun(20_000, 10, 10, 2*time.Millisecond, 0.90)},
		{"rate-500", "Sluice at 500 per second, shared, and a window for each tenant; " +
			"Redis CPU against plain asynq without limits", engineRate(500, 0.99, true)},
		{"rate-2000", "the same at 2,000 per second", engineRate(2000, 0.96, true)},
		{"rate-5000", "the same at 5,000 per second", engineRate(5000, 0.85, false)},
		{"second", "a backlog at 20 per second, default settings; utilization of the limit, time to start",
			engineDefaults(rate{20, time.Second}, 100, 620, 0.99, true)},
		{"tenth", "the same at 5 per 100 ms",
			engineDefaults(rate{5, 100 * time.Millisecond}, 205, 1005, 0.95, false)},
		{"idle-system", "one task now and then that fits at once, default settings; time from enqueue to start",
			engineIdleSystem},
		{"idle-server", "Sluice against plain asynq: Redis commands of an idle server, default settings",
			engineIdleServer},
		{"servers", "many idle servers at one slow line; their takes, time to start", engineServers},
		{"bursts", "the same at a fast line that goes in bursts", engineBursts},
		{"earliest-reset", "requeue: earliest-reset, default settings; time from the reset to the start", engineReset},
		{"slots", "handler slots bind and no limit does: " +
			"one tenant's backlog, then 100 tasks of each of nine; their shares", engineSlots},
		{"reserve", "Reserve of two exact windows against one call of redis_rate: 64 goroutines", engineReserve},
		{"reserve-one", "the same with one goroutine", engineReserveOne},
		{"full", "single calls to full sliding windows: limits of 1,000 and 100,000 against one of 20", engineFull},
		{"shapes", "single calls to two scopes, and to five windows, against two windows in one scope", engineShapes},
		{"waiting", "a join behind many tickets against a join of an empty line; full: 1,000,000 tickets",
			engineWaiting},
		{"state", "a page of the state of a long line, and why one of its tickets waits; " +
			"full: 1,000,000 tickets of 100,000 tenants", engineState},
		{"keys", "how many keys in Redis a grant adds", engineKeys},
		{"bullmq", "BullMQ's limiter against plain asynq; needs node and npm", engineBullMQ},
	}
}

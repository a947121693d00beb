package main

import (
	"context"
	"io"
	"time"
)

// engine measures what throttling costs end to end, beside plain asynq and other limiters.
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
		{"enqueue", "our client enqueues by 16 goroutines, limits never bind, beside asynq's client", engineEnqueue},
		{"enqueue-batch", "our client enqueues 500 tasks a call, beside asynq's client", engineEnqueueBatch},
		{"run-10", "limits never bind, 10 tenants, beside plain asynq", engineRun(20_000, 10, 32, 0, 0.80)},
		{"run-1000", "limits never bind, 1,000 tenants, beside plain asynq", engineRun(20_000, 1000, 32, 0, 0.80)},
		{"run-5ms", "limits never bind, handlers of 5 ms on 32 slots, beside plain asynq", engineRun(20_000, 10, 32, 5*time.Millisecond, 0.90)},
		{"run-2ms", "limits never bind, handlers of 2 ms on 10 slots, beside plain asynq", engineRun(20_000, 10, 10, 2*time.Millisecond, 0.90)},
		{"rate-500", "500 per second shared and a window of each tenant, beside plain asynq", engineRate(500, 0.99, true)},
		{"rate-2000", "2,000 per second shared and a window of each tenant, beside plain asynq", engineRate(2000, 0.96, true)},
		{"rate-5000", "5,000 per second shared and a window of each tenant, beside plain asynq", engineRate(5000, 0.85, false)},
		{"second", "20 per second at default settings", engineDefaults(rate{20, time.Second}, 100, 620, 0.99, true)},
		{"tenth", "5 per 100 ms at default settings", engineDefaults(rate{5, 100 * time.Millisecond}, 205, 1005, 0.95, false)},
		{"idle-system", "one task now and then, at default settings", engineIdleSystem},
		{"idle-server", "a server with nothing to do, at default settings, beside plain asynq", engineIdleServer},
		{"servers", "many servers idle beside one line", engineServers},
		{"earliest-reset", "requeue: earliest-reset at default settings", engineReset},
		{"slots", "slots bind and no limit: a backlog of one tenant, then 100 tasks of each of nine", engineSlots},
		{"reserve", "Reserve of two exact windows by 64 goroutines, beside redis_rate", engineReserve},
		{"reserve-one", "the same by one goroutine", engineReserveOne},
		{"full", "full sliding windows of 1,000 and of 100,000, beside one of 20, single calls", engineFull},
		{"shapes", "two scopes, and five windows, beside two windows in one scope, single calls", engineShapes},
		{"waiting", "a join behind many tickets beside one of an empty line, full: 1,000,000", engineWaiting},
		{"keys", "keys that a grant leaves in Redis", engineKeys},
		{"bullmq", "BullMQ's limiter, beside plain asynq; needs node and npm", engineBullMQ},
	}
}

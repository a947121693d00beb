package main

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
)

// caseServers: many servers, idle but for one line.
func caseServers(ctx context.Context, o scenarioOptions) []figure {
	servers, rates := []int{1, 10}, []int{20, 500}
	if o.full {
		servers, rates = []int{1, 10, 50, 200}, []int{20, 500, 2000}
	}
	s := newTestbed(o)
	take := takeScript(ctx, s.addr())
	return medians(o.rounds, func(round int) []figure {
		var all []figure
		for _, limit := range rates {
			for _, n := range servers {
				o.say("round %d of %d: %d servers beside %d per second", round+1, o.rounds, n, limit)
				all = append(all, s.drainOneLine(ctx, n, limit, take, false)...)
			}
		}
		return all
	})
}

// caseBursts: the same beside a backlog that begins with all units free. Servers take these units as
// fast as they can, and again whatever fits a period later.
func caseBursts(ctx context.Context, o scenarioOptions) []figure {
	s := newTestbed(o)
	take := takeScript(ctx, s.addr())
	return medians(o.rounds, func(round int) (all []figure) {
		for _, n := range []int{1, 10, 50, 200} {
			o.say("round %d of %d: %d servers", round+1, o.rounds, n)
			all = append(all, s.drainOneLine(ctx, n, 2000, take, true)...)
		}
		return all
	})
}

// drainOneLine makes servers with ten slots each drain a line of a shared window, evenly or in bursts.
func (s *testbed) drainOneLine(ctx context.Context, servers, limit int, take string, bursts bool) []figure {
	r := rate{limit, time.Second}
	policy := policyOf(shared("shared", int64(limit), r.period))
	// Servers connect and the first units are taken, one by one. Then the other tasks are enqueued,
	// which takes Redis up to two seconds. After these a backlog waits.
	const warmUp = 4
	n := limit * (warmUp + s.o.size(3, 8))
	c := crew{policy: &policy, servers: servers, slots: 10}
	var ours *drainRun
	if bursts {
		ours = s.drainOurs(ctx, c, tasks(n, 10))
	} else {
		ours = s.drainEvenly(ctx, c, tasks(n, 10), r)
	}
	granted := byGrant(ours.starts)
	from, to := granted[warmUp*limit].granted, granted[n-1].granted
	takes, vain := 0., 0.
	for _, log := range ours.calls {
		for _, call := range log.callsOf(take) {
			if call.sent.Before(from) || call.sent.After(to) {
				continue
			}
			takes++
			if call.reply <= takenNothing {
				vain++
			}
		}
	}
	seconds := to.Sub(from).Seconds()
	taken, _ := r.fits(ours.starts)
	name := fmt.Sprintf("%d per second, %d servers: ", limit, servers)
	p99 := milliseconds(quantile(taken[(warmUp-1)*limit:], 0.99))
	late := figure{Name: name + "fits to taken p99", Value: p99, Unit: "ms"}
	if !bursts { // in a burst no slot is free
		late.AtMost = new(20.)
	}
	return []figure{
		{Name: name + "takes a second", Value: math.Round(takes / seconds), AtMost: new(250.)},
		{Name: name + "takes a second that found nothing", Value: math.Round(vain / seconds)},
		late,
	}
}

// drainEvenly has a crew run as many tasks as fit in a period, enqueued one after the other in a
// period, and then the others, enqueued as fast as it goes.
func (s *testbed) drainEvenly(ctx context.Context, c crew, all []*asynq.Task, r rate) *drainRun {
	const wait = 5 * time.Millisecond
	s.clear(ctx)
	j := newStartLog(len(all))
	var shift shift
	defer shift.end()
	shift.start(c, s.addr(), j)
	s.withOurClient(*c.policy, func(client *worker.Client) {
		for begin, put := time.Now(), 0; put < r.limit; time.Sleep(wait) {
			due := min(r.limit, int(time.Since(begin)*time.Duration(r.limit)/r.period))
			inBulk(ctx, client, all[put:due])
			put = due
		}
		inBulk(ctx, client, all[r.limit:])
		j.await(ctx, s.o.say)
	})
	s.awaitDone(ctx)
	shift.end()
	starts := j.starts()
	check(eachRanOnce(starts, len(all), true))
	return &drainRun{calls: shift.calls, starts: starts, wakes: j.wakes()}
}

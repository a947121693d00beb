package main

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// engineServers: many servers with one line that moves slowly.
func engineServers(ctx context.Context, o scenarioOptions) []figure {
	servers, rates := []int{1, 10}, []int{20, 500}
	if o.full {
		servers, rates = []int{1, 10, 50, 200}, []int{20, 500, 2000}
	}
	s := newSite(o)
	take := takeScript(ctx, s.addr())
	return medians(o.rounds, func(round int) []figure {
		var all []figure
		for _, limit := range rates {
			for _, n := range servers {
				o.say("round %d of %d: %d servers beside %d per second", round+1, o.rounds, n, limit)
				figures := s.besideOneLine(ctx, n, limit, take)
				all = append(all, figures...)
			}
		}
		return all
	})
}

func (s *site) besideOneLine(ctx context.Context, servers, limit int, take string) []figure {
	r := rate{limit, time.Second}
	policy := throttle.Policy{Name: "api", Match: []string{"*"}, Windows: []throttle.Window{shared("shared", int64(limit), r.period)}}
	n := limit * (1 + s.o.of(3, 8))
	ours := s.drainOurs(ctx, crew{policy: &policy, servers: servers, slots: 10}, tasks(n, 10))
	// While a backlog waits, and after the first rush: servers connect during it, and fill the second
	// period as fast as they can, too.
	const rush = 2
	granted := byGrant(ours.starts)
	from, to := granted[rush*limit].granted, granted[n-1].granted
	takes, vain := 0., 0.
	for _, log := range ours.calls {
		for _, call := range log.of(take) {
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
	return []figure{
		{Name: name + "takes a second", Value: math.Round(takes / seconds), AtMost: new(250.)},
		{Name: name + "takes a second that found nothing", Value: math.Round(vain / seconds)},
		{Name: name + "fits to taken p99", Value: milliseconds(quantile(taken[(rush-1)*limit:], 0.99)), Unit: "ms", AtMost: new(20.)},
	}
}

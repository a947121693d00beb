package main

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/sluice-go/sluice/internal/apitest"
	"github.com/sluice-go/sluice/throttle"
)

// What the APIs publish, for each tenant. The policy has a margin of apiMargin.
const (
	apiLimit  = 20
	apiPeriod = 2 * time.Second
	apiMargin = 50 * time.Millisecond
	apiStart  = 2 * apiPeriod // from which on refusals count
)

// adapt measures what jobs of a real worker meet at APIs that count in another way than they
// publish. All cases run at the same time: they wait for most of it.
func adapt(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	s := suite{name: "adapt", scenarios: adaptScenarios(), together: true}
	flags := s.flags(stderr, "the same here")
	flags.IntVar(&s.options.rounds, "rounds", 1, "`number` of runs of each case; the median counts")
	if err := flags.Parse(args); err != nil {
		return &usageError{err}
	}
	if s.options.rounds < 1 || flags.NArg() > 0 {
		return wrongUsage(stderr, "-rounds must be at least 1, and nothing may follow the flags")
	}
	return s.run(ctx, stdout, stderr)
}

func adaptScenarios() []scenario {
	drains := func(name, about string, count func() apitest.Count) scenario {
		return adaptScenario(name, about, func(ctx context.Context, o scenarioOptions, _ uint64) []figure {
			api := newAPI(count)
			failed := api.drain(ctx, o, throttle.AdaptFull, 500, 0)
			refused, used := api.refusals(apiStart), api.utilization(apiStart, api.end())
			return []figure{
				{Name: "jobs that failed", Value: float64(failed), AtMost: new(0.)},
				{Name: "refusals after two periods, of calls", Value: refused, AtMost: new(apitest.MostRefused)},
				{Name: "utilization of the published limit", Value: used, AtLeast: new(apitest.LeastUsed)},
			}
		})
	}
	shared := func(name, about string, count func() apitest.Count) scenario {
		return adaptScenario(name, about, func(ctx context.Context, o scenarioOptions, seed uint64) []figure {
			const until = 2 * time.Minute
			var strangers []func() int
			api := newAPI(func() apitest.Count {
				seed++
				both, stranger := apitest.SharedCount(count(), apiPeriod/(apiLimit/2), seed)
				strangers = append(strangers, stranger)
				return both
			})
			failed := api.drain(ctx, o, throttle.AdaptFull, 2600, until)
			left := 0.0
			for _, stranger := range strangers {
				left += apiLimit*(1+until.Seconds()/apiPeriod.Seconds()) - float64(stranger())
			}
			used := api.count(api.accepted, 0, until) / left
			return []figure{
				{Name: "jobs that failed", Value: float64(failed), AtMost: new(0.)},
				{Name: "refusals, of calls", Value: api.refusals(0), AtMost: new(apitest.MostRefusedBeside)},
				{Name: "utilization of what is left", Value: used, AtLeast: new(apitest.LeastUsedBeside)},
			}
		})
	}
	return []scenario{
		drains("estimate", "an estimate over two buckets, which counts refused calls: 500 jobs of two tenants",
			func() apitest.Count { return apitest.EstimatedCount(apiLimit, apiPeriod) }),
		drains("half-burst", "a token bucket with half the burst: 500 jobs of two tenants",
			func() apitest.Count { return apitest.BucketCount(apiLimit, apiPeriod, apiLimit/2) }),
		drains("no-burst", "a leaky bucket that allows no burst: 500 jobs of two tenants",
			func() apitest.Count { return apitest.BucketCount(apiLimit, apiPeriod, 1) }),
		adaptScenario("halved", "a limit that is halved for a minute", halved),
		shared("stranger", "a token bucket shared with a stranger who takes half at random",
			func() apitest.Count { return apitest.BucketCount(apiLimit, apiPeriod, apiLimit) }),
		shared("stranger-exact", "an exact sliding window shared with a stranger who takes half at random",
			func() apitest.Count { return apitest.PublishedCount(apiLimit, apiPeriod) }),
		adaptScenario("published", "an API that counts as published, with adaptation and without", published),
	}
}

// adaptScenario is the scenario of a case, with the median of its rounds.
func adaptScenario(
	name, about string,
	run func(ctx context.Context, o scenarioOptions, seed uint64) []figure,
) scenario {
	return scenario{name, about, func(ctx context.Context, o scenarioOptions) []figure {
		return medians(o.rounds, func(round int) []figure { return run(ctx, o, uint64(1000*round)) })
	}}
}

func halved(ctx context.Context, o scenarioOptions, _ uint64) []figure {
	const from, restored, until = 20 * time.Second, 80 * time.Second, 130 * time.Second
	api := newAPI(func() apitest.Count { return apitest.HalvedCount(apiLimit, apiPeriod, from, restored) })
	failed := api.drain(ctx, o, throttle.AdaptFull, 2800, until)
	const span = 2 * apiPeriod
	full := 2 * apiLimit * span.Seconds() / (apiPeriod + apiMargin).Seconds()
	back := restored
	for back < until && api.count(api.accepted, back-span, back) < apitest.FullRate*full {
		back += 500 * time.Millisecond
	}
	took, most := (back - restored).Seconds(), apitest.MostUntilFull.Seconds()
	return []figure{
		{Name: "jobs that failed", Value: float64(failed), AtMost: new(0.)},
		{Name: "refusals, of calls", Value: api.refusals(0), AtMost: new(apitest.MostRefused)},
		{Name: "back to 0.95 of the full rate after", Value: took, Unit: "s", AtMost: &most},
		{Name: "utilization of the half", Value: 2 * api.utilization(from, restored)},
	}
}

func published(ctx context.Context, o scenarioOptions, _ uint64) []figure {
	var used [2]float64
	refused, failed := 0, 0
	var mu sync.Mutex
	inParallel(2, 2, func(i int) {
		api := newAPI(func() apitest.Count { return apitest.PublishedCount(apiLimit, apiPeriod) })
		n := api.drain(ctx, o, []throttle.Adapt{throttle.AdaptOff, throttle.AdaptFull}[i], 500, 0)
		mu.Lock()
		defer mu.Unlock()
		used[i] = api.utilization(apiStart, api.end())
		refused, failed = refused+len(api.refused), failed+n
	})
	return []figure{
		{Name: "jobs that failed", Value: float64(failed), AtMost: new(0.)},
		{Name: "refusals", Value: float64(refused), AtMost: new(0.)},
		{Name: "utilization beside adapt: off", Value: used[1] / used[0], AtLeast: new(0.99)},
	}
}

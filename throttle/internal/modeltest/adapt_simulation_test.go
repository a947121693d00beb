package modeltest

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/apitest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// The published limit of the simulated APIs, and the policy's margin.
const (
	apiLimit  = 20
	apiPeriod = 2 * time.Second
	apiMargin = 50 * time.Millisecond
)

// A simulation is a backlog of jobs that eight handlers work off against an API, in fake time.
type simulation struct {
	limitertest.Events
	count  apitest.Count
	jobs   int
	until  time.Duration
	random *rand.Rand

	model  *adaptModel // nil: keep_rate
	paused time.Duration
	window []time.Duration // when what it counts was granted
	asleep bool
	slots  int

	accepted, refused []time.Duration
}

func simulate(seed uint64, count apitest.Count, jobs int, until time.Duration, adapt bool) *simulation {
	s := &simulation{count: count, jobs: jobs, until: until, slots: 8, random: rand.New(rand.NewPCG(seed, seed))}
	if adapt {
		s.model = &adaptModel{cycle: toUS(apiPeriod + apiMargin), capacity: apiLimit}
	}
	s.after(0, s.grant)
	for s.Next(until) {
	}
	return s
}

func toUS(d time.Duration) float64  { return float64(d) / float64(time.Microsecond) }
func ofUS(us float64) time.Duration { return time.Duration(us * float64(time.Microsecond)) }

func (s *simulation) after(d time.Duration, what func()) { s.At(s.Now+d, what) }

// delay is from a grant to the API: 0.5 ms, and 2 ms more on average.
func (s *simulation) delay() time.Duration {
	return 500*time.Microsecond + time.Duration(s.random.ExpFloat64()*float64(2*time.Millisecond))
}

// grant grants all that fits now, and comes back when the next does.
func (s *simulation) grant() {
	for s.jobs > 0 && s.slots > 0 && !s.asleep {
		for len(s.window) > 0 && s.window[0]+apiPeriod+apiMargin <= s.Now {
			s.window = s.window[1:]
		}
		fits := max(s.Now, s.paused)
		if len(s.window) >= apiLimit {
			fits = max(fits, s.window[0]+apiPeriod+apiMargin)
		}
		if s.model != nil {
			fits = max(fits, ofUS(s.model.fitsAt(toUS(s.Now))))
		}
		if fits > s.Now {
			s.asleep = true
			s.after(fits-s.Now+s.delay()/2, func() { s.asleep = false; s.grant() })
			return
		}
		s.window = append(s.window, s.Now)
		if s.model != nil {
			s.model.take(toUS(s.Now))
		}
		s.jobs, s.slots = s.jobs-1, s.slots-1
		granted := s.Now
		s.after(s.delay(), func() { s.call(granted) })
	}
}

func (s *simulation) call(granted time.Duration) {
	ok := s.count(s.Now)
	if ok {
		s.accepted = append(s.accepted, s.Now)
	} else {
		s.refused = append(s.refused, s.Now)
	}
	s.after(50*time.Millisecond, func() {
		s.slots++
		if !ok {
			s.jobs++
			wait := time.Second
			if s.model != nil {
				wait = ofUS(s.model.refused(toUS(s.Now), toUS(granted), 0))
			}
			s.paused = max(s.paused, s.Now+wait)
		}
		s.grant()
	})
}

func between(times []time.Duration, from, until time.Duration) float64 {
	n := 0
	for _, at := range times {
		if at >= from && at < until {
			n++
		}
	}
	return float64(n)
}

// refusals is the part of calls that were refused from a time on.
func (s *simulation) refusals(from time.Duration) float64 {
	refused := between(s.refused, from, s.until)
	return refused / (refused + between(s.accepted, from, s.until))
}

// end is when the last call was accepted, or the end of the simulation.
func (s *simulation) end() time.Duration { return min(s.until, s.accepted[len(s.accepted)-1]) }

func published(d time.Duration) float64 { return apiLimit * d.Seconds() / apiPeriod.Seconds() }

const apiRuns = 24

// mean runs a simulation by several seeds.
func mean(run func(seed uint64) []float64) []float64 {
	var sums []float64
	for seed := uint64(1); seed <= apiRuns; seed++ {
		figures := run(seed)
		sums = slices.Grow(sums, len(figures))[:len(figures)]
		for i, f := range figures {
			sums[i] += f / apiRuns
		}
	}
	return sums
}

// Against APIs that count differently all jobs succeed, with few refusals after two periods, and by most of the
// limit.
func TestAdaptingToAnotherWayToCount(t *testing.T) {
	for name, count := range map[string]func() apitest.Count{
		"an estimate over two buckets":   func() apitest.Count { return apitest.EstimatedCount(apiLimit, apiPeriod) },
		"half the burst":                 func() apitest.Count { return apitest.BucketCount(apiLimit, apiPeriod, apiLimit/2) },
		"a leaky bucket without a burst": func() apitest.Count { return apitest.BucketCount(apiLimit, apiPeriod, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			const jobs, start = 250, 2 * apiPeriod
			figures := mean(func(seed uint64) []float64 {
				s := simulate(seed, count(), jobs, time.Hour, true)
				expect.Require(t, len(s.accepted) == jobs, len(s.accepted), jobs, "jobs are done")
				return []float64{s.refusals(start), between(s.accepted, start, s.end()) / published(s.end()-start)}
			})
			t.Logf("refusals %.3f, utilization %.3f", figures[0], figures[1])
			expect.That(t, figures[0] <= apitest.MostRefused && figures[1] >= apitest.LeastUsed,
				"want at most", apitest.MostRefused, "at least", apitest.LeastUsed)
			without := simulate(1, count(), jobs, 80*time.Second, false)
			expect.That(t, name == "half the burst" || without.refusals(start) > apitest.MostRefused, "this API tests nothing")
		})
	}
}

func TestAdaptingToALimitThatIsHalvedForAMinute(t *testing.T) {
	const halved, restored, until = 20 * time.Second, 80 * time.Second, 140 * time.Second
	figures := mean(func(seed uint64) []float64 {
		s := simulate(seed, apitest.HalvedCount(apiLimit, apiPeriod, halved, restored), 1e6, until, true)
		full := apitest.FullRate * published(2*apiPeriod) * toUS(apiPeriod) / toUS(apiPeriod+apiMargin)
		back := restored
		for ; between(s.accepted, back-2*apiPeriod, back) < full; back += time.Second {
			expect.Require(t, back <= until, "the rate does not come back")
		}
		return []float64{s.refusals(0), (back - restored).Seconds(), between(s.accepted, halved, restored) / published((restored-halved)/2)}
	})
	t.Logf("refusals %.3f, back after %.1f s, utilization of the half %.3f", figures[0], figures[1], figures[2])
	expect.That(t, figures[0] <= apitest.MostRefused &&
		figures[1] <= apitest.MostUntilFull.Seconds() && figures[2] >= apitest.LeastUsed,
		"want at most", apitest.MostRefused, "at most", apitest.MostUntilFull, "at least", apitest.LeastUsed)
}

func TestAdaptingToAStrangerOnTheSameKey(t *testing.T) {
	const until = 2 * time.Minute
	figures := mean(func(seed uint64) []float64 {
		count, stranger := apitest.SharedCount(apitest.BucketCount(apiLimit, apiPeriod, apiLimit), apiPeriod/(apiLimit/2), seed)
		s := simulate(seed, count, 1e6, until, true)
		return []float64{s.refusals(0), between(s.accepted, 0, until) / (published(until) - float64(stranger()))}
	})
	t.Logf("refusals %.3f, utilization of what is left %.3f", figures[0], figures[1])
	expect.That(t, figures[0] <= apitest.MostRefusedBeside && figures[1] >= apitest.LeastUsedBeside,
		"want at most", apitest.MostRefusedBeside, "at least", apitest.LeastUsedBeside)
}

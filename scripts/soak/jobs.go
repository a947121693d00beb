package main

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// The policy of the throttled stack. Its limits are low enough that most tasks wait.
const (
	policyName   = "soak"
	taskType     = "soak:call"
	queue        = "default"
	sharedLimit  = 60
	tenantLimit  = 20
	windowPeriod = 2 * time.Second

	// The ledger never denies. At the end it has counted every unit that was ever charged.
	ledgerWindow = "ledger"
)

func soakPolicy() throttle.Policy {
	return throttle.Policy{
		Name:    policyName,
		Match:   []string{taskType},
		Tenants: map[string]throttle.Tenant{"beta": {Weight: 2}, "chip": {Weight: 4}},
		Windows: []throttle.Window{
			{Name: "tenant", Limit: tenantLimit, Period: windowPeriod},
			{Name: "shared", Limit: sharedLimit, Period: windowPeriod, Shared: true},
			{Name: ledgerWindow, Limit: throttle.MaxLimit, Period: 24 * time.Hour},
		},
	}
}

// load lists the tenants and their parts of the load.
var load = []struct {
	tenant  string
	percent int
}{{"acme", 35}, {"beta", 25}, {"chip", 20}, {"dune", 15}, {"echo", 5}}

// Most tasks come in bursts.
const (
	burstEvery = 5 * time.Second
	inBursts   = 0.8
	// loadFactor is the part of the shared window that first attempts take. Retries take more.
	loadFactor = 0.65
)

// A job is one task to enqueue, and how its runs will go.
type job struct {
	ID, Tenant string
	At         time.Duration // when it is enqueued, from the begin
	Delay      time.Duration // ProcessIn
	Fails      int           // how many of its first runs fail; more than MaxRetry: all
	MaxRetry   int
	Batched    bool // enqueued together with the jobs of its burst, if it joins
	Joins      bool // the line at the enqueue, by worker.Client
	Panics     bool // its failures are panics
	Retained   bool
	Unique     bool
	Work       time.Duration // of its handler
}

// archives reports whether the job ends in the archive by its own failures.
func (j job) archives() bool { return j.Fails > j.MaxRetry }

// runs returns how often the job runs if no fault hits it.
func (j job) runs() int { return min(j.Fails, j.MaxRetry) + 1 }

// makeJobs returns the jobs of a soak of a length, in the order of their times.
func makeJobs(seed uint64, length time.Duration) []job {
	r, ids := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 3))
	jobs := make([]job, int(loadFactor*sharedLimit*length.Seconds()/windowPeriod.Seconds()))
	for i := range jobs {
		j := job{
			ID:       fmt.Sprintf("task-%05d", i),
			MaxRetry: 1 + r.IntN(5),
			Work:     time.Duration(1+r.IntN(10)) * time.Millisecond,
		}
		if ids.Float64() < 0.5 {
			j.ID = fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x",
				i, ids.IntN(1<<16), ids.IntN(1<<12), ids.IntN(1<<12), ids.Int64N(1<<48))
		}
		j.At = time.Duration(r.Int64N(int64(length)))
		if r.Float64() < inBursts {
			j.At = j.At.Truncate(burstEvery)
			if j.Batched = r.Float64() < 0.5; !j.Batched {
				j.At += time.Duration(r.Int64N(int64(200 * time.Millisecond)))
			}
		}
		drawn := r.IntN(100)
		for _, l := range load {
			if j.Tenant = l.tenant; drawn < l.percent {
				break
			}
			drawn -= l.percent
		}
		if r.Float64() < 0.2 {
			j.MaxRetry = 0
		}
		switch x := r.Float64(); {
		case x < 0.04:
			j.Fails = j.MaxRetry + 1
		case x < 0.2:
			j.Fails = r.IntN(j.MaxRetry + 1)
		}
		j.Panics = r.Float64() < 0.3
		j.Joins = r.Float64() < 0.5
		j.Retained = r.Float64() < 0.3
		if r.Float64() < 0.1 {
			j.Delay = time.Duration(1+r.IntN(5)) * time.Second
		}
		j.Unique = r.Float64() < 0.2
		jobs[i] = j
	}
	slices.SortStableFunc(jobs, func(a, b job) int {
		together := func(j job) int {
			if j.Batched && j.Joins {
				return 0
			}
			return 1
		}
		return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(together(a), together(b)))
	})
	return jobs
}

// A disruption is a fault that hits a process, at the same time in both stacks.
type disruption struct {
	at     time.Duration
	kind   string
	worker int           // which, for kill and term
	lasts  time.Duration // of a stop
}

const (
	kill  = "worker killed (SIGKILL)"
	term  = "worker ended (SIGTERM)"
	stop  = "redis-server stopped (SIGSTOP)"
	flush = "SCRIPT FLUSH"
)

// makeDisruptions returns the disruptions of a soak of a length, with that time between them on
// average. None is in the last every/5 before the end, so that tasks run after each.
func makeDisruptions(seed uint64, length, every time.Duration, workers int) []disruption {
	if every <= 0 {
		return nil
	}
	r := rand.New(rand.NewPCG(seed, 2))
	var disruptions []disruption
	for at := every; ; {
		d := disruption{at: at, worker: r.IntN(workers)}
		switch x := r.Float64(); {
		case x < 0.5:
			d.kind = kill
		case x < 0.65:
			d.kind = term
		case x < 0.85:
			d.kind, d.lasts = stop, 200*time.Millisecond+time.Duration(r.Int64N(int64(1200*time.Millisecond)))
		default:
			d.kind = flush
		}
		if at+d.lasts > length-every/5 {
			return disruptions
		}
		disruptions = append(disruptions, d)
		at += d.lasts + every/2 + time.Duration(r.Int64N(int64(every)))
	}
}

// A fate is the fault that hits one call on its way to Redis, or none.
type fate string

const (
	passes  fate = ""
	cut     fate = "connection cut before the call"
	dropped fate = "reply dropped, connection cut"
	delayed fate = "call delayed"
)

// fateOf returns the fate and the delay of the nth call of a kind. It is the same in both stacks.
func fateOf(seed uint64, kind string, n uint64, rate float64) (fate, time.Duration) {
	h := fnv.New64a()
	h.Write([]byte(kind))
	r := rand.New(rand.NewPCG(seed^h.Sum64(), n))
	switch x := r.Float64(); {
	case x < rate:
		return cut, 0
	case x < 2*rate:
		return dropped, 0
	case x < 3*rate:
		return delayed, time.Duration(1+r.IntN(50)) * time.Millisecond
	}
	return passes, 0
}

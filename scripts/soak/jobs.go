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

	// The ledger never denies: what it has counted at the end is every unit ever charged.
	ledgerWindow = "ledger"
)

func soakPolicy() throttle.Policy {
	return throttle.Policy{
		Name:    policyName,
		Match:   []string{taskType},
		Tenants: map[string]throttle.Tenant{"beta": {Weight: 2}, "chip": {Weight: 4}},
		Windows: []throttle.Window{
			{Name: "tenant", Limit: tenantLimit, Period: windowPeriod},
			{Name: "shared", Limit: sharedLimit, Period: windowPeriod, Scope: throttle.Shared},
			{Name: ledgerWindow, Algorithm: throttle.Fixed, Anchor: throttle.AnchorFirstUse, Limit: throttle.MaxLimit, Period: 24 * time.Hour},
		},
	}
}

// Tenants, and how much of the load is theirs, in percent.
var load = []struct {
	tenant  string
	percent int
}{{"acme", 35}, {"beta", 25}, {"chip", 20}, {"dune", 15}, {"echo", 5}}

// Tasks come in bursts, and some in between.
const (
	burstEvery = 5 * time.Second
	inBursts   = 0.8
	// loadFactor is the part of the shared window that first attempts ask for; retries come on top.
	loadFactor = 0.65
)

// A job is one task to enqueue, and how it will go.
type job struct {
	ID, Tenant string
	At         time.Duration // from the begin: when it is enqueued
	Delay      time.Duration // ProcessIn
	Fails      int           // how many of its runs fail, from the first on; more than MaxRetry: all
	MaxRetry   int
	Batched    bool // enqueued together with those of its burst, if it joins
	Joins      bool // its line at the enqueue, by worker.Client
	Panics     bool // its failures are panics
	Retained   bool
	Unique     bool
	Work       time.Duration // of its handler
}

// archives says that the job ends in the archive by its own failures.
func (j job) archives() bool { return j.Fails > j.MaxRetry }

// runs is how often the job runs if nothing else goes wrong.
func (j job) runs() int { return min(j.Fails, j.MaxRetry) + 1 }

// makeJobs returns the jobs of a soak that lasts so long, in the order of their times.
func makeJobs(seed uint64, length time.Duration) []job {
	r, ids := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 3))
	jobs := make([]job, int(loadFactor*sharedLimit*length.Seconds()/windowPeriod.Seconds()))
	for i := range jobs {
		j := job{ID: fmt.Sprintf("task-%05d", i), MaxRetry: 1 + r.IntN(5), Work: time.Duration(1+r.IntN(10)) * time.Millisecond}
		if ids.Float64() < 0.5 {
			j.ID = fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", i, ids.IntN(1<<16), ids.IntN(1<<12), ids.IntN(1<<12), ids.Int64N(1<<48))
		}
		j.At = time.Duration(r.Int64N(int64(length)))
		if r.Float64() < inBursts {
			j.At = j.At.Truncate(burstEvery)
			if j.Batched = r.Float64() < 0.5; !j.Batched {
				j.At += time.Duration(r.Int64N(int64(200 * time.Millisecond)))
			}
		}
		at := r.IntN(100)
		for _, l := range load {
			if j.Tenant = l.tenant; at < l.percent {
				break
			}
			at -= l.percent
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

// A blow is a fault that hits a process, at the same time in both stacks.
type blow struct {
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

// makeBlows returns the blows of a soak, about every so often. The last fifth of a period
// before the end is calm, so that each of them is followed by work.
func makeBlows(seed uint64, length, every time.Duration, workers int) []blow {
	if every <= 0 {
		return nil
	}
	r := rand.New(rand.NewPCG(seed, 2))
	var blows []blow
	for at := every; ; {
		b := blow{at: at, worker: r.IntN(workers)}
		switch x := r.Float64(); {
		case x < 0.5:
			b.kind = kill
		case x < 0.65:
			b.kind = term
		case x < 0.85:
			b.kind, b.lasts = stop, 200*time.Millisecond+time.Duration(r.Int64N(int64(1200*time.Millisecond)))
		default:
			b.kind = flush
		}
		if at+b.lasts > length-every/5 {
			return blows
		}
		blows = append(blows, b)
		at += b.lasts + every/2 + time.Duration(r.Int64N(int64(every)))
	}
}

// A fate is what happens to one call on its way to Redis.
type fate string

const (
	passes  fate = ""
	cut     fate = "connection cut before the call"
	dropped fate = "reply dropped, connection cut"
	delayed fate = "call delayed"
)

// fateOf says what happens to the nth call of a kind: the same in both stacks.
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

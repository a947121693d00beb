package linetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// historyLength is 0.4 s, or so many seconds.
func historyLength() time.Duration {
	if times, err := strconv.Atoi(os.Getenv("SLUICE_SCENE_ROUNDS")); err == nil {
		return time.Duration(times) * s
	}
	return 400 * ms
}

const slotsOfAll = 8

// A history is what callers of several processes do at once at one policy, in any order.
type history struct {
	*testing.T
	limiters []*throttle.Limiter
	ends     time.Time
	faults   bool

	mu             sync.Mutex
	grants         map[string][]limitertest.Grant // by tenant, what was kept
	kept, errors   int64                          // units, and calls that may have taken some all the same
	held, mostHeld int64                          // slots
	longest        time.Duration                  // for which somebody waited without a deadline
}

// Claims wait beside jobs, newcomers, and changes of the policy. No limit is exceeded, what is given
// back is free again, every call ends, none starves, and nothing is left.
func TestClaimsBesideJobsAndNewcomers(t *testing.T) {
	before := runtime.NumGoroutine()
	for name, faults := range map[string]bool{"undisturbed": false, "replies lost": true} {
		t.Run(name, func(t *testing.T) { claimsBesideJobs(t, faults) })
	}
	limitertest.Until(t, "all goroutines have ended", func() bool { return runtime.NumGoroutine() <= before+5 })
}

func claimsBesideJobs(t *testing.T, faults bool) {
	client := throttletest.Client(t, throttletest.Redis(t))
	slots := throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: slotsOfAll, Lease: m, Scope: throttle.ScopeShared}
	if faults {
		slots.Lease = 2 * s // by which a slot ends that nobody knows of
	}
	p := limitertest.Policy(
		throttle.Window{Name: "own", Limit: 20, Period: 100 * ms}, limitertest.SharedWindow(40, 100*ms),
		throttle.Window{Name: "ledger", Limit: 1_000_000, Period: h, Scope: throttle.ScopeShared},
		throttle.Window{Name: "region", Algorithm: throttle.AlgorithmGCRA, Limit: 400, Burst: 6, Period: s, Scope: throttle.Per("region")},
		throttle.Window{Name: "fixed", Algorithm: throttle.AlgorithmFixed, Limit: 10, Period: 130 * ms},
		throttle.Window{Name: "gcra", Algorithm: throttle.AlgorithmGCRA, Limit: 100, Burst: 6, Period: s},
		slots,
	)
	hs := &history{T: t, ends: time.Now().Add(historyLength()), faults: faults, grants: map[string][]limitertest.Grant{}}
	var proxies []*limitertest.Proxy
	for range 3 {
		addr := client.Options().Addr
		if faults {
			proxies = append(proxies, limitertest.NewProxy(t, addr))
			addr = proxies[len(proxies)-1].Addr
		}
		hs.limiters = append(hs.limiters, limitertest.New(t, throttletest.Client(t, addr), p))
	}
	var callers, servers sync.WaitGroup
	come := make(chan struct{})
	for i := range 24 {
		callers.Go(func() {
			for n := 0; time.Now().Before(hs.ends); n++ {
				if i < 16 {
					hs.wait()
				} else {
					hs.job(limitertest.Ticket(fmt.Sprint("job", 1000*i+n%5)))
					time.Sleep(rand.N(20 * ms))
				}
			}
		})
	}
	callers.Go(func() { hs.change(p, client, proxies) })
	for _, l := range hs.limiters[:2] {
		servers.Go(func() { hs.serve(l.Line("p"), come, &servers) })
	}
	callers.Wait()
	close(come)
	servers.Wait()
	asked := limitertest.New(t, client, p)
	// What a call whose reply was lost left in line is removed, or served, by the next ones.
	limitertest.Until(t, "nobody is in line", func() bool {
		for _, ticket := range limitertest.Take(t, asked, throttle.MaxTake, "q").Tickets {
			hs.use(ticket.Decision.Reservation)
		}
		return len(limitertest.ReadLine(t, client).Hashes["t"]) == 0
	})
	expect.Must(t, asked.Line("p").Acknowledge(t.Context()))

	var all []limitertest.Grant
	for tenant, log := range hs.grants {
		all = append(all, log...)
		for _, w := range p.Windows {
			if w.Scope == (throttle.Scope{}) {
				expect.Equal(t, max(0, limitertest.MostOver(w, log)), 0, w.Name, "over of", tenant)
			}
		}
	}
	expect.Equal(t, max(0, limitertest.MostOver(p.Windows[1], all)), 0, "over of all")
	expect.That(t, (hs.mostHeld <= slotsOfAll || faults) && hs.longest <= m,
		hs.mostHeld, "slots were held, somebody waited for", hs.longest)
	unsure := int64(0)
	if faults {
		unsure = 3*hs.errors + 6
	}
	limitertest.Until(t, "the ledger counts what was kept", func() bool {
		used := limitertest.Peek(t, asked, hs.request()).Windows[2].Used
		return used >= hs.kept-unsure && used <= hs.kept+unsure
	})
	for _, key := range client.Keys(t.Context(), "*").Val() {
		expect.That(t, client.PTTL(t.Context(), key).Val() != -1, key, "has no TTL")
	}
	limitertest.IsGone(t, client)
}

func (hs *history) limiter() *throttle.Limiter { return hs.limiters[rand.N(len(hs.limiters))] }

func (hs *history) request() throttle.Request {
	return throttle.Request{
		Policy: "p", Tenant: []string{"a", "b", "c"}[rand.N(3)], Attributes: map[string]string{"region": []string{"n", "s"}[rand.N(2)]},
		Cost: map[string]int64{throttle.Requests: []int64{1, 1, 1, 2, 3}[rand.N(5)]},
	}
}

func (hs *history) failed(err error) bool {
	switch {
	case err == nil:
		return false
	case hs.faults && errors.Is(err, throttle.ErrUnavailable), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		hs.mu.Lock()
		hs.errors++
		hs.mu.Unlock()
	default:
		hs.Error(err)
	}
	return true
}

// use does with a reservation what handlers do, and notes what stays of it.
func (hs *history) use(r throttle.Reservation) {
	ctx, units := context.Background(), r.Cost[throttle.Requests]
	slots := units
	hs.mu.Lock()
	hs.held += slots
	hs.mostHeld = max(hs.mostHeld, hs.held)
	hs.mu.Unlock()
	time.Sleep(rand.N(3 * ms))
	free := sync.OnceFunc(func() {
		hs.mu.Lock()
		hs.held -= slots
		hs.mu.Unlock()
	})
	switch rand.N(5) {
	case 0:
		free()
		if _, err := r.Cancel(ctx); !hs.failed(err) {
			return
		}
	case 1:
		if settled, err := r.Settle(ctx, map[string]int64{throttle.Requests: 0}); !hs.failed(err) {
			units, r = 0, settled
		}
	case 2:
		r.Hold(ctx)
		time.Sleep(rand.N(20 * ms))
	}
	free()
	hs.failed(r.Release(ctx))
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if units > 0 {
		hs.kept += units
		hs.grants[r.Tenant] = append(hs.grants[r.Tenant], limitertest.Grant{At: r.At.UnixMicro(), Units: units})
	}
}

// wait waits in place: with a timeout, until it is cancelled, for a while or for as long as it takes.
func (hs *history) wait() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, start, kind := hs.request(), time.Now(), rand.N(5)
	switch kind {
	case 0:
		var stop func()
		ctx, stop = context.WithTimeout(ctx, rand.N(200*ms))
		defer stop()
	case 1:
		time.AfterFunc(rand.N(200*ms), cancel)
	case 2:
		r.MaxWait = 1 + rand.N(200*ms)
	}
	d, err := hs.limiter().Wait(ctx, r)
	if kind > 2 {
		hs.mu.Lock()
		hs.longest = max(hs.longest, time.Since(start))
		hs.mu.Unlock()
	}
	if refused := errors.As(err, new(*throttle.DeniedError)) && kind <= 2; !refused && !hs.failed(err) {
		hs.use(d.Reservation)
	}
}

// job joins the line as a task does, or reserves at once.
func (hs *history) job(id throttle.Ticket) {
	ctx, r, l := context.Background(), hs.request(), hs.limiter()
	if kind := rand.N(8); kind < 2 {
		if kind == 0 {
			r.Ticket = id
		}
		if d, err := l.Reserve(ctx, r); !hs.failed(err) && d.Granted {
			hs.use(d.Reservation)
		}
		return
	}
	r.Ticket = id
	hs.failed(expect.ErrOf(l.Line("p").Join(ctx, []throttle.Request{r})))
	if rand.N(10) == 0 {
		time.Sleep(rand.N(20 * ms))
		hs.failed(l.Line("p").Leave(ctx, id))
	}
}

// serve takes jobs until nobody waits and all have come.
func (hs *history) serve(line *throttle.Line, come <-chan struct{}, group *sync.WaitGroup) {
	ctx := context.Background()
	for {
		taken, err := line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 1 + rand.N(8)})
		if hs.failed(err) {
			time.Sleep(10 * ms)
			continue
		}
		for _, ticket := range taken.Tickets {
			group.Go(func() { hs.taken(line, ticket) })
		}
		if taken.Next < 0 {
			select {
			case <-come:
				hs.failed(line.Acknowledge(ctx))
				return
			default:
			}
		}
		time.Sleep(min(max(taken.Next, ms), 20*ms))
	}
}

func (hs *history) taken(line *throttle.Line, ticket throttle.TakenTicket) {
	ctx, tickets := context.Background(), []throttle.TakenTicket{ticket}
	switch rand.N(8) {
	case 0:
		hs.failed(line.PutBack(ctx, tickets))
	case 1:
		hs.failed(line.Refund(ctx, tickets))
	case 2:
		d, err := line.ReserveAgain(ctx, ticket, ticket.Decision.Reservation.Request)
		if !hs.failed(err) && d.Granted {
			hs.use(d.Reservation)
		}
	default:
		hs.use(ticket.Decision.Reservation)
	}
}

// change changes limits and weights, pauses and resumes, and loses scripts and replies.
func (hs *history) change(p throttle.Policy, client *redis.Client, proxies []*limitertest.Proxy) {
	for time.Now().Before(hs.ends) {
		time.Sleep(rand.N(60 * ms))
		l, r := hs.limiter(), hs.request()
		switch rand.N(4) {
		case 0:
			other := p.WithDefaults()
			other.Windows[0].Limit, other.Windows[1].Limit = 10+rand.N[int64](11), 20+rand.N[int64](21)
			other.Tenants = map[string]throttle.Tenant{"a": {Weight: 1 + float64(rand.N(4))}}
			hs.failed(l.SetPolicies([]throttle.Policy{other}))
		case 1:
			hs.failed(expect.ErrOf(l.Attach(throttle.Reservation{Request: r}).Pause(context.Background(), rand.N(50*ms), "")))
			hs.failed(l.Resume(context.Background(), r))
		case 2:
			client.ScriptFlush(context.Background())
		case 3:
			for _, proxy := range proxies {
				proxy.Lose.Store(1)
			}
		}
	}
	for _, l := range hs.limiters {
		hs.failed(l.SetPolicies([]throttle.Policy{p}))
	}
}

// Claims that joined by other scopes than the policy has now are granted by those of now: one of
// two at once, and the other when its limit is raised.
func TestClaimsGoByThePolicyAsItIsNow(t *testing.T) {
	t.Parallel()
	window := func(limit int64, per ...string) throttle.Window {
		return throttle.Window{Name: "w", Limit: limit, Period: h, Scope: throttle.Per(per...)}
	}
	limitertest.EachCase(t, map[string]func(limit int64) []throttle.Window{
		"a window comes": func(limit int64) []throttle.Window {
			return []throttle.Window{window(limit, "tenant"), limitertest.SharedWindow(9, h)}
		},
		"a scope is another": func(limit int64) []throttle.Window { return []throttle.Window{window(limit, "region")} },
		"a scope is not known": func(limit int64) []throttle.Window {
			return []throttle.Window{window(limit, "tenant", "region"), limitertest.SharedWindow(9, h)}
		},
	}, func(t *testing.T, client *redis.Client, change func(limit int64) []throttle.Window) {
		l := limitertest.New(t, client, limitertest.Policy(limitertest.SharedWindow(2, h)))
		limitertest.Reserve(t, l, limitertest.Acme(2))
		r := limitertest.Acme(1)
		r.Attributes = map[string]string{"region": "north"}
		ended := make(chan error, 2)
		for range 2 {
			one := waits(t.Context(), t, client, l, r)
			go func() { ended <- <-one }()
		}
		limitertest.SetPolicy(t, l, change(1)...)
		expect.Must(t, <-ended)
		limitertest.Until(t, "the other one stands in line", func() bool {
			peeked := limitertest.Peek(t, l, r)
			return peeked.Windows[0].Used == 1 && len(limitertest.ReadLine(t, client).Hashes["t"]) == 1
		})
		limitertest.SetPolicy(t, l, change(2)...)
		expect.Must(t, <-ended)
		limitertest.WantUsed(t, l, r, 2)
		limitertest.IsGone(t, client)
	})
}

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
	if times, err := strconv.Atoi(os.Getenv("SLUICE_ROUNDS")); err == nil {
		return time.Duration(times) * s
	}
	return 400 * ms
}

// A history is what callers of several processes do at once at one policy, in any order.
type history struct {
	*testing.T
	limiters []*throttle.Limiter
	faults   bool

	mu             sync.Mutex
	grants         map[string][]limitertest.LoggedGrant // by tenant, what was kept
	kept, errors   int64                                // units, and calls that may have taken some all the same
	held, mostHeld int64                                // slots
}

// Claims wait beside jobs, newcomers, and changes of the policy. No limit is exceeded, what is given
// back is free again, every call ends, and nothing is left.
func TestClaimsBesideJobsAndNewcomers(t *testing.T) {
	before := runtime.NumGoroutine()
	for name, faults := range map[string]bool{"undisturbed": false, "replies lost": true} {
		t.Run(name, func(t *testing.T) {
			client := throttletest.Client(t, throttletest.Redis(t))
			tenantWindow, all, slots := throttle.Window{Name: "own", Limit: 20, Period: 100 * ms}, limitertest.SharedWindow(40, 100*ms), limitertest.Slots(8)
			if faults {
				slots.Lease = 2 * s // by which a slot ends that nobody knows of
			}
			ledger := throttle.Window{Name: "ledger", Limit: 1_000_000, Period: h, Shared: true}
			p := limitertest.Policy(tenantWindow, all, ledger, slots)
			hs := &history{T: t, faults: faults, grants: map[string][]limitertest.LoggedGrant{}}
			var proxies []*limitertest.LossyProxy
			for range 3 {
				proxies = append(proxies, limitertest.NewLossyProxy(t, client.Options().Addr))
				hs.limiters = append(hs.limiters, limitertest.New(t, throttletest.Client(t, proxies[len(proxies)-1].Addr), p))
			}
			var callers, servers sync.WaitGroup
			come := make(chan struct{})
			go func() { time.Sleep(historyLength()); close(come) }()
			until := func(do func(n int)) {
				callers.Go(func() {
					for n := 0; ; n++ {
						select {
						case <-come:
							return
						default:
							do(n)
						}
					}
				})
			}
			for i := range 24 {
				until(func(n int) {
					if i < 16 {
						hs.wait()
					} else {
						hs.job(limitertest.Ticket(fmt.Sprint("job", 1000*i+n%5)))
					}
				})
			}
			until(func(int) {
				time.Sleep(rand.N(60 * ms))
				other := p.WithDefaults()
				other.Windows[0].Limit, other.Windows[1].Limit = 10+rand.N[int64](11), 20+rand.N[int64](21)
				hs.failed(hs.limiter().SetPolicies([]throttle.Policy{other}))
				client.ScriptFlush(context.Background())
				for _, proxy := range proxies {
					if faults {
						proxy.Lose.Store(1)
					}
				}
			})
			for _, l := range hs.limiters[:2] {
				servers.Go(func() { hs.serve(l.Line("p"), come) })
			}
			callers.Wait()
			servers.Wait()
			asked := limitertest.New(t, client, p)
			// What a call whose reply was lost left in line is removed, or served, by the next takes.
			limitertest.Until(t, "nobody is in line", func() bool {
				for _, ticket := range limitertest.Take(t, asked, throttle.MaxTake, "q").Tickets {
					hs.use(ticket.Decision.Reservation)
				}
				return len(limitertest.ReadLine(t, client).Hashes["t"]) == 0
			})
			expect.Must(t, asked.Line("p").Acknowledge(t.Context()))

			var log []limitertest.LoggedGrant
			for tenant, grants := range hs.grants {
				log = append(log, grants...)
				expect.Equal(t, max(0, limitertest.MostOver(tenantWindow, grants)), 0, "over of", tenant)
			}
			expect.Equal(t, max(0, limitertest.MostOver(all, log)), 0, "over of all")
			expect.That(t, hs.mostHeld <= slots.Limit || faults, hs.mostHeld, "slots were held")
			unsure := int64(0)
			if faults {
				unsure = 3*hs.errors + 6
			}
			limitertest.Until(t, "the ledger counts what was kept", func() bool {
				used := limitertest.Peek(t, asked, hs.request()).Windows[2].Used
				return used >= hs.kept-unsure && used <= hs.kept+unsure
			})
			limitertest.IsGone(t, client)
		})
	}
	limitertest.Until(t, "all goroutines have ended", func() bool { return runtime.NumGoroutine() <= before+5 })
}

func (hs *history) limiter() *throttle.Limiter { return hs.limiters[rand.N(len(hs.limiters))] }

func (hs *history) request() throttle.Request {
	r := limitertest.Acme(1 + rand.N[int64](3))
	r.Tenant = []string{"a", "b", "c"}[rand.N(3)]
	return r
}

// failed reports that a call has failed, as faults or its time have it.
func (hs *history) failed(err error) bool {
	if err == nil {
		return false
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	hs.errors++
	expected := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
	expect.That(hs, expected || hs.faults && errors.Is(err, throttle.ErrUnavailable), err)
	return true
}

// use works for a while, and cancels the reservation or releases its slots.
func (hs *history) use(r throttle.Reservation) {
	units := r.Cost[throttle.Requests]
	hs.mu.Lock()
	hs.held += units
	hs.mostHeld = max(hs.mostHeld, hs.held)
	hs.mu.Unlock()
	time.Sleep(rand.N(3 * ms))
	hs.mu.Lock()
	hs.held -= units
	hs.mu.Unlock()
	if rand.N(3) == 0 {
		if _, err := r.Cancel(context.Background()); !hs.failed(err) {
			return
		}
	}
	hs.failed(r.Release(context.Background()))
	hs.mu.Lock()
	defer hs.mu.Unlock()
	hs.kept += units
	hs.grants[r.Tenant] = append(hs.grants[r.Tenant], limitertest.LoggedGrant{At: r.At.UnixMicro(), Units: units})
}

// wait waits in place: with a timeout, until it is cancelled, for a while or for as long as it takes.
func (hs *history) wait() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, kind := hs.request(), rand.N(4)
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
	if refused := errors.As(err, new(*throttle.DeniedError)) && kind < 3; !refused && !hs.failed(err) {
		hs.use(d.Reservation)
	}
}

// job reserves at once, or joins the line as a task does.
func (hs *history) job(id throttle.Ticket) {
	defer time.Sleep(rand.N(20 * ms))
	ctx, r, l := context.Background(), hs.request(), hs.limiter()
	if rand.N(4) == 0 {
		if d, err := l.Reserve(ctx, r); !hs.failed(err) && d.Granted {
			hs.use(d.Reservation)
		}
		return
	}
	r.Ticket = id
	hs.failed(expect.ErrOf(l.Line("p").Join(ctx, []throttle.Request{r})))
}

// serve takes jobs until nobody waits and all have come.
func (hs *history) serve(line *throttle.Line, come <-chan struct{}) {
	ctx := context.Background()
	var running sync.WaitGroup
	defer running.Wait()
	for {
		taken, err := line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 1 + rand.N(8)})
		hs.failed(err)
		for _, ticket := range taken.Tickets {
			running.Go(func() { hs.use(ticket.Decision.Reservation) })
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

// Claims that joined by other scopes than the policy has now are granted by those of now: one of two at once, one
// when its limit is raised.
func TestClaimsGoByThePolicyAsItIsNow(t *testing.T) {
	t.Parallel()
	window := func(limit int64, per ...string) throttle.Window {
		return throttle.Window{Name: "w", Limit: limit, Period: h, Per: per, Shared: per == nil}
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

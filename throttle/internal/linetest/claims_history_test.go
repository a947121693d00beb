package linetest

import (
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// roundsEnv makes histories of random order longer: so many seconds, in place of 0.4.
const roundsEnv = "SLUICE_SCENE_ROUNDS"

func historyLength() time.Duration {
	if times, err := strconv.Atoi(os.Getenv(roundsEnv)); err == nil {
		return time.Duration(times) * s
	}
	return 400 * ms
}

// Claims wait beside jobs, newcomers, and changes of all kinds. No limit is exceeded, what is given
// back is free again, every call ends, none starves, and nothing is left.
func TestClaimsBesideJobsAndNewcomers(t *testing.T) {
	before := runtime.NumGoroutine()
	for name, row := range map[string]struct{ faults, steps, withSlots bool }{
		"slots":               {withSlots: true},
		"slots, replies lost": {withSlots: true, faults: true},
		"replies lost":        {faults: true},
		"the clock is set":    {steps: true},
	} {
		t.Run(name, func(t *testing.T) {
			client := throttletest.Client(t, throttletest.Redis(t))
			amongAllOthers(t, client, row.faults, row.withSlots, row.steps)
		})
	}
	for end := time.Now().Add(m); runtime.NumGoroutine() > before+5; time.Sleep(20 * ms) {
		if time.Now().After(end) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines are left of %d:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
	}
}

const slotsOfAll = 8

func amongAllOthers(t *testing.T, client *redis.Client, faults, withSlots, steps bool) {
	p := limitertest.Policy(
		throttle.Window{Name: "own", Limit: 20, Period: 100 * ms},
		throttle.Window{Name: "shared", Limit: 40, Period: 100 * ms, Scope: throttle.ScopeShared},
		throttle.Window{Name: "ledger", Limit: 1_000_000, Period: h, Scope: throttle.ScopeShared},
		throttle.Window{Name: "region", Algorithm: throttle.AlgorithmGCRA, Limit: 400, Burst: 6, Period: s, Scope: throttle.Per("region")},
	)
	if withSlots {
		lease := m
		if faults {
			lease = 2 * s // by which a slot ends that nobody knows of
		}
		p.Windows = append(p.Windows, throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: slotsOfAll, Lease: lease, Scope: throttle.ScopeShared})
	}
	b := &bustle{T: t, p: p, ends: time.Now().Add(historyLength()), faults: faults, grants: map[string][]limitertest.Grant{}}
	if steps {
		b.clock = limitertest.NewClock()
		var clock sync.WaitGroup
		stop := make(chan struct{})
		clock.Go(func() { b.tick(stop) })
		defer clock.Wait()
		defer close(stop)
	}
	var proxies []*limitertest.Proxy
	for range 3 {
		addr := client.Options().Addr
		if faults {
			proxies = append(proxies, limitertest.NewProxy(t, addr))
			addr = proxies[len(proxies)-1].Addr
		}
		own := throttletest.Client(t, addr)
		b.limiters = append(b.limiters, b.limiter(own))
	}
	var group, servers sync.WaitGroup
	come := make(chan struct{})
	for i := range 24 {
		group.Go(func() {
			for n := 0; time.Now().Before(b.ends); n++ {
				if i < 16 {
					b.wait()
				} else {
					b.job(1000*i + n%5)
					time.Sleep(rand.N(20 * ms))
				}
			}
		})
	}
	group.Go(b.change)
	group.Go(b.upstream)
	group.Go(func() { b.cuts(proxies, client) })
	for _, l := range b.limiters[:2] {
		servers.Go(func() { b.serve(l, come, &servers) })
	}
	ended := make(chan struct{})
	go func() {
		group.Wait()
		close(come)
		servers.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(historyLength() + 2*m):
		stacks := make([]byte, 1<<20)
		t.Fatalf("some wait for ever\n%v\n%s", limitertest.ReadLine(t, client), stacks[:runtime.Stack(stacks, true)])
	}
	asked := b.limiter(client)
	// What a call whose reply was lost left in line is removed, or served, by the next ones.
	limitertest.Until(t, "nobody is in line", func() bool {
		b.drain(asked.Line("p"))
		return len(limitertest.ReadLine(t, client).Hashes["t"]) == 0
	})
	b.neverOver()
	b.allGivenBack(asked)
	if b.longest > m {
		t.Errorf("somebody waited for %v", b.longest)
	}
	for _, key := range client.Keys(t.Context(), "*").Val() {
		if ttl := client.PTTL(t.Context(), key).Val(); ttl == -1 && !steps {
			t.Errorf("%q has no TTL", key)
		}
	}
	limitertest.IsGone(t, client)
}

// neverOver counts again all that was granted and not given back.
func (b *bustle) neverOver() {
	var all []limitertest.Grant
	for tenant, log := range b.grants {
		all = append(all, log...)
		if over := limitertest.MostOver(b.p.Windows[0], log); over > 0 {
			b.Errorf("%d over of %s", over, tenant)
		}
	}
	if over := limitertest.MostOver(b.p.Windows[1], all); over > 0 {
		b.Errorf("%d over of all", over)
	}
	if b.mostHeld > slotsOfAll && len(b.p.Windows) > 4 && !b.faults {
		b.Errorf("%d slots were held", b.mostHeld)
	}
}

// allGivenBack fails unless the ledger counts what was kept. A call that failed may have taken
// something.
func (b *bustle) allGivenBack(asked *throttle.Limiter) {
	unsure, used := int64(0), int64(0)
	if b.faults {
		unsure = 3*b.errors + 6
	}
	for end := time.Now().Add(m); ; time.Sleep(20 * ms) {
		used = limitertest.Peek(b, asked, b.request()).Windows[2].Used
		if used == b.kept || time.Now().After(end) {
			break
		}
	}
	if used < b.kept-unsure || used > b.kept+unsure {
		b.Errorf("%d units are counted, %d were kept, %d calls failed", used, b.kept, b.errors)
	}
	b.Logf("%d waits, %d refused, %d calls failed, the longest %v, %d units kept, %d counted", b.waits, b.refused, b.errors, b.longest, b.kept, used)
}

// Claims that joined by other scopes than the policy has now are granted by those of now: one of
// two at once, and the other when its limit is raised.
func TestClaimsGoByThePolicyAsItIsNow(t *testing.T) {
	t.Parallel()
	window := func(limit int64, per ...string) throttle.Window {
		return throttle.Window{Name: "w", Limit: limit, Period: h, Scope: throttle.Per(per...)}
	}
	limitertest.EachOf(t, map[string]func(limit int64) []throttle.Window{
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
		if err := <-ended; err != nil {
			t.Error(err)
		}
		limitertest.Until(t, "the other one stands in line", func() bool {
			peeked := limitertest.Peek(t, l, r)
			return peeked.Windows[0].Used == 1 && len(limitertest.ReadLine(t, client).Hashes["t"]) == 1
		})
		limitertest.SetPolicy(t, l, change(2)...)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		limitertest.WantUsed(t, l, r, 2)
		limitertest.IsGone(t, client)
	})
}

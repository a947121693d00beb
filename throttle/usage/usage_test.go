package usage_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/throttle/usage"
)

// counted returns a limiter whose grants are counted, and written when the function is called.
func counted(t *testing.T, client *redis.Client, also func(throttle.Correction)) (write func(), _ *throttle.Limiter) {
	t.Helper()
	c, silent := usage.New(), slog.New(slog.DiscardHandler)
	observe := func(event any) { c.Observe(event); expect.On(also)(event) }
	l := limitertest.NewFrom(t, throttle.Config{Client: client, Logger: silent, Observer: observe, Prefix: "test:", Policies: []throttle.Policy{{
		Name: "api",
		Windows: []throttle.Window{
			{Name: "shared", Limit: 1000, Period: time.Hour, Shared: true},
			{Name: "tokens", Unit: "tokens", Limit: 1000, Period: time.Hour, Shared: true},
		},
	}}})
	return func() { c.Start(l)() }, l
}

func top(t *testing.T, l *throttle.Limiter, n int) string {
	t.Helper()
	uses := expect.Got(usage.Top(t.Context(), l, "api", n))(t)
	return fmt.Sprint(uses)
}

// What tenants were granted by all processes is told by tenant, however it was granted, less what they gave back.
func TestTopTellsWhoUsedWhatAllShare(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		writeOne, first := counted(t, client, func(throttle.Correction) {})
		writeOther, second := counted(t, client, func(throttle.Correction) {})
		reserve := func(l *throttle.Limiter, tenant string, tokens int64) throttle.Reservation {
			t.Helper()
			d, err := l.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: tenant, Cost: map[string]int64{"tokens": tokens}})
			expect.Require(t, err == nil && d.Granted, d, err)
			return d.Reservation
		}
		reserve(first, "acme", 10)
		reserve(second, "acme", 20)
		settled, cancelled := reserve(first, "zeta", 100), reserve(second, "zeta", 500)
		expect.Must(t, expect.ErrOf(settled.Settle(t.Context(), map[string]int64{"tokens": 40})))
		expect.Must(t, expect.ErrOf(cancelled.Cancel(t.Context())))
		r := throttle.Request{Policy: "api", Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: "1"}}
		expect.Must(t, expect.ErrOf(first.Line("api").Join(t.Context(), []throttle.Request{r})))
		taken, err := second.Line("api").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 1})
		expect.Require(t, err == nil && len(taken.Tickets) == 1, taken, err)
		expect.Equal(t, top(t, first, 10), "[]", "nothing is written yet, but")
		writeOne()
		writeOther()
		expect.Equal(t, top(t, first, 10), "[{acme 3 0.75} {zeta 1 0.25}]")
		expect.Equal(t, top(t, first, 1), "[{acme 3 0.75}]")
		late := usage.New() // of a grant that has left the hour
		late.Observe(throttle.Correction{Reservation: throttle.Reservation{Request: throttle.Request{Policy: "api", Tenant: "beta"}}, Requests: -8})
		late.Start(first)()
		expect.Equal(t, top(t, first, 10), "[{acme 3 0.75} {zeta 1 0.25}]", "after what was given back late")
		keys := client.Keys(t.Context(), "test:sluice:{api}:y:*").Val()
		for _, key := range keys {
			ttl := client.TTL(t.Context(), key).Val()
			expect.That(t, ttl >= time.Hour && ttl <= 2*time.Hour, key, "is kept for", ttl)
		}
		expect.That(t, len(keys) > 0, "no keys")
	})
}

func ExampleCounter() {
	server, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	policies := []throttle.Policy{{
		Name:    "github-api",
		Windows: []throttle.Window{{Name: "per-hour", Limit: 100, Period: time.Hour, Shared: true}},
	}}

	counter := usage.New()
	limiter, err := throttle.New(throttle.Config{
		Client: client, Observer: counter.Observe, Policies: policies,
	})
	if err != nil {
		log.Fatal(err)
	}
	stop := counter.Start(limiter)

	for _, tenant := range []string{"acme", "acme", "zeta", "acme"} {
		if _, err := limiter.Reserve(context.Background(), throttle.Request{Policy: "github-api", Tenant: tenant}); err != nil {
			log.Fatal(err)
		}
	}
	stop() // in a program that goes on, sums are written every 10 s
	top, err := usage.Top(context.Background(), limiter, "github-api", 10)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(top)
	// Output:
	// [{acme 3 0.75} {zeta 1 0.25}]
}

// What could not be written is written later.
func TestACounterOutlastsRedis(t *testing.T) {
	t.Parallel()
	server := throttletest.Miniredis(t)
	client := throttletest.Client(t, server.Addr())
	write, l := counted(t, client, func(throttle.Correction) {})
	expect.Must(t, expect.ErrOf(l.Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})))
	server.SetError("LOADING")
	write()
	server.SetError("")
	expect.Equal(t, top(t, l, 10), "[]", "was written")
	policies := append(l.Policies(), throttle.Policy{Name: "broken", Windows: []throttle.Window{{Name: "w", Limit: 1, Period: time.Hour}}})
	expect.Must(t, l.SetPolicies(policies))
	expect.Must(t, server.Set("test:sluice:{broken}:t", "")) // no line can be read here
	expect.That(t, expect.ErrOf(l.Line("broken").Len(t.Context())) != nil, "the line can be read")
	write()
	expect.Equal(t, top(t, l, 10), "[{acme 1 1}]")
}

// Redis knows what a reservation cost last, whatever the caller does.
func TestCorrectionsOfStaleReservationsAreCounted(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		var changes []int64
		write, l := counted(t, client, func(c throttle.Correction) { changes = append(changes, c.Requests) })
		requests := func(n int64) map[string]int64 { return map[string]int64{"requests": n} }
		r := throttle.Request{Policy: "api", Tenant: "acme", Cost: requests(100)}
		var stale []throttle.Reservation
		for range 2 {
			d := expect.Got(l.Reserve(t.Context(), r))(t)
			stale = append(stale, d.Reservation)
			for _, actual := range []int64{40, 70, 70, 100} {
				expect.Must(t, expect.ErrOf(d.Reservation.Settle(t.Context(), requests(actual))))
			}
			settled := expect.Got(d.Reservation.Settle(t.Context(), requests(10)))(t)
			expect.Must(t, expect.ErrOf(settled.Settle(t.Context(), requests(30))))
		}
		expect.Must(t, expect.ErrOf(stale[0].Cancel(t.Context())))
		deltas := []int64{-60, 30, 30, -90, 20}
		want := append(slices.Concat(deltas, deltas), -30)
		expect.That(t, slices.Equal(changes, want), "the changes are", changes, "want", want)
		write()
		expect.Equal(t, top(t, l, 1), "[{acme 30 1}]")
	})
}

// What was taken from a line and given back was used by nobody.
func TestWhatIsGivenBackIsNotUsed(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		write, l := counted(t, client, func(throttle.Correction) {})
		line, queues := l.Line("api"), limitertest.Queues("q")
		r := throttle.Request{Policy: "api", Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: "a"}}
		for _, giveBack := range []func(context.Context, []throttle.TakenTicket) error{line.PutBack, line.Refund} {
			expect.Must(t, expect.ErrOf(line.Join(t.Context(), []throttle.Request{r})))
			taken := expect.Got(line.Take(t.Context(), throttle.TakeOptions{Queues: queues, Max: 1}))(t)
			expect.Must(t, giveBack(t.Context(), taken.Tickets))
		}
		write()
		expect.Equal(t, top(t, l, 1), "[]")
	})
}

// Grants, refusals and tickets in line are kept by the minute, for a day.
func TestWhatPoliciesDidIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := throttletest.InMemory(t).Client(t)
		decided, want := 0, int64(0)
		counter := usage.New()
		count := expect.On(func(d throttle.Decision) {
			decided++
			if d.Granted {
				want++
			}
		})
		limiter := limitertest.NewFrom(t, throttle.Config{
			Client: client, Observer: func(event any) { counter.Observe(event); count(event) },
			Policies: []throttle.Policy{{Name: "p", Windows: []throttle.Window{{Name: "w", Limit: 3, Period: time.Hour}}}, {Name: "idle",
				Windows: []throttle.Window{{Name: "w", Limit: 3, Period: time.Hour}}}},
		})
		stop := counter.Start(limiter)
		for i := range 5 {
			r := throttle.Request{Policy: "p", Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}}
			d := expect.Got(limiter.Reserve(t.Context(), r))(t)
			if i == 0 {
				expect.Must(t, expect.ErrOf(d.Reservation.Pause(t.Context(), time.Second, "")))
				time.Sleep(2 * time.Second)
			}
		}
		time.Sleep(3 * time.Minute)
		stop()
		points := expect.Got(usage.History(t.Context(), limiter, []string{"p", "idle"}, time.Now().Add(-time.Hour)))(t)
		var granted, refused int64
		for _, p := range points["p"] {
			granted, refused = granted+p.Granted, refused+p.Refused
		}
		last := points["p"][len(points["p"])-1]
		expect.That(t, granted == want && want != 0 && refused == 1 && last.Waiting == 5-want && decided == 5,
			"granted", granted, want, "refused", refused, last, decided, "decisions")
		for _, p := range points["idle"] {
			expect.That(t, !p.Known, "of an idle policy there is", p)
		}
		time.Sleep(27 * time.Hour)
		keys, _ := client.Keys(t.Context(), "*:h:*").Result()
		expect.That(t, len(keys) == 0, "kept", keys)
	})
}

// Package limitertest tests limiters, and has helpers for the tests of limiters, lines and models:
// limiters that go by a clock in the test's hand, and the keys of a line in Redis. Read
// TestReserveTakesFromAllWindowsOrNone of package throttle first, then TestCostsPerUnit.
package limitertest

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	_ "pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/testhook"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Midnight is when handed clocks begin (us): a whole day in UTC, so that buckets by the clock are easy to see.
const Midnight = 20_834 * 24 * int64(time.Hour/time.Microsecond)

// At is a time by a handed clock.
func At(d time.Duration) time.Time { return time.UnixMicro(Midnight + d.Microseconds()) }

// A Clock is the time that a test hands to the scripts.
type Clock struct{ US atomic.Int64 }

// NewClock returns a clock that stands at Midnight.
func NewClock() *Clock {
	c := &Clock{}
	c.Set(0)
	return c
}

// Set sets the clock to a time after Midnight.
func (c *Clock) Set(d time.Duration) { c.US.Store(Midnight + d.Microseconds()) }

// NoRedis returns a client of an address at which no Redis is. It tries once, and is closed when the test ends.
func NoRedis(t testing.TB) *redis.Client {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: -1})
	t.Cleanup(func() { client.Close() })
	return client
}

// TB is what testing.T and rapid.T have in common.
type TB interface {
	expect.TB
	Context() context.Context
	Log(args ...any)
}

// A Hooked is a limiter with its hooks.
type Hooked struct {
	*throttle.Limiter
	hooks *testhook.Client
	gate  *scriptGate
}

// WantDenied fails the test unless a decision is a denial for that time.
func WantDenied(t TB, d throttle.Decision, retryIn time.Duration, about ...any) {
	t.Helper()
	expect.That(t, !d.Granted && d.RetryIn == retryIn,
		append(about, "granted", d.Granted, "denied for", d.RetryIn, "want", retryIn)...)
}

// WantGranted fails the test unless a decision is a grant, after which the first windows have used so many units.
func WantGranted(t TB, d throttle.Decision, used ...int64) {
	t.Helper()
	if !d.Granted || !slices.Equal(Used(d)[:len(used)], used) {
		t.Errorf("granted %v, used %v, want %v", d.Granted, Used(d), used)
	}
}

// WantUsed fails the test unless the first windows of a request have used so many units.
func WantUsed(t TB, l *throttle.Limiter, r throttle.Request, want ...int64) {
	t.Helper()
	expect.Equal(t, Used(Peek(t, l, r))[:len(want)], want, "used")
}

// RedisClient returns a client of a real Redis of the test's own, while other tests run. miniredis is for what
// users' kits promise, and takes ten times as long for a script: throttletest.Each is for a test or two of each verb.
func RedisClient(t *testing.T) *redis.Client {
	t.Helper()
	t.Parallel()
	return throttletest.Client(t, throttletest.Redis(t))
}

// EachCase runs the test for each of the cases, by their names, on one real Redis. Each has a database of
// its own, as what a limiter does in the background may outlast its case.
func EachCase[Case any](t *testing.T, cases map[string]Case, test func(t *testing.T, client *redis.Client, c Case)) {
	t.Helper()
	o := redis.Options{Addr: throttletest.Redis(t, "--databases", strconv.Itoa(len(cases))), DB: -1}
	for name, c := range cases {
		o.DB++
		t.Run(name, func(t *testing.T) {
			client := redis.NewClient(&o)
			t.Cleanup(func() { client.Close() })
			test(t, client, c)
		})
	}
}

// New returns a limiter that goes by the clock of Redis.
func New(t TB, client redis.UniversalClient, policies ...throttle.Policy) *throttle.Limiter {
	t.Helper()
	return NewFrom(t, throttle.Config{Client: client, Policies: policies})
}

// NewFrom is New by a whole configuration.
func NewFrom(t TB, c throttle.Config) *throttle.Limiter {
	t.Helper()
	c.Name = cmp.Or(c.Name, "w")
	return expect.Got(throttle.New(c))(t)
}

// NewWithClock returns a limiter that goes by a clock in the test's hand. Its keys never expire:
// they would by the real clock, while the handed one stands still.
func NewWithClock(t TB, client redis.UniversalClient, policies ...throttle.Policy) (*throttle.Limiter, *Clock) {
	t.Helper()
	c := NewClock()
	return NewByClock(t, client, c, policies...), c
}

// NewByClock is NewWithClock with a clock that others may share.
func NewByClock(t TB, client redis.UniversalClient, c *Clock, policies ...throttle.Policy) *throttle.Limiter {
	t.Helper()
	return NewEdited(t, client, c, []func(string) string{WithoutExpiry}, policies...).Limiter
}

// NewEdited returns a limiter whose scripts are edited, by a clock in the test's hand or, without one, by Redis's.
func NewEdited(t TB, client redis.UniversalClient, c *Clock, edits []func(string) string, policies ...throttle.Policy) *Hooked {
	t.Helper()
	edit, check := edited(edits)
	g := &scriptGate{UniversalClient: client}
	hooks := &testhook.Client{UniversalClient: g, Edit: edit}
	if c != nil {
		hooks.Now = c.US.Load
	}
	l := New(t, hooks, policies...)
	expect.Must(t, check())
	return &Hooked{l, hooks, g}
}

// Refresh applies the settings of tenants to the tickets in line. Takes do that in the background.
func (h *Hooked) Refresh(ctx context.Context, policy string) error {
	return h.hooks.Refresh(ctx, policy)
}

// Policy is the one policy of most tests.
func Policy(windows ...throttle.Window) throttle.Policy {
	return throttle.Policy{Name: "p", Windows: windows}
}

// Elsewhere returns a reservation that a limiter with the policy granted on another Redis.
func Elsewhere(t *testing.T, p throttle.Policy, r throttle.Request) throttle.Reservation {
	t.Helper()
	return Reserve(t, New(t, throttletest.InMemory(t).Client(t), p), r).Reservation
}

// Acme is one request of the usual tenant.
func Acme(cost int64) throttle.Request {
	return throttle.Request{Policy: "p", Tenant: "acme", Cost: map[string]int64{throttle.Requests: cost}}
}

// Reserve reserves.
func Reserve(t TB, l *throttle.Limiter, r throttle.Request) throttle.Decision {
	t.Helper()
	return expect.Got(l.Reserve(t.Context(), r))(t)
}

// Join puts tickets in the line of policy "p", and returns the decision about the last one.
func Join(t TB, l *throttle.Limiter, requests ...throttle.Request) (last throttle.LineDecision) {
	t.Helper()
	decisions, err := l.Line("p").Join(t.Context(), requests)
	expect.Must(t, err)
	for i, decision := range decisions {
		if last = decision; decision.Err != nil {
			t.Fatalf("%+v: %v", requests[i], decision.Err)
		}
	}
	return last
}

// Peek peeks.
func Peek(t TB, l *throttle.Limiter, r throttle.Request) throttle.Decision {
	t.Helper()
	return expect.Got(l.Peek(t.Context(), r))(t)
}

// Cancel cancels a reservation by a limiter: see TryCancel.
func Cancel(t TB, l *throttle.Limiter, r throttle.Reservation) throttle.Decision {
	t.Helper()
	return expect.Got(TryCancel(t.Context(), l, r))(t)
}

// TryCancel returns the refund in the form of a decision, to compare all calls: granted if this one cancelled it.
func TryCancel(ctx context.Context, l *throttle.Limiter, r throttle.Reservation) (throttle.Decision, error) {
	refund, err := l.Attach(r).Cancel(ctx)
	return throttle.Decision{
		At: refund.At, ClockBehind: refund.ClockBehind, Granted: refund.Cancelled, Policy: r.Policy, Tenant: r.Tenant, Windows: refund.Windows,
	}, err
}

// Dump returns what is under every key, whatever its type.
func Dump(t TB, client *redis.Client) map[string]string {
	t.Helper()
	keys, err := client.Keys(t.Context(), "*").Result()
	expect.Must(t, err)
	st := read(t, client, "", keys)
	all := st.Values
	for key, hash := range st.Hashes {
		all[key] = fmt.Sprint(hash)
	}
	for key, set := range st.Sets {
		all[key] = fmt.Sprint(set)
	}
	return all
}

// SharedWindow is a window that all tenants share.
func SharedWindow(limit int64, period time.Duration) throttle.Window {
	return throttle.Window{Name: "shared", Limit: limit, Period: period, Shared: true}
}

// Slots is a Concurrency window with leases of 30 s. Without attributes it is shared.
func Slots(limit int64, per ...string) throttle.Window {
	return throttle.Window{
		Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: limit, Lease: 30 * time.Second, Per: per, Shared: per == nil,
	}
}

// Release releases what was granted.
func Release(t TB, d throttle.Decision) {
	t.Helper()
	expect.Must(t, d.Reservation.Release(t.Context()))
}

// Queues returns queues of equal priorities, for throttle.TakeOptions.
func Queues(names ...string) map[string]int {
	queues := map[string]int{}
	for _, name := range names {
		queues[name] = 1
	}
	return queues
}

// Take takes tickets from the line of policy "p", of queues of equal priorities.
func Take(t TB, l *throttle.Limiter, max int, queues ...string) throttle.Taken {
	t.Helper()
	return expect.Got(l.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: Queues(queues...), Max: max}))(t)
}

// Quota is a Calendar window.
func Quota(limit int64, resets, zone string) throttle.Window {
	return throttle.Window{Name: "quota", Algorithm: throttle.AlgorithmCalendar, Limit: limit, Resets: resets, Timezone: zone}
}

// Day is a time after Midnight, by its date.
func Day(t TB, text string) time.Duration {
	t.Helper()
	at, err := time.Parse(time.RFC3339, text)
	expect.Must(t, err)
	return at.Sub(time.UnixMicro(Midnight))
}

// SetPolicy changes the policy between two calls, as SetPolicies does in a running worker.
func SetPolicy(t TB, l *throttle.Limiter, windows ...throttle.Window) {
	t.Helper()
	expect.Must(t, l.SetPolicies([]throttle.Policy{Policy(windows...)}))
}

// CostOf is what a request takes of a window.
func CostOf(w throttle.Window, r throttle.Request) int64 {
	cost, ok := r.Cost[w.Unit]
	if !ok && w.Unit == throttle.Requests {
		return 1
	}
	return cost
}

// Used is how much each window has used.
func Used(d throttle.Decision) []int64 {
	var units []int64
	for _, w := range d.Windows {
		units = append(units, w.Used)
	}
	return units
}

// Ticket is a ticket of queue "q".
func Ticket(ticket string) throttle.Ticket { return throttle.Ticket{Queue: "q", ID: ticket} }

// Settle corrects the tokens of a reservation by a limiter.
func Settle(t TB, l *throttle.Limiter, r throttle.Reservation, tokens int64) throttle.Reservation {
	t.Helper()
	return expect.Got(l.Attach(r).Settle(t.Context(), map[string]int64{"tokens": tokens}))(t)
}

// Bubble runs the test on fake time, with a limiter on a miniredis. It fails if the test leaves a goroutine behind.
func Bubble(t *testing.T, p throttle.Policy, test func(t *testing.T, l *throttle.Limiter, server throttletest.Memory)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		test(t, New(t, m.Client(t), p), m)
	})
}

// Until waits until a condition is true, and fails the test after three minutes.
func Until(t testing.TB, what string, met func() bool) {
	t.Helper()
	for end := time.Now().Add(3 * time.Minute); !met(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within three minutes: %s", what)
		}
	}
}

// Random histories are slow with the race detector. So a run has 15 of each, the same ones every
// time. To look for new ones: -rapid.checks=1000 -rapid.seed=0.
func init() {
	flag.Set("rapid.checks", "15")
	flag.Set("rapid.seed", "1")
}

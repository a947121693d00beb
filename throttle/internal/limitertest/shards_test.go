package limitertest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// sharded is a policy of two windows per tenant, in that many shards.
func sharded(shards int) throttle.Policy {
	return throttle.Policy{Name: "p", Shards: shards, Windows: []throttle.Window{
		{Name: "each", Limit: 3, Period: h}, {Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 2},
	}}
}

// shardIn returns what precedes the number of shards in the name of a tenant's line.
func shardIn(l *throttle.Limiter, tenant string) string {
	shard, _, _ := strings.Cut(l.LineOf("p", tenant), "of")
	return shard
}

func setShards(t *testing.T, l *throttle.Limiter, shards int) {
	t.Helper()
	expect.Must(t, l.SetPolicies([]throttle.Policy{sharded(shards)}))
}

// tenantIn returns a tenant of a line.
func tenantIn(l *throttle.Limiter, line string) string {
	for i := 0; ; i++ {
		if tenant := fmt.Sprint("tenant", i); l.LineOf("p", tenant) == line {
			return tenant
		}
	}
}

// While a policy gets other shards it goes on matching.
func TestAPolicyThatGetsOtherShardsIsInForce(t *testing.T) {
	p, changed := sharded(1), atomic.Bool{}
	p.Match = []string{"*"}
	l := New(t, RedisClient(t), p)
	go func() {
		defer changed.Store(true)
		for i := range 1000 {
			p.Shards = 1 + 3*(i%2)
			expect.Must(t, l.SetPolicies([]throttle.Policy{p}))
		}
	}()
	for !changed.Load() {
		_, matches := l.Match("p", false)
		expect.Require(t, matches, "no policy is in force")
	}
}

// Every tenant has a shard, with its windows and its line: calls of all kinds find it.
func TestTenantsAreSpreadOverShards(t *testing.T) {
	client := RedisClient(t)
	ctx, l := t.Context(), New(t, client, sharded(4))
	lines := l.Lines()
	want := []string{"p/1of4", "p/2of4", "p/3of4", "p/4of4"}
	expect.Require(t, slices.Equal(lines, want), "lines", lines, "want", want)
	for _, line := range lines {
		tenant := tenantIn(l, line)
		r := throttle.Request{Policy: "p", Tenant: tenant}
		expect.Require(t, Reserve(t, l, r).Granted, line)
		expect.Equal(t, len(client.Keys(ctx, "sluice:{"+line+"}:w:tenant:"+tenant).Val()), 1, line)
		d := Reserve(t, l, r)
		r.Ticket, r.Key = Ticket("denied"), "key"
		denied := Reserve(t, l, r)
		expect.That(t, !denied.Granted && denied.Queued, line, "a third got a slot, or is not in line", denied)
		joins := []throttle.Request{{Tenant: tenant, Ticket: Ticket("joined")}}
		decisions, err := l.Line(line).Join(ctx, joins)
		expect.Require(t, err == nil && decisions[0].Err == nil, decisions, err)
		other := l.Line(lines[(slices.Index(lines, line)+1)%4])
		var wrong *throttle.RequestError
		decisions, err = other.Join(ctx, joins)
		expect.That(t, err == nil && errors.As(decisions[0].Err, &wrong) && strings.Contains(wrong.Error(), line), "another line let it in", decisions, err)
		got, err := other.Reserve(ctx, []throttle.Request{{Tenant: tenant, Ticket: Ticket("astray")}})
		expect.That(t, err == nil && got[0].Err != nil, line, "another line decided", got, err)
		Release(t, d)
		refusal, err := d.Reservation.Pause(ctx, m, "")
		expect.That(t, err == nil && refusal.Pause == m, line, "a pause of", refusal, err)
		d = Peek(t, l, throttle.Request{Policy: "p", Tenant: tenant})
		expect.That(t, d.Pause != nil && d.Windows[0].Used == 2, line, "has no pause", d)
		expect.Equal(t, len(takeFrom(t, l, line)), 0, line)
		expect.Must(t, l.Resume(ctx, throttle.Request{Policy: "p", Tenant: tenant}))
		taken := takeFrom(t, l, line)
		expect.That(t, len(taken) == 1 && taken[0].Ticket == Ticket("denied") &&
			l.Line(line).Matches(taken[0], r), line, "took", taken)
	}
	_, err := l.Line("p").Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 1})
	expect.That(t, errors.Is(err, throttle.ErrUnknownPolicy) && strings.Contains(err.Error(), "4 shards"), err)
	info, ok := l.Lookup("p/2of4")
	expect.That(t, ok && info.Name == "p", "the policy of a line is", info, ok)
}

func takeFrom(t *testing.T, l *throttle.Limiter, line string) []throttle.TakenTicket {
	t.Helper()
	taken := expect.Got(l.Line(line).Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 10}))(t)
	return taken.Tickets
}

// After a change of shards all tenants count from 0. What was granted before is released where it
// counts, and lines of before are taken from until they are empty. Their tickets are charged anew.
func TestShardsChangeLikeANewName(t *testing.T) {
	client := RedisClient(t)
	for _, c := range []struct{ from, to int }{{1, 4}, {4, 1}, {4, 3}} {
		ctx, l := t.Context(), New(t, client, sharded(c.from))
		then := New(t, client, sharded(c.to))
		tenant := fmt.Sprintf("from %d to %d", c.from, c.to)
		for i := 0; c.from > 1 && c.to > 1 && shardIn(l, tenant) != shardIn(then, tenant); i++ {
			tenant = fmt.Sprintf("%d from %d to %d", i, c.from, c.to) // one that is third before and after, say
		}
		r := throttle.Request{Policy: "p", Tenant: tenant}
		granted, line := []throttle.Decision{Reserve(t, l, r), Reserve(t, l, r)}, l.LineOf("p", tenant)
		waits := r
		waits.Ticket = Ticket(tenant)
		d := Reserve(t, l, waits)
		expect.Require(t, d.Queued, tenant, d)
		setShards(t, l, c.to)
		WantGranted(t, Peek(t, l, r), 0)
		expect.That(t, slices.Contains(l.Lines(), line) && l.LineOf("p", tenant) != line, tenant, l.Lines())
		late := r
		late.Ticket = Ticket("late")
		expect.Err(t, expect.ErrOf(l.Line(line).Join(ctx, []throttle.Request{late})), throttle.ErrUnknownPolicy, tenant)
		expect.Equal(t, len(takeFrom(t, l, line)), 0, tenant)
		Release(t, granted[0])
		expect.Must(t, expect.ErrOf(l.Attach(granted[1].Reservation).Cancel(ctx)))
		WantUsed(t, l, r, 0)
		taken := takeFrom(t, l, line)
		expect.Require(t, len(taken) == 1 && !l.Line(line).Matches(taken[0], waits), tenant, "took", taken)
		again, err := l.Line(line).ReserveAgain(ctx, taken[0], waits)
		expect.That(t, err == nil && again.Granted && again.Windows[0].Used == 1, tenant, "reserved again", again, err)
		takeFrom(t, l, line)
		Release(t, again)
		defer Until(t, tenant+": its former line has been left", func() bool { return !slices.Contains(l.Lines(), line) })
	}
}

// A call that waits in place goes on waiting in its new shard.
func TestACallWaitsOnWhileShardsChange(t *testing.T) {
	client := RedisClient(t)
	l := New(t, client, sharded(1))
	r := throttle.Request{Policy: "p", Tenant: "acme"}
	held := []throttle.Decision{Reserve(t, l, r), Reserve(t, l, r)}
	got := make(chan throttle.Decision)
	go func() {
		d, err := l.Wait(t.Context(), r)
		expect.That(t, err == nil, err)
		got <- d
	}()
	for waiting(t, client) == 0 {
		time.Sleep(time.Millisecond)
	}
	setShards(t, l, 4)
	Release(t, held[0])
	Release(t, held[1])
	d := <-got
	expect.That(t, d.Granted && d.Windows[0].Used == 1, d)
}

// waiting counts the tickets in all lines.
func waiting(t *testing.T, client *redis.Client) (n int64) {
	t.Helper()
	keys := expect.Got(client.Keys(t.Context(), "sluice:*:t").Result())(t)
	for _, key := range keys {
		n += client.HLen(t.Context(), key).Val()
	}
	return n
}

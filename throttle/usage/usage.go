// Package usage keeps the grants of limiters: to each tenant in the last hour, and of each policy
// by the minute for a day. It answers "who used the quota?" for windows that all share. It is
// opt-in: each process that grants has a Counter.
//
//	counter := usage.New()
//	limiter, err := throttle.New(throttle.Config{Client: client, Observer: counter.Observer(throttle.Observer{})})
//	defer counter.Start(limiter)()
//	...
//	top, err := usage.Top(ctx, limiter, "github-api", 10)
//
// Grants are summed in memory, and written every few seconds, beside the calls of the limiter.
package usage

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// Span is the shortest time that Top covers. The longest is a bucket more.
const Span = time.Hour

const (
	every     = 10 * time.Second // between two writes
	maxSummed = 10_000
	timeout   = 5 * time.Second
)

// A count is of the requests of a policy that were granted to a tenant, or of its events of a kind.
type count struct{ policy, tenant, event string }

// Events, which a set counts by the minute.
const granted, refused, waiting = "granted", "refused", "waiting"

const (
	bucket     = 5 * time.Minute
	maxMembers = 1000 // of a set: the most frequent stay
)

// tenantsOf returns the key of the sorted set that counts by tenant, for a bucket of time.
func tenantsOf(l *throttle.Limiter, policy string, at time.Time) string {
	return fmt.Sprintf("%ssluice:{%s}:y:%d", l.Config().Prefix, policy, at.Truncate(bucket).Unix())
}

// minutesOf returns the key of the sorted set that counts events by the minute, for an hour.
func minutesOf(l *throttle.Limiter, policy string, at time.Time) string {
	return fmt.Sprintf("%ssluice:{%s}:h:%d", l.Config().Prefix, policy, at.Truncate(time.Hour).Unix())
}

// A Counter counts what the limiter grants that it observes. It is safe for concurrent use.
type Counter struct {
	mu   sync.Mutex
	sums map[count]int64
}

// New returns a counter that writes nothing before Start.
func New() *Counter { return &Counter{sums: map[count]int64{}} }

// Observer returns an observer that counts, and calls another one too, such as that of
// promthrottle.
func (c *Counter) Observer(next throttle.Observer) throttle.Observer {
	o := next
	o.Decided = then(next.Decided, func(d throttle.Decision) {
		if d.Granted && d.FailedOpen == nil {
			c.granted(d)
		}
	})
	o.Taken = then(next.Taken, func(tickets []throttle.TakenTicket) {
		for _, t := range tickets {
			if t.Decision.Granted {
				c.granted(t.Decision)
			}
		}
	})
	o.Corrected = then(next.Corrected, func(correction throttle.Correction) {
		r := correction.Reservation.Request
		c.add(count{policy: r.Policy, tenant: r.Tenant}, correction.Change[throttle.Requests])
	})
	o.Refused = then(next.Refused, func(r throttle.Refusal) { c.add(count{policy: r.Policy, event: refused}, 1) })
	return o
}

// then calls another function, if there is one, after the own.
func then[T any](next, own func(T)) func(T) {
	if next == nil {
		return own
	}
	return func(t T) { own(t); next(t) }
}

func (c *Counter) granted(d throttle.Decision) {
	r := d.Reservation.Request
	c.add(count{policy: r.Policy, event: granted}, 1)
	c.add(count{policy: r.Policy, tenant: r.Tenant}, r.CostOf(throttle.Requests))
}

func (c *Counter) add(of count, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.sums[of]; n != 0 && (known || of.event != "" || len(c.sums) < maxSummed) { // tenants are data
		c.sums[of] += n
	}
}

// Start writes the observed grants and the number of waiting tickets every 10 seconds: a pipeline
// for each policy where something happened. It uses the limiter's Redis and Logger. Stop ends that,
// and writes the rest. It waits for Redis for 5 seconds at most.
func (c *Counter) Start(l *throttle.Limiter) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		defer c.write(l)
		for tick := time.Tick(every); ctx.Err() == nil; {
			select {
			case <-ctx.Done():
			case <-tick:
				c.write(l)
			}
		}
	})
	return func() { cancel(); ended.Wait() }
}

// write writes all sums, if the limiter's Redis answers. What fails after that is lost.
func (c *Counter) write(l *throttle.Limiter) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	inLine := map[string]int64{}
	for _, line := range l.Lines() {
		n, err := l.Line(line).Len(ctx)
		if err != nil {
			return // what was counted is written later
		}
		inLine[throttle.PolicyOf(line)] += n
	}
	c.mu.Lock()
	sums := c.sums
	c.sums = make(map[count]int64, len(sums))
	c.mu.Unlock()
	byPolicy, at := map[string][]count{}, time.Now()
	for of, n := range sums {
		if n != 0 {
			byPolicy[of.policy] = append(byPolicy[of.policy], of)
		}
	}
	minute := at.UTC().Format("4 ")
	for policy, n := range inLine {
		if n == 0 && len(byPolicy[policy]) == 0 {
			continue
		}
		pipe := l.Config().Client.Pipeline()
		tenants, minutes := tenantsOf(l, policy, at), minutesOf(l, policy, at)
		for _, of := range byPolicy[policy] {
			if of.event == "" {
				pipe.ZIncrBy(ctx, tenants, float64(sums[of]), of.tenant)
			} else {
				pipe.ZIncrBy(ctx, minutes, float64(sums[of]), minute+of.event)
			}
		}
		pipe.ZAdd(ctx, minutes, redis.Z{Score: float64(n), Member: minute + waiting})
		pipe.ZRemRangeByRank(ctx, tenants, 0, -1-maxMembers)
		pipe.Expire(ctx, tenants, Span+2*bucket)
		pipe.Expire(ctx, minutes, HistorySpan+2*time.Hour)
		if _, err := pipe.Exec(ctx); err != nil {
			l.Config().Logger.Warn("usage: what a policy granted could not be written", "policy", policy, "err", err)
		}
	}
}

// A Use is the grants to one tenant.
type Use struct {
	Tenant string  `json:"tenant"`
	Units  int64   `json:"units"`
	Part   float64 `json:"part"` // of what all were granted: 0 to 1
}

// Top returns at most n tenants that were granted most requests of a policy in the last hour, those
// with most first. It is empty where no Counter writes. The error wraps that of go-redis.
func Top(ctx context.Context, l *throttle.Limiter, policy string, n int) ([]Use, error) {
	now := time.Now()
	pipe := l.Config().Client.Pipeline() // ZUNION would need a Redis that has it
	var parts []*redis.ZSliceCmd
	for ago := time.Duration(0); ago <= Span; ago += bucket {
		parts = append(parts, pipe.ZRangeWithScores(ctx, tenantsOf(l, policy, now.Add(-ago)), 0, -1))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, fmt.Errorf("usage: policy %q: %w", policy, err)
	}
	units, all := map[string]int64{}, int64(0)
	for _, part := range parts {
		for _, z := range part.Val() {
			units[z.Member.(string)] += int64(z.Score)
			all += int64(z.Score)
		}
	}
	tenants := slices.SortedFunc(maps.Keys(units), func(a, b string) int {
		return cmp.Or(-cmp.Compare(units[a], units[b]), cmp.Compare(a, b))
	})
	uses := []Use{}
	for _, tenant := range tenants[:min(len(tenants), max(0, n))] {
		uses = append(uses, Use{tenant, units[tenant], float64(units[tenant]) / float64(max(1, all))})
	}
	return uses, nil
}

// HistorySpan is how far back History goes, and Step the time that a Point stands for.
const HistorySpan, Step = 24 * time.Hour, time.Minute

// A Point is what happened in a minute.
type Point struct {
	At                        time.Time // when it began
	Granted, Refused, Waiting int64     // requests, refusals by the upstream, and tickets in line at its end
	Known                     bool      // something was written
}

// History returns the minutes of some policies from a time on. The last one is under way. The error
// wraps that of go-redis.
func History(ctx context.Context, l *throttle.Limiter, policies []string, since time.Time) (map[string][]Point, error) {
	now := time.Now()
	since = since.Truncate(Step)
	type hour struct {
		from   time.Time
		points []Point
		set    *redis.ZSliceCmd
	}
	var hours []hour
	all, pipe := map[string][]Point{}, l.Config().Client.Pipeline()
	for _, policy := range policies {
		for at := since; !at.After(now); at = at.Add(Step) {
			all[policy] = append(all[policy], Point{At: at})
		}
		for at := since.Truncate(time.Hour); !at.After(now); at = at.Add(time.Hour) {
			hours = append(hours, hour{at, all[policy], pipe.ZRangeWithScores(ctx, minutesOf(l, policy, at), 0, -1)})
		}
	}
	if _, err := pipe.Exec(ctx); err != nil && len(hours) > 0 {
		return nil, fmt.Errorf("usage: history: %w", err)
	}
	for _, h := range hours {
		for _, z := range h.set.Val() {
			minute, what, _ := strings.Cut(z.Member.(string), " ")
			n, _ := strconv.Atoi(minute)
			i := int(h.from.Add(time.Duration(n)*Step).Sub(since) / Step)
			if i < 0 || i >= len(h.points) {
				continue
			}
			p := &h.points[i]
			switch p.Known = true; what {
			case granted:
				p.Granted = int64(z.Score)
			case refused:
				p.Refused = int64(z.Score)
			case waiting:
				p.Waiting = int64(z.Score)
			}
		}
	}
	return all, nil
}

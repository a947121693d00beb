// Package usage keeps the grants of limiters: to each tenant in the last hour, and of each policy
// by the minute for a day. It answers "who used the quota?" for windows that all share. It is
// opt-in: each process that grants has a Counter.
//
//	counter := usage.New()
//	limiter, err := throttle.New(throttle.Config{Client: client, Observer: counter.Observer(throttle.Observer{})})
//	defer counter.Start(limiter)()
//	...
//	top, err := usage.Top(ctx, limiter, usage.TopOptions{Policy: "github-api"})
//
// Grants are summed in memory, and written every few seconds, beside the calls of the limiter.
package usage

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// Span is the shortest time that Top covers. The longest is a bucket more.
const Span = time.Hour

const (
	every      = 10 * time.Second // between two writes
	bucket     = 5 * time.Minute
	kept       = Span + 2*bucket
	maxTenants = 1000 // of a policy, unit and bucket: those with most units stay
	maxSummed  = 10_000
	timeout    = 5 * time.Second
)

// A Counter counts what the limiter grants that it observes. It is safe for concurrent use.
type Counter struct {
	mu     sync.Mutex
	sums   map[count]int64
	points map[string]Point // by policy
}

// A count is the key of the grants to one tenant.
type count struct{ policy, unit, tenant string }

// New returns a counter that writes nothing before Start.
func New() *Counter { return &Counter{sums: map[count]int64{}, points: map[string]Point{}} }

// Observer returns an observer that counts, and calls another one too, such as that of
// promthrottle.
func (c *Counter) Observer(next throttle.Observer) throttle.Observer {
	o := next
	o.Decided = then(next.Decided, func(d throttle.Decision) {
		if d.Granted && d.FailedOpen == nil {
			c.granted(d)
		}
	})
	o.Taken = func(policy string, tickets []throttle.TakenTicket) {
		for _, t := range tickets {
			if t.Decision.Granted {
				c.granted(t.Decision)
			}
		}
		if next.Taken != nil {
			next.Taken(policy, tickets)
		}
	}
	o.Corrected = then(next.Corrected, func(correction throttle.Correction) {
		for unit, units := range correction.Change {
			c.add(correction.Reservation.Request, unit, units)
		}
	})
	o.Refused = then(next.Refused, func(r throttle.Refusal) { c.point(r.Policy, Point{Refused: 1}) })
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
	c.point(r.Policy, Point{Granted: 1})
	if _, named := r.Cost[throttle.Requests]; !named {
		c.add(r, throttle.Requests, 1)
	}
	for unit, cost := range r.Cost {
		c.add(r, unit, cost)
	}
}

func (c *Counter) add(r throttle.Request, unit string, units int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := count{r.Policy, unit, r.Tenant}
	if _, known := c.sums[of]; units != 0 && (known || len(c.sums) < maxSummed) { // tenants are data
		c.sums[of] += units
	}
}

func (c *Counter) point(policy string, p Point) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sum := c.points[policy]
	sum.Granted += p.Granted
	sum.Refused += p.Refused
	c.points[policy] = sum
}

// Start writes the observed grants and the number of waiting tickets every 10 seconds: a pipeline
// for each policy where something happened. It uses the limiter's Redis and Logger. Stop ends that,
// and writes the rest. It waits for Redis for 5 seconds at most.
func (c *Counter) Start(l *throttle.Limiter) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		for tick := time.NewTicker(every); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				c.write(l)
				return
			case <-tick.C:
				c.write(l)
			}
		}
	})
	return func() { cancel(); ended.Wait() }
}

// write writes all sums. Those that could not be written are added to the next ones.
func (c *Counter) write(l *throttle.Limiter) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	waiting := map[string]int64{}
	for _, line := range l.Lines() {
		n, err := l.Line(line).Len(ctx)
		if err != nil {
			return // what was counted is written later
		}
		waiting[throttle.PolicyOf(line)] += n
	}
	c.mu.Lock()
	sums, points := c.sums, c.points
	c.sums, c.points = make(map[count]int64, len(sums)), map[string]Point{}
	c.mu.Unlock()
	byPolicy, at := map[string][]count{}, time.Now()
	for of, units := range sums {
		if units != 0 {
			byPolicy[of.policy] = append(byPolicy[of.policy], of)
		}
	}
	for policy, waits := range waiting {
		p := points[policy]
		if p.Waiting = waits; p == (Point{}) && len(byPolicy[policy]) == 0 {
			continue
		}
		pipe, keys := l.Config().Client.Pipeline(), map[string]bool{}
		for _, of := range byPolicy[policy] {
			key := keyOf(l, policy, of.unit, at)
			pipe.ZIncrBy(ctx, key, float64(sums[of]), of.tenant)
			keys[key] = true
		}
		for key := range keys {
			pipe.ZRemRangeByRank(ctx, key, 0, -1-maxTenants)
			pipe.Expire(ctx, key, kept)
		}
		key, minute := hourOf(l, policy, at)
		pipe.HIncrBy(ctx, key, minute+"g", p.Granted)
		pipe.HIncrBy(ctx, key, minute+"r", p.Refused)
		pipe.HSet(ctx, key, minute+"w", p.Waiting)
		pipe.Expire(ctx, key, historyKept)
		cmds, err := pipe.Exec(ctx)
		if err != nil {
			l.Config().Logger.Warn("usage: what a policy granted could not be written", "policy", policy, "err", err)
		}
		if err != nil && cmds[0].Err() != nil { // else Redis refused a later one, and some are written
			c.point(policy, p)
			for _, of := range byPolicy[policy] {
				c.add(throttle.Request{Policy: policy, Tenant: of.tenant}, of.unit, sums[of])
			}
		}
	}
}

// keyOf returns the key of a bucket, beside the windows of its policy.
func keyOf(l *throttle.Limiter, policy, unit string, at time.Time) string {
	return fmt.Sprintf("%ssluice:{%s}:y:%s:%d", l.Config().Prefix, policy, unit, at.Unix()/int64(bucket/time.Second))
}

// A Use is the grants to one tenant.
type Use struct {
	Tenant string  `json:"tenant"`
	Units  int64   `json:"units"`
	Part   float64 `json:"part"` // of what all were granted: 0 to 1
}

// TopOptions are the options of Top.
type TopOptions struct {
	Max    int    // tenants; the default is 10
	Policy string // its name; required
	Unit   string // the default is throttle.Requests
}

// Top returns the tenants that were granted most of a policy in the last hour, those with most
// units first. It is empty where no Counter writes. The error wraps that of go-redis.
func Top(ctx context.Context, l *throttle.Limiter, o TopOptions) ([]Use, error) {
	o.Max, o.Unit = cmp.Or(o.Max, 10), cmp.Or(o.Unit, throttle.Requests)
	now := time.Now()
	pipe := l.Config().Client.Pipeline() // ZUNION would need a Redis that has it
	var parts []*redis.ZSliceCmd
	for ago := time.Duration(0); ago <= Span; ago += bucket {
		parts = append(parts, pipe.ZRangeWithScores(ctx, keyOf(l, o.Policy, o.Unit, now.Add(-ago)), 0, -1))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, fmt.Errorf("usage: policy %q: %w", o.Policy, err)
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
	for _, tenant := range tenants[:min(len(tenants), max(0, o.Max))] {
		uses = append(uses, Use{tenant, units[tenant], float64(units[tenant]) / float64(max(1, all))})
	}
	return uses, nil
}

// Package usage keeps the grants of limiters: to each tenant in the last hour, and of each policy
// by the minute for a day. It answers "who used the quota?" for windows that all share. It is
// opt-in: each process that grants has a Counter.
//
//	counter := usage.New()
//	limiter, err := throttle.New(throttle.Config{Client: client, Observer: counter.Observe})
//	defer counter.Start(limiter)()
//	...
//	top, err := usage.Top(ctx, limiter, "github-api", 10)
//
// Grants are summed in memory, and written every few seconds, apart from the limiter's own calls.
package usage

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

const (
	topSpan      = time.Hour      // what Top covers, at least: at most it covers a set's span of 5 minutes more
	historySpan  = 24 * time.Hour // how long minutes are kept, at least
	writeEvery   = 10 * time.Second
	writeTimeout = 5 * time.Second
	maxMembers   = 1000   // of a set: tenants with the fewest requests are dropped
	maxSummed    = 10_000 // sums in memory
)

// A set is a kind of sorted set in Redis: one for each policy and span of time.
type set struct {
	letter string // in keys
	span   time.Duration
}

var byTenant = set{"y", 5 * time.Minute} // a member is a tenant
var byMinute = set{"h", time.Hour}       // a member is a minute and an event

const granted, refused, waiting = "granted", "refused", "waiting" // events

func (s set) key(l *throttle.Limiter, policy string, at time.Time) string {
	return fmt.Sprintf("%ssluice:{%s}:%s:%d", l.Config().Prefix, policy, s.letter, at.Truncate(s.span).Unix())
}

// A sumKey names a sum: a tenant's requests, or how often an event happened.
type sumKey struct {
	in             set
	policy, member string
}

// A Counter counts the grants of the limiters that it observes. It is safe for concurrent use.
type Counter struct {
	mu   sync.Mutex
	sums map[sumKey]int64
}

// New returns a counter that writes nothing before Start.
func New() *Counter { return &Counter{sums: map[sumKey]int64{}} }

// Observe counts an event of a limiter: it is the Observer of the limiter's Config, or a part of it.
func (c *Counter) Observe(event any) {
	switch e := event.(type) {
	case throttle.Correction:
		r := e.Reservation.Request
		c.add(sumKey{byTenant, r.Policy, r.Tenant}, e.Requests)
	case throttle.Decision:
		c.addGrant(e)
	case throttle.Refusal:
		c.add(sumKey{byMinute, e.Policy, refused}, 1)
	case throttle.TakenTicket:
		c.addGrant(e.Decision)
	}
}

func (c *Counter) addGrant(d throttle.Decision) {
	if r := d.Reservation.Request; d.Granted && d.FailedOpen == nil {
		c.add(sumKey{byMinute, r.Policy, granted}, 1)
		c.add(sumKey{byTenant, r.Policy, r.Tenant}, r.CostOf(throttle.Requests))
	}
}

func (c *Counter) add(key sumKey, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, known := c.sums[key]
	if fits := known || key.in == byMinute || len(c.sums) < maxSummed; fits && n != 0 { // tenants have no bound
		c.sums[key] += n
	}
}

// Start writes the observed grants and the number of waiting tickets every 10 seconds: by one short command for each
// line, and a pipeline. It uses the limiter's Redis and Logger. `stop` ends that, and writes the rest. If Redis hangs it
// waits 5 seconds, or up to the client's ReadTimeout longer, for a write under way, and as long again for the last one.
func (c *Counter) Start(l *throttle.Limiter) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		defer c.write(l)
		for tick := time.Tick(writeEvery); ctx.Err() == nil; {
			select {
			case <-ctx.Done():
			case <-tick:
				c.write(l)
			}
		}
	})
	return func() { cancel(); ended.Wait() }
}

// write writes all sums. If Redis does not answer they stay for the next time; if the write fails they are lost.
func (c *Counter) write(l *throttle.Limiter) {
	ctx, cancel := context.WithTimeout(context.Background(), writeTimeout)
	defer cancel()
	inLine := map[string]int64{} // waiting tickets, by policy: of each where tickets wait or something has a sum
	for _, line := range l.Lines() {
		switch n, err := l.Line(line).Len(ctx); {
		case n > 0:
			inLine[script.PolicyOf(line)] += n
		case err != nil && !redis.HasErrorPrefix(err, "WRONGTYPE"): // a wrong type must not stop all other sums
			return
		}
	}
	c.mu.Lock()
	sums := c.sums
	c.sums = make(map[sumKey]int64, len(sums))
	c.mu.Unlock()
	at, pipe := time.Now(), l.Config().Client.Pipeline()
	minute := at.UTC().Format("4 ")
	for key, n := range sums {
		if key.in == byMinute {
			key.member = minute + key.member
		}
		if n != 0 {
			pipe.ZIncrBy(ctx, key.in.key(l, key.policy, at), float64(n), key.member)
			inLine[key.policy] += 0 // adds the policy, so that its sets are trimmed and expire
		}
	}
	for policy, n := range inLine {
		tenants, minutes := byTenant.key(l, policy, at), byMinute.key(l, policy, at)
		pipe.ZAdd(ctx, minutes, redis.Z{Score: float64(n), Member: minute + waiting})
		pipe.ZRemRangeByRank(ctx, tenants, 0, -1-maxMembers)
		pipe.Expire(ctx, tenants, topSpan+2*byTenant.span)
		pipe.Expire(ctx, minutes, historySpan+2*byMinute.span)
	}
	if _, err := pipe.Exec(ctx); err != nil {
		l.Config().Logger.Warn("usage: what policies granted could not be written", "err", err)
	}
}

// A Use is the grants to one tenant.
type Use struct {
	Tenant string  `json:"tenant"`
	Units  int64   `json:"units"` // of throttle.Requests
	Part   float64 `json:"part"`  // of the units granted to all tenants: 0 to 1
}

// Top returns the at most n tenants to which a policy granted most requests in the last hour, in
// descending order. It is empty where no Counter writes. The error wraps go-redis's.
func Top(ctx context.Context, l *throttle.Limiter, policy string, n int) ([]Use, error) {
	now := time.Now()
	pipe := l.Config().Client.Pipeline() // no role of lock-down-redis.md may call ZUNION
	for ago := time.Duration(0); ago <= topSpan; ago += byTenant.span {
		pipe.ZRangeWithScores(ctx, byTenant.key(l, policy, now.Add(-ago)), 0, -1)
	}
	parts, err := pipe.Exec(ctx)
	if err != nil {
		return nil, fmt.Errorf("usage: policy %q: %w", policy, err)
	}
	units := map[string]int64{}
	for _, part := range parts {
		for _, z := range part.(*redis.ZSliceCmd).Val() {
			units[z.Member.(string)] += int64(z.Score)
		}
	}
	uses, all := []Use{}, int64(0)
	for tenant, sum := range units {
		if sum > 0 { // a refund stays in its set after the set of its grant has left the hour
			uses = append(uses, Use{Tenant: tenant, Units: sum})
			all += sum
		}
	}
	slices.SortFunc(uses, func(a, b Use) int {
		return cmp.Or(-cmp.Compare(a.Units, b.Units), cmp.Compare(a.Tenant, b.Tenant))
	})
	uses = uses[:min(len(uses), max(0, n))]
	for i := range uses {
		uses[i].Part = float64(uses[i].Units) / float64(all)
	}
	return uses, nil
}

// Step is the time that a Point stands for.
const Step = time.Minute

// A Point counts the events of one minute.
type Point struct {
	At                        time.Time // when it began
	Granted, Refused, Waiting int64     // grants, refusals by the upstream, and tickets in line at its end
	Known                     bool      // whether a Counter wrote for it: not if nothing happened and nobody waited
}

// History returns the minutes of each policy from a time on; the last is under way. Minutes before the last 24 hours
// may not be Known. The error wraps go-redis's.
func History(ctx context.Context, l *throttle.Limiter, policies []string, since time.Time) (map[string][]Point, error) {
	now := time.Now()
	since = since.Truncate(Step).UTC()
	points, hours := map[string][]Point{}, map[string][]*redis.ZSliceCmd{}
	pipe := l.Config().Client.Pipeline()
	for _, policy := range policies {
		for at := since; !at.After(now); at = at.Add(Step) {
			points[policy] = append(points[policy], Point{At: at})
		}
		for at := since.Truncate(time.Hour); !at.After(now); at = at.Add(time.Hour) {
			hours[policy] = append(hours[policy], pipe.ZRangeWithScores(ctx, byMinute.key(l, policy, at), 0, -1))
		}
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, fmt.Errorf("usage: history: %w", err)
	}
	for policy, series := range points {
		for hour, counts := range hours[policy] {
			for _, z := range counts.Val() {
				minuteText, event, _ := strings.Cut(z.Member.(string), " ")
				minute, _ := strconv.Atoi(minuteText)
				if i := 60*hour + minute - since.Minute(); i >= 0 && i < len(series) {
					series[i].set(event, int64(z.Score))
				}
			}
		}
	}
	return points, nil
}

func (p *Point) set(event string, n int64) {
	p.Known = true
	switch event {
	case granted:
		p.Granted = n
	case refused:
		p.Refused = n
	case waiting:
		p.Waiting = n
	}
}

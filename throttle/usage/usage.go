// Package usage counts what each tenant was granted in the last hour. So "who used the quota?" has
// an answer for windows that all share. It is opt-in: each process that grants has a Counter.
//
//	counter, err := usage.New(usage.Config{Client: client})
//	defer counter.Close()
//	limiter, err := throttle.New(throttle.Config{Client: client, Observer: counter.Observer(throttle.Observer{})})
//	...
//	top, err := usage.Top(ctx, client, usage.TopOptions{Policy: "github-api"})
//
// Grants are summed in memory, and written every few seconds, beside the calls of the limiter.
package usage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/isnil"
	"github.com/sluice-go/sluice/throttle"
)

// Span is the shortest time that Top covers. The longest is a bucket more.
const Span = time.Hour

const (
	bucket     = 5 * time.Minute
	kept       = Span + 2*bucket
	maxTenants = 1000 // of a policy, unit and bucket: those with most units stay
	maxSummed  = 10_000
	timeout    = 5 * time.Second
)

// Config configures New.
type Config struct {
	// Client is the limiter's Redis. It is required. The caller closes it, after the Counter.
	Client redis.UniversalClient

	// Every is how often sums are written, by a command for each tenant that was granted something: at
	// least 1 second. The default is 10 seconds.
	Every time.Duration

	// Logger gets errors of writing sums. They are written later. The default is slog.Default().
	Logger *slog.Logger

	// Prefix is that of the limiter: throttle.Config.Prefix.
	Prefix string
}

// A Counter counts what the limiters grant that it observes. It is safe for concurrent use.
type Counter struct {
	config Config
	stop   context.CancelFunc
	ended  sync.WaitGroup

	mu   sync.Mutex
	sums map[count]int64
}

// A count is what one tenant was granted.
type count struct{ policy, unit, tenant string }

// New returns a counter that writes until Close. The error names the field that is invalid.
func New(c Config) (*Counter, error) {
	if isnil.Value(c.Client) {
		return nil, errors.New("usage: Config.Client is nil: must be the limiter's connection to Redis")
	}
	c.Every = cmp.Or(c.Every, 10*time.Second)
	if c.Every < time.Second {
		return nil, fmt.Errorf("usage: Config.Every %v: must be at least 1s", c.Every)
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	ctx, stop := context.WithCancel(context.Background())
	counter := &Counter{config: c, stop: stop, sums: map[count]int64{}}
	counter.ended.Go(func() { counter.run(ctx) })
	return counter, nil
}

// Observer returns an observer that counts, and calls another one too, such as that of
// promthrottle.
func (c *Counter) Observer(next throttle.Observer) throttle.Observer {
	o := next
	o.Decided = then(next.Decided, func(d throttle.Decision) {
		if d.Granted && d.FailedOpen == nil {
			c.add(d.Reservation.Request)
		}
	})
	o.Taken = func(policy string, tickets []throttle.TakenTicket) {
		for _, t := range tickets {
			if t.Decision.Granted {
				c.add(t.Decision.Reservation.Request)
			}
		}
		if next.Taken != nil {
			next.Taken(policy, tickets)
		}
	}
	o.Corrected = then(next.Corrected, func(correction throttle.Correction) {
		for unit, units := range correction.Change {
			c.addUnits(correction.Reservation.Request, unit, units)
		}
	})
	return o
}

// then calls another function, if there is one, after the own.
func then[T any](next, own func(T)) func(T) {
	if next == nil {
		return own
	}
	return func(t T) { own(t); next(t) }
}

func (c *Counter) add(r throttle.Request) {
	if _, named := r.Cost[throttle.Requests]; !named {
		c.addUnits(r, throttle.Requests, 1)
	}
	for unit, cost := range r.Cost {
		c.addUnits(r, unit, cost)
	}
}

func (c *Counter) addUnits(r throttle.Request, unit string, units int64) {
	if units == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	of := count{r.Policy, unit, r.Tenant}
	if _, known := c.sums[of]; known || len(c.sums) < maxSummed { // tenants are data
		c.sums[of] += units
	}
}

func (c *Counter) run(ctx context.Context) {
	tick := time.NewTicker(c.config.Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.flush()
		}
	}
}

// Close writes what is left, and ends. It waits for Redis for 5 seconds at most.
func (c *Counter) Close() {
	c.stop()
	c.ended.Wait()
	c.flush()
}

// flush writes all sums. Those that could not be written are added to the next ones.
func (c *Counter) flush() {
	c.mu.Lock()
	sums := c.sums
	c.sums = make(map[count]int64, len(sums))
	c.mu.Unlock()
	byKey := map[string][]count{}
	at := time.Now()
	for of, units := range sums {
		if units != 0 {
			key := keyOf(c.config.Prefix, of.policy, of.unit, at)
			byKey[key] = append(byKey[key], of)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for key, counts := range byKey {
		pipe := c.config.Client.Pipeline()
		for _, of := range counts {
			pipe.ZIncrBy(ctx, key, float64(sums[of]), of.tenant)
		}
		pipe.ZRemRangeByRank(ctx, key, 0, -1-maxTenants)
		pipe.Expire(ctx, key, kept)
		if _, err := pipe.Exec(ctx); err != nil {
			c.config.Logger.Warn("usage: what tenants were granted is written later",
				"policy", counts[0].policy, "err", err)
			c.mu.Lock()
			for _, of := range counts {
				c.sums[of] += sums[of]
			}
			c.mu.Unlock()
		}
	}
}

// keyOf returns the key of a bucket, beside the windows of its policy.
func keyOf(prefix, policy, unit string, at time.Time) string {
	return fmt.Sprintf("%ssluice:{%s}:y:%s:%d", prefix, policy, unit, at.Unix()/int64(bucket/time.Second))
}

// A Use is what one tenant was granted.
type Use struct {
	Tenant string  `json:"tenant"`
	Units  int64   `json:"units"`
	Part   float64 `json:"part"` // of what all were granted: 0 to 1
}

// TopOptions are the options of Top.
type TopOptions struct {
	Max    int    // tenants; the default is 10
	Policy string // its name; required
	Prefix string // throttle.Config.Prefix of the limiter
	Unit   string // the default is throttle.Requests
}

// Top returns the tenants that were granted most of a policy in the last hour, those with most
// units first. It is empty where no Counter writes. Errors are those of go-redis, or that the
// client is nil.
func Top(ctx context.Context, client redis.UniversalClient, o TopOptions) ([]Use, error) {
	if isnil.Value(client) {
		return nil, errors.New("usage: the client is nil: must be a connection to the limiter's Redis")
	}
	o.Max, o.Unit = cmp.Or(o.Max, 10), cmp.Or(o.Unit, throttle.Requests)
	keys := make([]string, 0, Span/bucket+1)
	now := time.Now()
	for ago := time.Duration(0); ago <= Span; ago += bucket {
		keys = append(keys, keyOf(o.Prefix, o.Policy, o.Unit, now.Add(-ago)))
	}
	pipe := client.Pipeline() // ZUNION would need a Redis that has it
	parts := make([]*redis.ZSliceCmd, len(keys))
	for i, key := range keys {
		parts[i] = pipe.ZRangeWithScores(ctx, key, 0, -1)
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

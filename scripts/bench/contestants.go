package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/goredisstore.v9"

	"github.com/sluice-go/sluice/throttle"
)

// period is so long that a full window stays full while we measure.
const period = 24 * time.Hour

// A contestant is one limiter with one set of windows. If it has several, the last one denies and
// the others have room. So a denial costs a peer one call for each window too.
type contestant struct {
	name  string
	limit int
	take  reserveFunc

	// fill takes `used` units for a tenant that has none yet. If it is nil, one take does.
	fill func(ctx context.Context, tenant string, used int)
}

// A reserveFunc asks once for units, and returns whether they were granted.
type reserveFunc func(ctx context.Context, tenant string, cost int) bool

// baseline is the contestant that every ratio refers to.
func baseline(client redis.UniversalClient) contestant {
	return redisRate(client, "redis_rate, one call", 20, 1)
}

func contestants(client redis.UniversalClient) (all []contestant) {
	for _, kind := range []struct {
		algorithm throttle.Algorithm
		limit     int
	}{
		{throttle.Sliding, 20}, {throttle.Sliding, 1000}, {throttle.Sliding, 100_000},
		{throttle.Fixed, 20}, {throttle.GCRA, 20},
	} {
		last := throttle.Window{Name: "last", Algorithm: kind.algorithm, Limit: int64(kind.limit), Period: period}
		first := last
		first.Name, first.Limit = "first", 2*last.Limit
		ofUser := last
		ofUser.Scope = throttle.Per("tenant", "user")
		for _, shape := range []struct {
			name    string
			windows []throttle.Window
		}{
			{"one window", []throttle.Window{last}},
			{"two windows", []throttle.Window{first, last}},
			{"two scopes", []throttle.Window{first, ofUser}},
		} {
			name := fmt.Sprintf("sluice %s %d, %s", kind.algorithm, kind.limit, shape.name)
			all = append(all, sluice(client, name, kind.limit, shape.windows))
		}
	}
	all = append(all,
		redisRate(client, "redis_rate, two calls", 20, 2),
		throttledGCRA(client, 20),
		plainCounter(client, 20))
	for _, limit := range []int{20, 1000, 100_000} {
		all = append(all, sortedSet(client, limit))
	}
	return all
}

// ourReserve returns a reserve by our limiter with these windows. The tenant is also the user.
func ourReserve(client redis.UniversalClient, policy string, windows ...throttle.Window) reserveFunc {
	l := must(throttle.New(throttle.Config{
		Client:   client,
		Policies: []throttle.Policy{{Name: policy, Windows: windows}},
	}))
	return func(ctx context.Context, tenant string, cost int) bool {
		return must(l.Reserve(ctx, throttle.Request{
			Policy: policy, Tenant: tenant,
			Attributes: map[string]string{"user": tenant},
			Cost:       map[string]int64{throttle.Requests: int64(cost)},
		})).Granted
	}
}

func sluice(client redis.UniversalClient, name string, limit int, windows []throttle.Window) contestant {
	take := ourReserve(client, "bench", windows...)
	return contestant{
		name: name, limit: limit, take: take,
		fill: func(ctx context.Context, tenant string, used int) {
			fill, pause := take, time.Duration(0)
			if large := limit > 128 && windows[0].Algorithm == throttle.Sliding; large {
				// A large window counts together what is granted together. Full since long is one
				// that was filled over most of a period: of a short one, which is what these
				// windows have for now.
				short := slices.Clone(windows)
				for i := range short {
					short[i].Period = fillPeriod
				}
				fill = ourReserve(client, "bench", short...)
				pause = fillPeriod * 3 / 4 / fillCalls
			}
			each := max(1, limit/fillCalls)
			for next := time.Now(); used > 0; used -= each {
				if !fill(ctx, tenant, min(used, each)) {
					fail("filling %s: not granted", name)
				}
				next = next.Add(pause)
				time.Sleep(time.Until(next))
			}
		},
	}
}

// A large window is filled by so many calls while it has this period.
const (
	fillCalls  = 1000
	fillPeriod = 2 * time.Second
)

// redisRate makes one call for each window, as its users do. All but the last have room.
func redisRate(client redis.UniversalClient, name string, limit, calls int) contestant {
	l := redis_rate.NewLimiter(client)
	take := func(ctx context.Context, tenant string, cost int) bool {
		for i := range calls {
			n := limit
			if i < calls-1 {
				n *= 1000
			}
			rate := redis_rate.Limit{Rate: n, Burst: n, Period: period}
			r := must(l.AllowN(ctx, fmt.Sprint(tenant, ":", i), rate, cost))
			if r.Allowed == 0 {
				return false
			}
		}
		return true
	}
	return contestant{name: name, limit: limit, take: take}
}

func throttledGCRA(client redis.UniversalClient, limit int) contestant {
	store := must(goredisstore.NewCtx(client, "throttled:"))
	l := must(throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{
		MaxRate: throttled.PerDuration(limit, period), MaxBurst: limit - 1,
	}))
	take := func(ctx context.Context, tenant string, cost int) bool {
		limited, _, err := l.RateLimitCtx(ctx, tenant, cost)
		check(err)
		return !limited
	}
	return contestant{name: "throttled, GCRA", limit: limit, take: take}
}

// The shortest script of a fixed window. It returns neither the time of the reset nor the state
// after a denial.
var plainCounterScript = redis.NewScript(`
local used = redis.call('INCRBY', KEYS[1], ARGV[3])
if used == tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return used <= tonumber(ARGV[1]) and 1 or 0
`)

func plainCounter(client redis.UniversalClient, limit int) contestant {
	take := func(ctx context.Context, tenant string, cost int) bool {
		keys := []string{"counter:" + tenant}
		return must(plainCounterScript.Run(ctx, client, keys, limit, period.Milliseconds(), cost).Int()) == 1
	}
	return contestant{name: "plain counter script", limit: limit, take: take}
}

// The usual sliding window log in a sorted set, with a member for each grant.
var sortedSetScript = redis.NewScript(`
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local limit, period = tonumber(ARGV[1]), tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - period))
local used = redis.call('ZCARD', KEYS[1])
if used < limit then
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[3])
  redis.call('PEXPIRE', KEYS[1], math.ceil(period / 1000))
  return {1, limit - used - 1, 0}
end
local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return {0, 0, oldest[2] + period - now}
`)

func sortedSet(client redis.UniversalClient, limit int) contestant {
	key := func(tenant string) string { return "zset:" + tenant }
	return contestant{
		name: fmt.Sprintf("sorted set script %d", limit), limit: limit,
		take: func(ctx context.Context, tenant string, _ int) bool {
			return must(sortedSetScript.Run(ctx, client, []string{key(tenant)},
				limit, period.Microseconds(), rand.Text()).Int64Slice())[0] == 1
		},
		fill: func(ctx context.Context, tenant string, used int) {
			now := time.Now().UnixMicro()
			for used > 0 {
				members := make([]redis.Z, min(used, 10_000))
				for i := range members {
					members[i] = redis.Z{Score: float64(now - int64(used-i)), Member: rand.Text()}
				}
				check(client.ZAdd(ctx, key(tenant), members...).Err())
				used -= len(members)
			}
			check(client.PExpire(ctx, key(tenant), period).Err())
		},
	}
}

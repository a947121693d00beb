// Package apitest has models of APIs that limit their callers.
package apitest

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// A Count is how an API counts the calls of one caller: it accepts or refuses a call that arrives
// at a time, since some beginning. Calls arrive in the order of time, from one goroutine at a time.
type Count func(at time.Duration) bool

// HalvedCount accepts as many calls in any span of the period as the limit says, but half from `from` until `until`.
func HalvedCount(limit int, period, from, until time.Duration) Count {
	return changingCount(period, func(at time.Duration) int {
		if at >= from && at < until {
			return limit / 2
		}
		return limit
	})
}

func changingCount(period time.Duration, limit func(at time.Duration) int) Count {
	var accepted []time.Duration
	return func(at time.Duration) bool {
		for len(accepted) > 0 && accepted[0] <= at-period {
			accepted = accepted[1:]
		}
		if len(accepted) >= limit(at) {
			return false
		}
		accepted = append(accepted, at)
		return true
	}
}

// EstimatedCount estimates the calls of the last period from the calls in two buckets of that length,
// as if the calls of the older bucket had come evenly. It counts refused calls too. Source:
// Cloudflare, "How we built rate limiting capable of scaling to millions of domains", 2017.
func EstimatedCount(limit int, period time.Duration) Count {
	bucket, previous, now := time.Duration(-1), 0, 0
	return func(at time.Duration) bool {
		if b := at / period; b != bucket {
			if previous = 0; b == bucket+1 {
				previous = now
			}
			bucket, now = b, 0
		}
		rest := 1 - float64(at%period)/float64(period)
		estimate := float64(previous)*rest + float64(now)
		now++
		return estimate < float64(limit)
	}
}

// BucketCount is a token bucket of burst calls, refilled at limit a period. With a burst of 1 it is a leaky bucket.
func BucketCount(limit int, period time.Duration, burst int) Count {
	tokens, last := float64(burst), time.Duration(0)
	return func(at time.Duration) bool {
		tokens = math.Min(float64(burst), tokens+float64(at-last)/float64(period)*float64(limit))
		last = at
		if tokens < 1-1e-9 {
			return false
		}
		tokens--
		return true
	}
}

// SharedCount is a count that a stranger's calls come to too, at random times, one in an interval
// on average. The second function tells how many of them were accepted.
func SharedCount(count Count, interval time.Duration, seed uint64) (shared Count, stranger func() int) {
	random := rand.New(rand.NewPCG(seed, seed))
	next, accepted := time.Duration(0), 0
	return func(at time.Duration) bool {
		for ; next <= at; next += time.Duration(random.ExpFloat64() * float64(interval)) {
			if count(next) {
				accepted++
			}
		}
		return count(at)
	}, func() int { return accepted }
}

// MostIn returns how many times lie in one span at most: in (t-span, t] for any t. It sorts them.
func MostIn(times []time.Time, span time.Duration) int {
	slices.SortFunc(times, time.Time.Compare)
	most, from := 0, 0
	for i, t := range times {
		for t.Sub(times[from]) >= span {
			from++
		}
		most = max(most, i-from+1)
	}
	return most
}

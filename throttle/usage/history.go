package usage

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// HistorySpan is how far back History goes.
	HistorySpan = 24 * time.Hour

	// Step is the time that a Point stands for.
	Step = time.Minute

	historyKept = HistorySpan + 2*time.Hour
)

// A Point is what happened in a minute.
type Point struct {
	At                        time.Time // when it began
	Granted, Refused, Waiting int64     // requests, refusals by the upstream, and tickets in line at its end
	Known                     bool      // something was written
}

// hourOf returns the key of an hour, beside the windows of the policy, and the minute in it.
func hourOf(l *throttle.Limiter, policy string, at time.Time) (key, minute string) {
	at = at.UTC()
	return fmt.Sprintf("%ssluice:{%s}:h:%d", l.Config().Prefix, policy, at.Unix()/3600), strconv.Itoa(at.Minute())
}

// History returns the minutes of some policies from a time on. The last one is under way. The error
// wraps that of go-redis.
func History(ctx context.Context, l *throttle.Limiter, policies []string, since time.Time) (map[string][]Point, error) {
	now := time.Now()
	since = since.Truncate(Step)
	pipe := l.Config().Client.Pipeline()
	hours := map[string]*redis.MapStringStringCmd{}
	for _, policy := range policies {
		for at := since.Truncate(time.Hour); !at.After(now); at = at.Add(time.Hour) {
			key, _ := hourOf(l, policy, at)
			hours[key] = pipe.HGetAll(ctx, key)
		}
	}
	if _, err := pipe.Exec(ctx); err != nil && len(hours) > 0 {
		return nil, fmt.Errorf("usage: history: %w", err)
	}
	all := map[string][]Point{}
	for _, policy := range policies {
		for at := since; !at.After(now); at = at.Add(Step) {
			key, minute := hourOf(l, policy, at)
			p := Point{At: at}
			for field, to := range map[string]*int64{"g": &p.Granted, "r": &p.Refused, "w": &p.Waiting} {
				text, known := hours[key].Val()[minute+field]
				*to, _ = strconv.ParseInt(text, 10, 64)
				p.Known = p.Known || known
			}
			all[policy] = append(all[policy], p)
		}
	}
	return all, nil
}

// Package history keeps what policies did in the last day: how much they granted, how often the
// upstream refused, and how many waited, by the minute. It is kept in Redis by the processes that
// grant, beside the calls of the limiter:
//
//	recorder := history.New(history.Config{Client: client})
//	limiter, err := throttle.New(throttle.Config{Client: client, Observer: recorder.Observer(throttle.Observer{})})
//	go recorder.Run(ctx, limiter)
package history

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

const (
	// Span is how far back the history goes.
	Span = 24 * time.Hour

	// Step is what a point stands for.
	Step = time.Minute

	every   = 10 * time.Second // between two writes
	timeout = 5 * time.Second  // of one
	kept    = Span + 2*time.Hour
)

// Config configures New.
type Config struct {
	Client redis.UniversalClient // the limiter's Redis; required
	Logger *slog.Logger          // gets errors of writing; the default is slog.Default()
	Prefix string                // throttle.Config.Prefix of the limiter
}

// A Recorder counts what limiters grant that it observes. It is safe for concurrent use.
type Recorder struct {
	config Config

	mu   sync.Mutex
	sums map[string]*sum // by policy
}

type sum struct{ granted, refused, waited int64 }

// New returns a recorder that writes nothing before Run.
func New(c Config) *Recorder {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return &Recorder{config: c, sums: map[string]*sum{}}
}

// Observer returns an observer that counts, and calls another one too.
func (r *Recorder) Observer(next throttle.Observer) throttle.Observer {
	o := next
	o.Decided = func(d throttle.Decision) {
		if d.Granted {
			r.add(d.Policy, 1, 0)
		}
		if next.Decided != nil {
			next.Decided(d)
		}
	}
	o.Taken = func(policy string, tickets []throttle.TakenTicket) {
		r.add(policy, int64(len(tickets)), 0)
		if next.Taken != nil {
			next.Taken(policy, tickets)
		}
	}
	o.Refused = func(refusal throttle.Refusal) {
		r.add(refusal.Policy, 0, 1)
		if next.Refused != nil {
			next.Refused(refusal)
		}
	}
	return o
}

func (r *Recorder) add(policy string, granted, refused int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sums[policy]
	if s == nil {
		s = &sum{}
		r.sums[policy] = s
	}
	s.granted += granted
	s.refused += refused
}

// Run writes every 10 seconds until ctx ends: one pipeline for each policy where something happened, or
// somebody waits.
func (r *Recorder) Run(ctx context.Context, l *throttle.Limiter) {
	for tick := time.NewTicker(every); ; {
		select {
		case <-tick.C:
			r.write(ctx, l)
		case <-ctx.Done():
			tick.Stop()
			r.write(context.WithoutCancel(ctx), l)
			return
		}
	}
}

func (r *Recorder) write(ctx context.Context, l *throttle.Limiter) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	waiting := map[string]int64{}
	for _, line := range l.Lines() {
		n, err := l.Line(line).Len(ctx)
		if err != nil {
			return // what was counted is written later
		}
		waiting[throttle.PolicyOf(line)] += n
	}
	for policy, waits := range waiting {
		r.add(policy, 0, 0)
		r.mu.Lock()
		s := *r.sums[policy]
		*r.sums[policy] = sum{waited: waits}
		r.mu.Unlock()
		if s == (sum{}) && waits == 0 {
			continue
		}
		key, minute := keyOf(r.config.Prefix, policy, time.Now())
		pipe := r.config.Client.Pipeline()
		pipe.HIncrBy(ctx, key, minute+"g", s.granted)
		if s.refused > 0 {
			pipe.HIncrBy(ctx, key, minute+"r", s.refused)
		}
		pipe.HSet(ctx, key, minute+"w", waits)
		pipe.Expire(ctx, key, kept)
		if _, err := pipe.Exec(ctx); err != nil {
			r.config.Logger.Warn("history: what a policy granted is written later", "policy", policy, "err", err)
			r.add(policy, s.granted, s.refused)
		}
	}
}

// keyOf returns the key of an hour, beside the windows of the policy, and the minute in it.
func keyOf(prefix, policy string, at time.Time) (key, minute string) {
	at = at.UTC()
	return fmt.Sprintf("%ssluice:{%s}:h:%d", prefix, policy, at.Unix()/3600), strconv.Itoa(at.Minute())
}

// A Point is what happened in a minute.
type Point struct {
	At                        time.Time // when it began
	Granted, Refused, Waiting int64
	Known                     bool // something was written
}

// Read returns the minutes of some policies from a time on, the last one that under way.
func Read(ctx context.Context, c Config, policies []string, since time.Time) (map[string][]Point, error) {
	now := time.Now()
	since = since.Truncate(Step)
	pipe := c.Client.Pipeline()
	hours := map[string]*redis.MapStringStringCmd{}
	for _, policy := range policies {
		for at := since.Truncate(time.Hour); !at.After(now); at = at.Add(time.Hour) {
			key, _ := keyOf(c.Prefix, policy, at)
			hours[key] = pipe.HGetAll(ctx, key)
		}
	}
	if _, err := pipe.Exec(ctx); err != nil && len(hours) > 0 {
		return nil, fmt.Errorf("history: %w", err)
	}
	all := map[string][]Point{}
	for _, policy := range policies {
		for at := since; !at.After(now); at = at.Add(Step) {
			key, minute := keyOf(c.Prefix, policy, at)
			p := Point{At: at}
			for field, to := range map[string]*int64{"g": &p.Granted, "r": &p.Refused, "w": &p.Waiting} {
				text, known := hours[key].Val()[minute+field]
				*to, _ = strconv.ParseInt(strings.TrimSpace(text), 10, 64)
				p.Known = p.Known || known
			}
			all[policy] = append(all[policy], p)
		}
	}
	return all, nil
}

package throttle

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A Caller says which running job makes a call, and records whether the upstream refused one. The context of calls
// carries it. Its methods are safe for concurrent use. Decision and Request must not change once the job runs.
//
// Package worker makes one for each task: its handlers use the worker.Job of their context instead. Adapters for other
// queues make their own, and adapters for client libraries find it, as package httpthrottle does: see the example of Line.
type Caller struct {
	// Decision is the grant of the job's own cost, by Request.Policy, or zero. Answers to calls are compared with it.
	Decision Decision

	// Request has the tenant, attributes and policy of the job's calls. With an empty Policy each call names one.
	Request Request

	cancelled atomic.Bool
	mu        sync.Mutex
	refused   map[string]refusal // by policy
}

// A refusal records when a policy's upstream last refused a call, and until when it refuses others.
type refusal struct{ at, until time.Time }

type callerKey struct{}

// WithCaller returns a context that carries the caller.
func WithCaller(ctx context.Context, c *Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerFrom returns the caller that a context carries. It is never nil: if the context has none, it is new.
func CallerFrom(ctx context.Context) *Caller {
	if c, _ := ctx.Value(callerKey{}).(*Caller); c != nil {
		return c
	}
	return &Caller{}
}

// Counted reports whether the job's own cost is taken, and by this policy. The job's calls by that policy are part
// of the cost, and must not reserve again. A job that is requeued because such a call is denied would take its
// cost again, and might never end.
func (c *Caller) Counted(policy string) bool {
	return c.Decision.Granted && !c.cancelled.Load() && policy == c.Request.Policy
}

// Cancel gives back the job's own cost, as the job has not made its call: its calls reserve from then on. Errors are
// Reservation.Cancel's.
func (c *Caller) Cancel(ctx context.Context) error {
	_, err := c.Decision.Reservation.Cancel(ctx)
	if err == nil {
		c.cancelled.Store(true)
	}
	return err
}

// Refused records that the upstream of a policy refused a call of the job, and for how long: the longest counts.
func (c *Caller) Refused(policy string, retryIn time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	until := slices.MaxFunc([]time.Time{now.Add(retryIn), c.refused[policy].until}, time.Time.Compare)
	c.refused = maps.Collect(maps.All(c.refused)) // a copy that is not nil
	c.refused[policy] = refusal{now, until}
}

// Answered records the answer to a call of a policy that was made at this time. It clears earlier
// refusals of the policy: the job has dealt with them. A refusal that came while the call was under way stands.
func (c *Caller) Answered(policy string, made time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !made.Before(c.refused[policy].at) {
		delete(c.refused, policy)
	}
}

// Refusal reports whether a call of the job was refused and no later one of the same policy was answered. It
// returns the policy, and how much longer its upstream refuses calls, at least 0. Of several the longest counts.
func (c *Caller) Refusal() (retryIn time.Duration, policy string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	longest := refusal{}
	for name, r := range c.refused {
		if !ok || r.until.After(longest.until) {
			longest, policy, ok = r, name, true
		}
	}
	return max(0, time.Until(longest.until)), policy, ok
}

package throttle

import (
	"context"
	"sync"
	"time"
)

// A Caller tells the calls of a running job whose they are, and records whether the upstream refused one. Their
// context carries it. Its methods are safe for concurrent use; on a nil Caller they record nothing, and report
// false. Request must not change once the job runs.
//
// Package worker makes one for each task. A handler uses the worker.Job of its context instead.
type Caller struct {
	// Decision is the grant of the job's own cost, by Request.Policy. An answer to a call is compared
	// with it. It is zero if the job has none, and must not change once the job runs.
	Decision Decision

	// Request has the tenant, attributes and policy of the job's calls. If its Policy is empty, each
	// call must name one.
	Request Request

	mu       sync.Mutex
	gaveBack bool
	refused  refusal // zero if there is none
}

type refusal struct {
	policy string
	at     time.Time // when it was recorded
	until  time.Time
}

type callerKey struct{}

// WithCaller returns a context that carries the caller.
func WithCaller(ctx context.Context, c *Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerFrom returns the caller that a context carries, or nil.
func CallerFrom(ctx context.Context) *Caller {
	c, _ := ctx.Value(callerKey{}).(*Caller)
	return c
}

// do calls f under the lock, unless there is no caller.
func (c *Caller) do(f func()) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

// GaveBack records that the job's own cost was given back.
func (c *Caller) GaveBack() { c.do(func() { c.gaveBack = true }) }

// Counted reports whether the job's own cost is taken, and by this policy. The job's calls by that policy are part
// of the cost, and must not reserve again. A job that is requeued because such a call is denied would take its
// cost again, and might never end.
func (c *Caller) Counted(policy string) (counted bool) {
	c.do(func() { counted = c.Decision.Granted && !c.gaveBack && policy == c.Request.Policy })
	return counted
}

// Refused records that the upstream of a policy refused a call of the job, and for how long. Of
// several refusals the longest counts.
func (c *Caller) Refused(policy string, retryIn time.Duration) {
	c.do(func() {
		now := time.Now()
		c.refused.at = now
		if until := now.Add(retryIn); c.refused.until.Before(until) {
			c.refused.policy, c.refused.until = policy, until
		}
	})
}

// Answered records the answer to a call that was made at this time. It clears refusals before that: the job has
// dealt with them. A refusal that came while the call was under way stands.
func (c *Caller) Answered(made time.Time) {
	c.do(func() {
		if !made.Before(c.refused.at) {
			c.refused = refusal{}
		}
	})
}

// Refusal reports whether a call of the job was refused and no later one was answered. It returns
// the policy and how much longer its upstream refuses calls, 0 if that has passed.
func (c *Caller) Refusal() (retryIn time.Duration, policy string, ok bool) {
	c.do(func() {
		if ok = !c.refused.at.IsZero(); ok {
			retryIn, policy = max(0, time.Until(c.refused.until)), c.refused.policy
		}
	})
	return retryIn, policy, ok
}

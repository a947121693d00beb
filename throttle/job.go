package throttle

import (
	"context"
	"sync"
	"time"
)

// A Job carries a running job's identity to the calls that it makes. It records which slots they
// hold, and whether the upstream refused one. Its methods are safe for concurrent use. Those of a
// nil Job record nothing, and report false. Request must not change once the job runs.
//
// Package worker makes one for each task. A handler uses the worker.Job of its context instead.
type Job struct {
	// Decision is the grant of the job's own cost, by Request.Policy. An answer to a call is compared
	// with it. It is zero if the job has none, and must not change once the job runs.
	Decision Decision

	// Request has the tenant, attributes and policy of the job's calls. If its Policy is empty, each
	// call must name one.
	Request Request

	mu      sync.Mutex
	counted bool
	held    map[string]string // of Concurrency windows: policies by the reservation's ID
	refused *refusal
}

type refusal struct {
	policy string
	at     time.Time // when it was recorded
	until  time.Time
}

type jobKey struct{}

// WithJob returns a context that carries the job.
func WithJob(ctx context.Context, j *Job) context.Context { return context.WithValue(ctx, jobKey{}, j) }

// JobFrom returns the job that a context carries, or nil.
func JobFrom(ctx context.Context) *Job {
	j, _ := ctx.Value(jobKey{}).(*Job)
	return j
}

// do calls f under the lock, unless there is no job.
func (j *Job) do(f func()) {
	if j == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	f()
}

// SetCounted records whether the job's own cost, by Request.Policy, is taken: as a task's is when
// it starts. Calls of the job by this policy count as part of that cost, and must not reserve
// again. A job that is requeued because such a call is denied would take its cost again, and might
// never end.
func (j *Job) SetCounted(counted bool) { j.do(func() { j.counted = counted }) }

// Counted reports whether the job's own cost is taken, and by this policy.
func (j *Job) Counted(policy string) (counted bool) {
	j.do(func() { counted = j.counted && policy == j.Request.Policy })
	return counted
}

// Refused records that the upstream of a policy refused a call of the job, and for how long. Of
// several refusals the longest counts.
func (j *Job) Refused(policy string, retryIn time.Duration) {
	j.do(func() {
		now := time.Now()
		if j.refused == nil {
			j.refused = &refusal{}
		}
		j.refused.at = now
		if until := now.Add(retryIn); j.refused.until.Before(until) {
			j.refused.policy, j.refused.until = policy, until
		}
	})
}

// Answered records that a call was answered that was made at a time: the job has dealt with
// refusals before that. One that came while the call was under way stands.
func (j *Job) Answered(made time.Time) {
	j.do(func() {
		if j.refused != nil && !made.Before(j.refused.at) {
			j.refused = nil
		}
	})
}

// Refusal reports whether a call of the job was refused and no later one was answered. It returns
// the policy and how much longer its upstream refuses calls, 0 if that has passed.
func (j *Job) Refusal() (retryIn time.Duration, policy string, ok bool) {
	j.do(func() {
		if ok = j.refused != nil; ok {
			retryIn, policy = max(0, time.Until(j.refused.until)), j.refused.policy
		}
	})
	return retryIn, policy, ok
}

func (j *Job) hold(r Reservation) {
	j.do(func() {
		if j.held == nil {
			j.held = map[string]string{}
		}
		j.held[r.ID] = r.Policy
	})
}

func (j *Job) drop(r Reservation) { j.do(func() { delete(j.held, r.ID) }) }

// holdsFrom reports whether the job holds slots of this policy or of one later in name order.
func (j *Job) holdsFrom(policy string) (holds bool) {
	j.do(func() {
		for _, held := range j.held {
			holds = holds || held >= policy
		}
	})
	return holds
}

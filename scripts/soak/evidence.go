package main

import (
	"context"
	"errors"
	"maps"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
)

// evidence gathers what is known of a stack. It asks Redis directly, not through the proxy.
func (s *stack) evidence(ctx context.Context) (evidence, error) {
	e := evidence{
		charged: map[string]int64{}, counts: map[string]int{}, ends: map[string]endState{},
		excused: s.witness.excused, pickUps: s.witness.pickUps(), takes: s.witness.killedTakes(),
		disrupted: s.disrupted, jobs: s.jobs, runs: s.journal.copied(), stuck: s.stuck,
		throttled: s.throttled, ticketless: s.ticketless, windows: soakPolicy().Windows,
	}
	s.mu.Lock()
	e.enqueued = maps.Clone(s.enqueued)
	for _, d := range s.disrupted {
		e.counts[d.kind]++
	}
	s.mu.Unlock()
	s.witness.mu.Lock()
	e.reenqueued, e.lost = maps.Clone(s.witness.reenqueued), maps.Clone(s.witness.lost)
	for fate, n := range s.witness.faults {
		e.counts[string(fate)] = n
	}
	s.witness.mu.Unlock()
	s.journal.mu.Lock()
	e.denials = s.journal.denials
	s.journal.mu.Unlock()
	for id := range e.enqueued {
		info, err := s.inspector.GetTaskInfo(queue, id)
		switch {
		case errors.Is(err, asynq.ErrTaskNotFound):
		case err != nil:
			return e, err
		default:
			e.ends[id] = endState{info.State, info.Retried}
		}
	}
	locks := s.redis.Scan(ctx, 0, "asynq:{"+queue+"}:unique:*", 1000).Iterator()
	for locks.Next(ctx) {
		id, err := s.redis.Get(ctx, locks.Val()).Result()
		if err != nil {
			return e, err
		}
		e.locks = append(e.locks, id)
	}
	if err := locks.Err(); err != nil {
		return e, err
	}
	if !s.throttled {
		return e, nil
	}
	limiter, err := throttle.New(throttle.Config{Client: s.redis, Policies: []throttle.Policy{soakPolicy()}})
	if err != nil {
		return e, err
	}
	for _, l := range load {
		d, err := limiter.Peek(ctx, throttle.Request{Policy: policyName, Tenant: l.tenant})
		if err != nil {
			return e, err
		}
		for _, w := range d.Windows {
			if w.Name == ledgerWindow {
				e.charged[l.tenant] = w.Used
			}
		}
	}
	e.tickets, err = waitingTasks(ctx, s.redis)
	return e, err
}

package main

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// awaitEnd waits until all tasks have ended and no ticket is in line.
func (o options) awaitEnd(ctx context.Context, stacks []*stack, say *progress) error {
	begin := time.Now()
	for ticks := 1; time.Since(begin) < o.drain && ctx.Err() == nil; ticks++ {
		waiting, tickets := []int{}, int64(0)
		for _, s := range stacks {
			tasks, n, err := s.waiting(context.WithoutCancel(ctx))
			if err != nil {
				return err
			}
			waiting, tickets = append(waiting, tasks), tickets+n
			if s.throttled {
				if err := s.noteTicketless(context.WithoutCancel(ctx)); err != nil {
					return err
				}
			}
			if o.length < shortRun && ticks%5 == 0 {
				if err := s.expireLeases(ctx); err != nil && ctx.Err() == nil {
					return err
				}
			}
		}
		if waiting[0]+waiting[1] == 0 && tickets == 0 {
			return nil
		}
		say.update("faults are off, %v of at most %v: %d tasks wait (%d in line), control %d",
			time.Since(begin).Round(time.Second), o.drain, waiting[0], tickets, waiting[1])
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
	return nil
}

// waiting returns how many tasks asynq has that have not ended, and how many tickets are in line.
func (s *stack) waiting(ctx context.Context) (tasks int, tickets int64, err error) {
	q, err := s.inspector.GetQueueInfo(queue)
	if err != nil {
		return 0, 0, err
	}
	tickets, err = s.redis.HLen(ctx, ticketsKey).Result()
	return q.Pending + q.Active + q.Scheduled + q.Retry, tickets, err
}

// noteTicketless notes tasks that asynq keeps for later, as it does tasks in line, but that have no
// ticket. It is for the time without faults. A ticket whose worker was killed is missing for a few
// seconds; a task without one for longer is no coincidence.
func (s *stack) noteTicketless(ctx context.Context) error {
	const missing = 15 * time.Second
	now := time.Now()
	// Retries, and tasks about which the limiter could not decide, are due sooner.
	soon := strconv.FormatInt(now.Add(10*time.Second).Unix(), 10)
	inLine, err := waitingTasks(ctx, s.redis)
	if err != nil {
		return err
	}
	seen := map[string]time.Time{}
	for _, set := range []string{"scheduled", "retry"} {
		ids, err := s.redis.ZRangeArgs(ctx, redis.ZRangeArgs{
			Key: "asynq:{" + queue + "}:" + set, ByScore: true, Start: soon, Stop: "+inf",
		}).Result()
		if err != nil {
			return err
		}
		for _, id := range ids {
			if slices.Contains(inLine, id) {
				continue
			}
			since := s.suspects[id]
			if since.IsZero() {
				since = now
			}
			if seen[id] = since; now.Sub(since) > missing && !slices.Contains(s.ticketless, id) {
				s.ticketless = append(s.ticketless, id)
			}
		}
	}
	s.suspects = seen
	return nil
}

// expireLeases expires the leases of dead workers. It restarts the others, as asynq looks for
// expired leases at a start.
func (s *stack) expireLeases(ctx context.Context) error {
	orphans := s.witness.orphans()
	past := float64(time.Now().Add(-31 * time.Second).Unix())
	for _, id := range orphans {
		if err := s.redis.ZAddXX(ctx, "asynq:{"+queue+"}:lease", redis.Z{Score: past, Member: id}).Err(); err != nil {
			return err
		}
	}
	if len(orphans) == 0 {
		return nil
	}
	s.stopWorkers()
	for _, p := range s.workers {
		if err := s.startWorker(p); err != nil {
			return err
		}
	}
	return nil
}

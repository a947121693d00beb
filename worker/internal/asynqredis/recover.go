package asynqredis

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Recover puts back tasks whose server died before they started, so that asynq's recoverer does not
// count a retry for them. They become due, and join their lines in front. The leases of other tasks
// that have expired by the given time are left to asynq.
//
// A server starts tasks in the order in which it made them active, as many at once as it has slots.
// So of those that are active still, the first may have started, as many as it has slots, and the
// others have not.
func (c *Client) Recover(ctx context.Context, queues []string, expired time.Time) error {
	type task struct {
		Ref
		slots   int
		call    uint64
		expired bool
	}
	byProcess := map[string][]task{}
	for _, queue := range queues {
		all := keys(queue, "active", "lease")
		reply, err := c.run(ctx, "expired", queue, all, prefix(queue)+"t:", expired.Unix()).StringSlice()
		if err != nil {
			return err
		}
		for t := range slices.Chunk(reply, 3) {
			process, rest, ours := strings.Cut(t[1], "/")
			slots, call, _ := strings.Cut(rest, "/")
			if n, err := strconv.Atoi(slots); ours && err == nil {
				number, _ := strconv.ParseUint(call, 36, 64)
				byProcess[process] = append(byProcess[process], task{Ref{queue, t[0]}, n, number, t[2] != ""})
			}
		}
	}
	delete(byProcess, c.process)
	for _, tasks := range byProcess {
		slices.SortStableFunc(tasks, func(a, b task) int { return cmp.Compare(a.call, b.call) })
		for _, t := range tasks[min(len(tasks), tasks[0].slots):] {
			if !t.expired {
				continue
			}
			if err := c.Restore(ctx, t.Queue, "", []string{t.ID}, time.Now().Truncate(time.Second)); err != nil {
				return err
			}
		}
	}
	return nil
}

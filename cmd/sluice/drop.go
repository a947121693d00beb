package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hibiken/asynq"
	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
)

// archiveKeeps is the number of archived tasks of a queue that asynq keeps: the newest.
const archiveKeeps = 9_999

// A dropped is the JSON of drop: what it does, or would do.
type dropped struct {
	Policy  string         `json:"policy"`
	Tenant  string         `json:"tenant"`
	Changed bool           `json:"changed"`
	Count   int            `json:"count"`  // tasks that were archived or deleted, or wait
	Queues  []droppedQueue `json:"queues"` // as they were before
}

type droppedQueue struct {
	Queue    string `json:"queue"`
	Waiting  int    `json:"waiting"`  // of the tenant
	Archived int    `json:"archived"` // before, of all tenants
	Lost     int    `json:"lost"`     // of these, that asynq would not keep
	LostOld  int    `json:"lost_old"` // tasks that are archived already
}

// dropCommand archives or deletes the waiting tasks of a tenant. Without --yes it prints a preview.
func (m *Main) dropCommand() *cli.Command {
	c := m.control()
	var remove, yes bool
	return &cli.Command{
		Name: "drop", Usage: "archive or delete the waiting tasks of a tenant", ArgsUsage: "POLICY TENANT",
		Flags: c.liveFlags(append([]cli.Flag{
			&cli.BoolFlag{Name: "yes", Usage: "do it; by default it says what it would do", Destination: &yes},
			&cli.BoolFlag{Name: "delete", Usage: "delete the tasks; by default they are archived", Destination: &remove},
		}, c.whyFlags()...)...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if yes {
				if err := c.sign(); err != nil {
					return err
				}
			}
			f, err := c.inForce(ctx)
			if err != nil {
				return err
			}
			defer f.server.Close()
			if err := c.about(ctx, f, cmd.Args()); err != nil {
				return err
			}
			d, err := c.preview(ctx, f, remove)
			if err != nil {
				return err
			}
			verb := "archive"
			if remove {
				verb = "delete"
			}
			d.warn(m)
			if yes {
				if d.Count, err = c.drop(ctx, f, verb, int64(d.Count)); err != nil {
					return err
				}
				d.Changed = d.Count > 0
			}
			return c.show(d, func() {
				if yes {
					fmt.Fprintf(c.Stdout, "%s: %sd %s\n", c.name(), verb, count(int64(d.Count), "waiting task"))
					return
				}
				fmt.Fprintf(c.Stdout, "%s: would %s %s. Nothing is changed: --yes does it.\n",
					c.name(), verb, count(int64(d.Count), "waiting task"))
			})
		},
	}
}

// preview counts the waiting tasks by queue, and what asynq would not keep.
func (c *ControlCommand) preview(ctx context.Context, f *fleet, remove bool) (dropped, error) {
	d, queues := dropped{Policy: c.policy, Tenant: c.tenant}, map[string]int{}
	line := f.limiter.Line(f.limiter.LineOf(c.policy, c.tenant))
	err := line.Tickets(ctx, c.tenant, func(tickets []throttle.Ticket) error {
		for _, t := range tickets {
			if t.Queue != "" { // else a call that waits in place
				queues[queueOf(t.Queue)]++
			}
		}
		return ctx.Err()
	})
	if err != nil {
		return d, err
	}
	inspector := asynq.NewInspectorFromRedisClient(f.server.Client)
	for _, name := range slices.Sorted(maps.Keys(queues)) {
		q := droppedQueue{Queue: name, Waiting: queues[name]}
		info, err := inspector.GetQueueInfo(name)
		if errors.Is(err, asynq.ErrQueueNotFound) {
			continue // it is not asynq's, as that of "sluice run"
		}
		if err != nil {
			return d, err
		}
		q.Archived = info.Archived
		if over := q.Archived + q.Waiting - archiveKeeps; over > 0 && !remove {
			q.LostOld = min(over, q.Archived)
			q.Lost = over - q.LostOld
		}
		d.Count += q.Waiting
		d.Queues = append(d.Queues, q)
	}
	return d, nil
}

// warn reports the archived tasks that asynq would not keep.
func (d dropped) warn(m *Main) {
	for _, q := range d.Queues {
		if q.Lost+q.LostOld > 0 {
			fmt.Fprintf(m.Stderr, "sluice: warning: asynq keeps %d archived tasks of a queue: of %s it deletes %d that are "+
				"archived already, of any tenant, and %d of these\n", archiveKeeps, words.Name(q.Queue), q.LostOld, q.Lost)
		}
	}
}

// drop archives or deletes the tasks, and shows how far it is.
func (c *ControlCommand) drop(ctx context.Context, f *fleet, verb string, all int64) (n int, err error) {
	if err := c.record(ctx, f, control.Dropped, fmt.Sprintf("%s %s", verb, count(all, "waiting task"))); err != nil {
		return 0, err
	}
	client, err := worker.NewClient(f.server.Opt, worker.ClientConfig{Limiter: f.limiter})
	if err != nil {
		return 0, err
	}
	defer client.Close()
	progress := show.NewProgress(c.Stderr, 2*time.Second)
	progress.Restart()
	defer progress.Clear()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n, err = client.Drop(ctx, worker.DropOptions{Delete: verb == "delete", Policy: c.policy, Tenant: c.tenant})
	}()
	for {
		select {
		case <-ended:
			return n, err
		case <-time.After(500 * time.Millisecond):
		}
		s, err := inspect.Of(f.limiter).State(ctx, inspect.Query{Policy: c.policy, Tenant: c.tenant})
		if err != nil {
			continue
		}
		left := int64(0)
		for _, t := range s.Tenants {
			left += t.Waiting
		}
		progress.Show(func() string { return fmt.Sprintf("%sd %d of %d", verb, max(0, all-left), all) })
	}
}

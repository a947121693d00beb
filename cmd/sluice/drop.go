package main

import (
	"context"
	"fmt"
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

// archiveKeeps is the number of archived tasks that asynq keeps of a queue: the newest.
const archiveKeeps = 9_999

// A dropReport is the JSON of drop.
type dropReport struct {
	Policy  string         `json:"policy"`
	Tenant  string         `json:"tenant"`
	Changed bool           `json:"changed"`
	Count   int            `json:"count"`  // tasks that drop took, or without --yes would take
	Queues  []droppedQueue `json:"queues"` // as they were before
}

type droppedQueue struct {
	Queue    string `json:"queue"`
	Waiting  int    `json:"waiting"`  // tasks of the tenant
	Archived int    `json:"archived"` // tasks of all tenants
	Lost     int    `json:"lost"`     // waiting tasks for which asynq's archive has no room
	LostOld  int    `json:"lost_old"` // archived tasks that asynq deletes to make room
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
			c.args = cmd.Args()
			if err := c.readTarget(ctx, f); err != nil {
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
					fmt.Fprintf(c.Stdout, "%s: %sd %s\n", c.target(), verb, countText(int64(d.Count), "waiting task"))
					return
				}
				fmt.Fprintf(c.Stdout, "%s: would %s %s. Nothing is changed: --yes does it.\n",
					c.target(), verb, countText(int64(d.Count), "waiting task"))
			})
		},
	}
}

// preview counts the waiting tasks of each queue, and the tasks that the archive would lose: none if tasks are deleted.
func (c *ControlCommand) preview(ctx context.Context, f *fleet, remove bool) (dropReport, error) {
	d, waiting := dropReport{Policy: c.policy, Queues: []droppedQueue{}, Tenant: c.tenant}, map[string]int{}
	line := f.limiter.Line(f.limiter.LineOf(c.policy, c.tenant))
	err := line.Tickets(ctx, c.tenant, func(tickets []throttle.Ticket) error {
		for _, t := range tickets {
			if t.Queue != "" { // else it is no task of asynq's
				waiting[queueOf(t.Queue)]++
			}
		}
		return ctx.Err()
	})
	if err != nil {
		return d, err
	}
	inspector := asynq.NewInspectorFromRedisClient(f.server.Client)
	queues, err := inspector.Queues()
	for _, name := range slices.Sorted(slices.Values(queues)) { // tickets of other queues are for no task of asynq's
		if waiting[name] == 0 {
			continue
		}
		info, err := inspector.GetQueueInfo(name)
		if err != nil {
			return d, err
		}
		q := droppedQueue{Queue: name, Waiting: waiting[name], Archived: info.Archived}
		if excess := q.Archived + q.Waiting - archiveKeeps; excess > 0 && !remove {
			q.LostOld = min(excess, q.Archived)
			q.Lost = excess - q.LostOld
		}
		d.Count += q.Waiting
		d.Queues = append(d.Queues, q)
	}
	return d, err
}

// warn reports the tasks that the archive would lose.
func (d dropReport) warn(m *Main) {
	for _, q := range d.Queues {
		if q.Lost+q.LostOld > 0 {
			fmt.Fprintf(m.Stderr, "sluice: warning: asynq keeps %d archived tasks of a queue: of %s it deletes %d that are "+
				"archived already, of any tenant, and %d of these\n", archiveKeeps, words.Name(q.Queue), q.LostOld, q.Lost)
		}
	}
}

// drop archives or deletes the tasks, shows its progress, and returns their number. `all` is the preview's number.
func (c *ControlCommand) drop(ctx context.Context, f *fleet, verb string, all int64) (int, error) {
	if err := c.record(ctx, f, control.Dropped, fmt.Sprintf("%s %s", verb, countText(all, "waiting task"))); err != nil {
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
	dropped := 0 // may be read when ended has a value
	ended := make(chan error, 1)
	go func() {
		var err error
		dropped, err = client.Drop(ctx, worker.DropOptions{Delete: verb == "delete", Policy: c.policy, Tenant: c.tenant})
		ended <- err
	}()
	for {
		select {
		case err := <-ended:
			return dropped, err
		case <-time.After(500 * time.Millisecond):
		}
		s, err := inspect.Of(f.limiter).State(ctx, inspect.Query{Policy: c.policy, Tenant: c.tenant})
		if err != nil {
			continue // Drop meets the error too
		}
		left := int64(0)
		for _, t := range s.Tenants {
			left += t.Waiting
		}
		progress.Show(func() string { return fmt.Sprintf("%sd %d of %d", verb, max(0, all-left), all) })
	}
}

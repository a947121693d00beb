package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/words"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// An Explanation has the reasons why a task waits: its state in asynq, and its position in line.
type Explanation struct {
	Queue string `json:"queue"`
	ID    string `json:"id"`

	// State is asynq's: "scheduled", "pending", "active", "retry", "archived", "completed", "aggregating"; or empty.
	State string `json:"state"`

	Type      string    `json:"type,omitempty"`
	Policy    string    `json:"policy,omitempty"` // that matches its type; empty if none does, or it waits no longer
	LastError string    `json:"last_error,omitempty"`
	NextAt    time.Time `json:"next_at,omitzero"` // when workers look at it, if nothing takes it before
	Retried   int       `json:"retried,omitempty"`
	MaxRetry  int       `json:"max_retry,omitempty"`

	QueuePaused bool `json:"queue_paused,omitempty"` // by asynq's tools: no server takes from it
	Servers     int  `json:"servers"`                // that serve the queue

	// Line describes where the task stands in line. It is nil if it stands in none.
	Line *inspect.State `json:"line,omitempty"`

	// Why is one line of text: why the task is in that state.
	Why string `json:"why"`
}

// Explain returns why a task waits, until when, and at which position. It changes nothing. A task that
// does not exist is no error: see Explanation.State. Errors are asynq's, and inspect.Inspector.Explain's.
func (c *Client) Explain(ctx context.Context, queue, id string) (Explanation, error) {
	e := Explanation{Queue: queue, ID: id}
	inspector := asynq.NewInspectorFromRedisClient(c.tasks.Redis())
	info, err := inspector.GetTaskInfo(queue, id)
	if errors.Is(err, asynq.ErrQueueNotFound) || errors.Is(err, asynq.ErrTaskNotFound) {
		e.Why = "asynq has no such task: it has ended, was deleted, or never was"
		return e, nil
	}
	var servers []*asynq.ServerInfo
	if err == nil {
		e.State, e.Type, e.LastError = info.State.String(), info.Type, info.LastErr
		e.NextAt, e.Retried, e.MaxRetry = info.NextProcessAt, info.Retried, info.MaxRetry
		servers, err = inspector.Servers()
	}
	for _, s := range servers {
		if s.Queues[queue] > 0 {
			e.Servers++
		}
	}
	if err == nil {
		e.QueuePaused, err = c.tasks.IsPaused(ctx, queue)
	}
	if err == nil && e.waits() {
		err = c.findInLine(ctx, &e)
	}
	if err != nil {
		return e, fmt.Errorf("worker: task %q: %w", id, err)
	}
	e.Why = e.why()
	return e, nil
}

// findInLine finds out which policy matches a task, and where it stands in line.
func (c *Client) findInLine(ctx context.Context, e *Explanation) error {
	database, err := c.tasks.Database(ctx)
	if err != nil {
		return err
	}
	if matched, ok := c.limiter.Match(e.Type, false); ok {
		e.Policy = matched.Name
	}
	line, err := inspect.Of(c.limiter).Explain(ctx, throttle.Ticket{Queue: database + "/" + e.Queue, ID: e.ID})
	if err == nil && line.Position > 0 {
		line.Queue = e.Queue // as asynq's tools name it
		e.Line = &line
	}
	return err
}

func (e Explanation) waits() bool {
	return e.State != "active" && e.State != "completed" && e.State != "archived"
}

func (e Explanation) why() string {
	next := e.NextAt.UTC().Format(time.RFC3339)
	text := "it is scheduled for " + next
	_, _, member := asynqredis.FiringOf(asynqredis.Ref{Queue: e.Queue, ID: e.ID})
	switch {
	case e.Line != nil && e.Line.Binds != "":
		text = "it waits in line for policy " + e.Line.Policy + ", delayed by " + e.Line.Binds
	case e.Line != nil:
		text = "it waits in line for policy " + e.Line.Policy +
			", and fits: the next server with a free slot takes it"
		if e.Line.At.Sub(e.Line.Since) > 10*time.Second {
			text += ", if its limiter has the same Redis and Prefix, and the policy the same name"
		}
	case e.State == "active":
		text = "it runs"
	case e.State == "completed":
		text = "it has run, and is retained"
	case e.State == "archived":
		text = "it is archived, as it failed for good or was dropped: " + words.Name(e.LastError)
	case e.State == "aggregating":
		text = "its group is not complete"
	case e.State == "pending" && e.Policy == "":
		text = "no policy matches its type: it starts as soon as a server has a free slot"
	case e.State == "pending":
		text = "policy " + e.Policy + " decides about it as soon as a server has a free slot"
	case e.State == "retry":
		text = fmt.Sprintf("it has failed (%d of %d retries used), and is tried again at %s: %s",
			e.Retried, e.MaxRetry, next, words.Name(e.LastError))
	case member && time.Until(e.NextAt) > 5*365*24*time.Hour:
		text = "its batch has set it aside: the firing is paused, stopped or outside its hours"
	case e.LastError != "":
		text = "it stands in no line, and workers look at it at " + next + ": " + words.Name(e.LastError)
	case e.Policy != "":
		text += ", and policy " + e.Policy + " decides about it then"
	}
	if e.QueuePaused && e.waits() {
		text += "; its queue is paused by asynq's tools"
	}
	if e.Servers == 0 && e.waits() {
		text += "; no server serves its queue"
	}
	return text
}

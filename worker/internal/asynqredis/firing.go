package asynqredis

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Firing is one run of a batch: the tasks that one tick of its schedule has brought. All that is
// kept of it has the slot of its queue, so that the scripts that end its tasks can count them.
type Firing struct {
	Queue string
	Batch string // letters, digits and "._-"
	Tick  time.Time
}

// keptSeconds is how long what is kept of a firing outlives its last change.
const keptSeconds = 31 * 24 * 60 * 60

const (
	fates        = ":fates"        // what became of the firing's tasks: see batch_count.lua
	firingPrefix = "sluice-batch:" // of the IDs of tasks
	tickLayout   = "20060102T150405Z"
)

// Name returns the firing's name among those of its batch, such as 20260102T020000Z.
func (f Firing) Name() string { return f.Tick.UTC().Format(tickLayout) }

// IDs returns what the IDs of the firing's tasks begin with. Their indexes follow.
func (f Firing) IDs() string { return firingPrefix + f.Batch + ":" + f.Name() + ":" }

// ID returns the ID of the task at a index.
func (f Firing) ID(index int) string { return f.IDs() + strconv.Itoa(index) }

// FiringOf returns the firing and the index of a task, if it has the ID of one.
func FiringOf(task Ref) (f Firing, index int, ok bool) {
	parts := strings.Split(task.ID, ":") // as ID joins them
	if len(parts) != 4 || parts[1] == "" {
		return Firing{}, 0, false
	}
	tick, _ := time.Parse(tickLayout, parts[2])
	f = Firing{task.Queue, parts[1], tick}
	index, _ = strconv.Atoi(parts[3])
	return f, index, index >= 0 && f.ID(index) == task.ID
}

// IsReport reports whether a task is the one that reports on a firing.
func IsReport(task Ref) bool {
	_, _, member := FiringOf(task)
	return !member && strings.HasPrefix(task.ID, firingPrefix)
}

// batchKey returns a key of the firing's batch, by what it ends in.
func (f Firing) batchKey(end string) string { return prefix(f.Queue) + "sluice:batch:" + f.Batch + end }

// key returns a key of the firing.
func (f Firing) key(end string) string { return f.batchKey(":" + f.Name() + end) }

// Members says that tasks that are enqueued are those of a firing, from a index on.
type Members struct {
	Firing
	From int
}

type membersKey struct{}

// WithMembers returns a context for the enqueuing of tasks of a firing.
func WithMembers(ctx context.Context, m Members) context.Context {
	return context.WithValue(ctx, membersKey{}, m)
}

// MembersOf returns what WithMembers was given.
func MembersOf(ctx context.Context) (Members, bool) {
	m, ok := ctx.Value(membersKey{}).(Members)
	return m, ok
}

// A Schedule is what is known of a batch's ticks.
type Schedule struct {
	Now  time.Time // by the clock of Redis
	Last time.Time // the last tick that was decided; zero for none
	Open []Firing  // that have not ended
}

// Schedule returns what is known of a batch's ticks.
func (c *Client) Schedule(ctx context.Context, queue, batch string) (s Schedule, err error) {
	if s.Now, err = c.redis.Time(ctx).Result(); err != nil {
		return s, err
	}
	key := Firing{Queue: queue, Batch: batch}.batchKey("")
	fields, err := c.redis.HGetAll(ctx, key).Result()
	if last, never := strconv.ParseInt(fields["last"], 10, 64); never == nil {
		s.Last = time.Unix(last, 0)
	}
	s.Open = firings(queue, batch, slices.Collect(maps.Keys(fields)))
	return s, err
}

// firings returns the firings of a batch by their names.
func firings(queue, batch string, names []string) (all []Firing) {
	for _, name := range names {
		if tick, err := time.Parse(tickLayout, name); err == nil {
			all = append(all, Firing{queue, batch, tick})
		}
	}
	return all
}

// Fire decides all ticks of a batch after one and up to another, of which f fires, unless its tick is
// zero. With the zero time for both it fires by hand. If alone is true it is skipped while another firing
// of the batch has not ended. The result is above 0 if it fires, below 0 if it was skipped, and 0 if none
// fires, or another scheduler has decided.
func (c *Client) Fire(ctx context.Context, f Firing, after, upTo time.Time, alone bool) (int, error) {
	all := []string{f.batchKey(""), f.batchKey(":firings")}
	return c.run(ctx, "batch_fire", f.Queue, all,
		after.Unix(), upTo.Unix(), keptSeconds, alone, f.Name(), f.Tick.Unix()).Int()
}

// Firings returns the newest firings of a batch, at most n, which must be above 0, the newest first.
func (c *Client) Firings(ctx context.Context, queue, batch string, n int) ([]Firing, error) {
	key := Firing{Queue: queue, Batch: batch}.batchKey(":firings")
	names, err := c.redis.ZRevRange(ctx, key, 0, int64(n)-1).Result()
	return firings(queue, batch, names), err
}

// Lease takes or renews the lease of a firing. A lease for 0 is given back.
func (c *Client) Lease(ctx context.Context, f Firing, holder string, lease time.Duration) error {
	_, err := c.write(ctx, f, holder, lease.Milliseconds())
	return err
}

// Update writes fields of a firing: names and values in turn. It returns what is wanted of it. A name
// that begins with ":" is that of a value that is kept beside the firing: Kept reads it.
func (c *Client) Update(ctx context.Context, f Firing, holder string, fields ...any) (want string, err error) {
	return c.write(ctx, f, holder, "", fields...)
}

// ErrNotHolder says that another scheduler works for a firing, or that it has ended or is gone.
var ErrNotHolder = errors.New("worker: another scheduler works for the batch's firing, or it has ended")

func (c *Client) write(
	ctx context.Context, f Firing, holder string, lease any, fields ...any,
) (want string, err error) {
	all := []string{f.key(""), f.batchKey(""), f.key(fates), f.key(":plan"), f.key(":expected")}
	args := append([]any{holder, lease, keptSeconds, f.Name()}, fields...)
	want, err = c.run(ctx, "batch_write", f.Queue, all, args...).Text()
	if err == nil && want == "" {
		err = ErrNotHolder
	}
	return want, err
}

// Fields returns the fields of a firing, none if it is gone.
func (c *Client) Fields(ctx context.Context, f Firing) (map[string]string, error) {
	return c.redis.HGetAll(ctx, f.key("")).Result()
}

// Want says what is wanted of a firing: run, pause, cancel or retry. It reports false if that has no
// effect any more.
func (c *Client) Want(ctx context.Context, f Firing, want string) (bool, error) {
	all := []string{f.key(""), f.batchKey("")}
	n, err := c.run(ctx, "batch_want", f.Queue, all, want, f.Name()).Int()
	return n == 1, err
}

// Kept reads what Update has kept beside a firing, or its fates: "" if there is none.
func (c *Client) Kept(ctx context.Context, f Firing, name string) (string, error) {
	return c.redis.GetRange(ctx, f.key(":"+name), 0, -1).Result()
}

// Running returns the indexes of a firing's tasks that are active, by their leases.
func (c *Client) Running(ctx context.Context, f Firing) (indexes []int, err error) {
	ids, err := c.redis.ZRange(ctx, prefix(f.Queue)+"lease", 0, -1).Result()
	for _, id := range ids {
		if _, index, ok := FiringOf(Ref{f.Queue, id}); ok && id == f.ID(index) {
			indexes = append(indexes, index)
		}
	}
	return indexes, err
}

// Count counts tasks of a firing that were not: with "failed" those that have ended, such as those that
// others have deleted or archived; with "rejected" those that were not enqueued.
func (c *Client) Count(ctx context.Context, f Firing, as string, indexes []int) error {
	_, err := forTasks[any](ctx, c, "batch_count", f.Queue, f.counts(), []any{f.tasks(), as, 0}, indexes, addIndex)
	return err
}

// What Move does with tasks of a firing.
const (
	Hold        = "hold"    // takes them from where they wait, so that none of them starts
	Release     = "release" // has those that wait join their lines soon, unless they are there
	Delete      = "delete"  // those that wait, and counts them as cancelled
	RetryFailed = "retry"   // has those that are archived wait again, with all their retries
)

// Move does something with tasks of a firing.
func (c *Client) Move(ctx context.Context, f Firing, verb string, indexes []int) error {
	all := append(keys(f.Queue, "scheduled", "retry", "archived", "pending"), f.counts()...)
	head := []any{f.tasks(), f.IDs(), time.Now().Unix(), verb}
	_, err := forTasks[any](ctx, c, "batch_move", f.Queue, all, head, indexes, addIndex)
	return err
}

func addIndex(args []any, index int) []any { return append(args, index) }

func (f Firing) tasks() string { return prefix(f.Queue) + "t:" + f.IDs() }

// counts are the keys by which tasks are counted.
func (f Firing) counts() []string { return []string{f.key(""), f.key(fates)} }

// End sends asynq's own call by which a task of a firing ends that took so long, and counts the task in the
// same transaction. It is counted by what is there after the call: not if the call had no effect.
func (c *Client) End(ctx context.Context, call redis.Cmder, f Firing, index int, took time.Duration) error {
	_, err := c.redis.TxPipelined(ctx, func(p redis.Pipeliner) error {
		_ = p.Process(ctx, call)
		keys := c.guarded(f.Queue, f.counts())
		return scripts["batch_count"].Eval(ctx, p, keys, f.tasks(), "done", took.Microseconds(), index).Err()
	})
	return cmp.Or(call.Err(), err)
}

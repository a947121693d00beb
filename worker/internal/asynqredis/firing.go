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

// A Firing is one run of a batch: the tasks of one tick of its schedule. All its keys are in the slot
// of its queue, so that the scripts that end its tasks can count them.
type Firing struct {
	Queue string
	Batch string // letters, digits and "._-"
	Tick  time.Time
}

const (
	keptSeconds    = 31 * 24 * 60 * 60 // how long a firing's keys outlive the last lease that a scheduler took or renewed
	fates          = ":fates"          // suffix of the key of the tasks' fates: see batch_count.lua
	firingPrefix   = "sluice-batch:"   // of the IDs of tasks
	tickLayout     = "20060102T150405Z"
	Fires, Skipped = 1, -1 // results of Client.Fire
)

// Name returns the firing's name, unique in its batch, such as 20260102T020000Z.
func (f Firing) Name() string { return f.Tick.UTC().Format(tickLayout) }

// IDPrefix returns the prefix of the IDs of the firing's tasks. Their indexes follow it.
func (f Firing) IDPrefix() string { return firingPrefix + f.Batch + ":" + f.Name() + ":" }

func (f Firing) ID(index int) string { return f.IDPrefix() + strconv.Itoa(index) }

// FiringOf returns the firing and the index of a task. It reports false for a task of no firing.
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

func IsReport(task Ref) bool {
	_, _, member := FiringOf(task)
	return !member && strings.HasPrefix(task.ID, firingPrefix)
}

func (f Firing) batchKey(end string) string { return prefix(f.Queue) + "sluice:batch:" + f.Batch + end }

func (f Firing) key(end string) string { return f.batchKey(":" + f.Name() + end) }

// Members are tasks that are enqueued for a firing. From is the index of the first task.
type Members struct {
	Firing
	From int
}

type membersKey struct{}

// WithMembers returns a context for enqueuing tasks of a firing.
func WithMembers(ctx context.Context, m Members) context.Context {
	return context.WithValue(ctx, membersKey{}, m)
}

func MembersOf(ctx context.Context) (Members, bool) {
	m, ok := ctx.Value(membersKey{}).(Members)
	return m, ok
}

// A Schedule records which of a batch's ticks were decided, and which firings are open.
type Schedule struct {
	Now  time.Time // by the clock of Redis
	Last time.Time // the last tick that was decided; zero for none
	Open []Firing  // the firings that have not ended
}

// Schedule reads the record of a batch's ticks. Last is the last tick that was decided by `text`: expression and zone.
func (c *Client) Schedule(ctx context.Context, queue, batch, text string) (s Schedule, err error) {
	if s.Now, err = c.redis.Time(ctx).Result(); err != nil {
		return s, err
	}
	f := Firing{Queue: queue, Batch: batch}
	if last, err := c.redis.HGet(ctx, f.batchKey(":last"), text).Int64(); err == nil {
		s.Last = time.Unix(last, 0)
	} else if !errors.Is(err, redis.Nil) {
		return s, err
	}
	open, err := c.redis.HGetAll(ctx, f.batchKey("")).Result()
	s.Open = firings(queue, batch, slices.Collect(maps.Keys(open)))
	return s, err
}

func firings(queue, batch string, names []string) (all []Firing) {
	for _, name := range names {
		if tick, err := time.Parse(tickLayout, name); err == nil {
			all = append(all, Firing{queue, batch, tick})
		}
	}
	return all
}

// Ticks are the ticks of a batch that one call of Fire decides: all after After, up to UpTo.
type Ticks struct {
	Schedule    string    // the text of the batch's cron expression and zone
	After, UpTo time.Time // After is what Client.Schedule told as Last
}

// Fire decides ticks of a batch: the tick of f fires, or none if that is zero. Without ticks f fires by hand. If alone
// is true, f is skipped while another firing of the batch has not ended. The result is Fires, Skipped, or 0 if no tick
// fires or another scheduler has decided.
func (c *Client) Fire(ctx context.Context, f Firing, decided Ticks, alone bool) (int, error) {
	all := []string{f.batchKey(""), f.batchKey(":firings"), f.batchKey(":last")}
	return c.run(ctx, "batch_fire", f.Queue, all, decided.After.Unix(), decided.UpTo.Unix(), keptSeconds, alone,
		f.Name(), f.Tick.Unix(), decided.Schedule).Int()
}

// Firings returns the newest n firings of a batch, the newest first. n must be above 0.
func (c *Client) Firings(ctx context.Context, queue, batch string, n int) ([]Firing, error) {
	key := Firing{Queue: queue, Batch: batch}.batchKey(":firings")
	names, err := c.redis.ZRevRange(ctx, key, 0, int64(n)-1).Result()
	return firings(queue, batch, names), err
}

// Lease takes or renews the lease of a firing. A duration of 0 gives it back.
func (c *Client) Lease(ctx context.Context, f Firing, holder string, lease time.Duration) error {
	_, err := c.write(ctx, f, holder, lease.Milliseconds())
	return err
}

// Update writes fields of a firing, and returns what is wanted of it. A value whose name begins with ":" gets its own
// key, for Kept. `set_aside` stays 1 while `resumed` is 1, and a firing that is to retry does not end unless it is cancelled.
func (c *Client) Update(ctx context.Context, f Firing, holder string, fields ...any) (want string, err error) {
	return c.write(ctx, f, holder, "", fields...)
}

// ErrNotHolder is the error if another scheduler works for a firing, or the firing has ended or is gone.
var ErrNotHolder = errors.New("worker: another scheduler works for the batch's firing, or it has ended")

func (c *Client) write(ctx context.Context, f Firing, holder string, lease any, fields ...any) (want string, err error) {
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

// Want records what is wanted of a firing: run, pause, cancel or retry. It reports false if that has no effect.
func (c *Client) Want(ctx context.Context, f Firing, want string) (bool, error) {
	all := []string{f.key(""), f.batchKey(""), f.key(":expected")}
	n, err := c.run(ctx, "batch_want", f.Queue, all, want, f.Name()).Int()
	return n == 1, err
}

// Kept reads a value to which Update gave a key of its own, or the fates: "" if there is none.
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

// Count counts tasks of a firing that were not counted yet. With "failed" it counts archived and missing tasks as
// failed, and completed tasks as done; with "rejected", tasks that were not enqueued as rejected.
func (c *Client) Count(ctx context.Context, f Firing, as string, indexes []int) error {
	_, err := forTasks[any](ctx, c, "batch_count", f.Queue, f.counts(), []any{f.taskPrefix(), as, 0}, indexes, addIndex)
	return err
}

// What Move does with tasks of a firing.
const (
	SetAside    = "set_aside" // sets waiting tasks aside, so that none of them starts
	Release     = "release"   // makes waiting tasks, also those set aside, join their lines soon, unless they are in line
	Delete      = "delete"    // deletes waiting tasks, and counts them as cancelled
	RetryFailed = "retry"     // makes archived tasks wait again, with all their retries
)

func (c *Client) Move(ctx context.Context, f Firing, verb string, indexes []int) error {
	all := append(keys(f.Queue, "scheduled", "retry", "archived", "pending"), f.counts()...)
	first := []any{f.taskPrefix(), f.IDPrefix(), time.Now().Unix(), verb}
	_, err := forTasks[any](ctx, c, "batch_move", f.Queue, all, first, indexes, addIndex)
	return err
}

func addIndex(args []any, index int) []any { return append(args, index) }

func (f Firing) taskPrefix() string { return prefix(f.Queue) + "t:" + f.IDPrefix() }

func (f Firing) counts() []string { return []string{f.key(""), f.key(fates)} }

// End sends asynq's own call that ends a task of a firing, and counts the task in the same transaction. It
// counts by the task's state after the call: a call without effect counts nothing.
func (c *Client) End(ctx context.Context, call redis.Cmder, f Firing, index int, took time.Duration) error {
	_, err := c.redis.TxPipelined(ctx, func(p redis.Pipeliner) error {
		_ = p.Process(ctx, call)
		keys := c.guarded(f.Queue, f.counts())
		return scripts["batch_count"].Eval(ctx, p, keys, f.taskPrefix(), "done", took.Microseconds(), index).Err()
	})
	return cmp.Or(call.Err(), err)
}

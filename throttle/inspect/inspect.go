// Package inspect shows how the lines of a throttle.Limiter stand: who waits, since when, why and until when, and
// what would happen with other limits. A line is read by several commands: what changes meanwhile may show twice. The
// package changes no position and no count, but its calls, like all calls of a line, remove claims of ended processes.
package inspect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/quote"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

const (
	maxTenants = 500                  // of a page
	maxPlan    = 400 * 24 * time.Hour // how far ahead plans and simulations look
)

// An Inspector looks at the lines of a limiter. It is safe for concurrent use. Errors are Limiter.Reserve's.
type Inspector struct{ limiter *throttle.Limiter }

// Of returns an inspector of a limiter.
func Of(l *throttle.Limiter) Inspector { return Inspector{l} }

// Policies returns the names of the limiter's policies, and of removed policies for which tickets still wait.
func (i Inspector) Policies() []string {
	names := i.limiter.Lines()
	for n, line := range names {
		names[n] = script.PolicyOf(line)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Orphans returns how many tickets wait in lines of policies that the limiter does not have, by policy.
// It looks through all keys of a Redis, some thousand a call.
func (i Inspector) Orphans(ctx context.Context) (map[string]int64, error) {
	known, orphans, c := i.Policies(), map[string]int64{}, i.limiter.Config()
	err := script.ScanAll(ctx, c.Client, script.Prefix(c.Prefix, "*")+"t", func(keys []string) error {
		for _, key := range keys {
			_, name, _ := strings.Cut(key, "{")
			if policy := script.PolicyOf(strings.TrimSuffix(name, "}:t")); !slices.Contains(known, policy) {
				n, err := c.Client.HLen(ctx, key).Result()
				if err != nil {
					return err
				}
				orphans[policy] += n
			}
		}
		return nil
	})
	return orphans, script.Classify(ctx, "", err)
}

// lines returns the lines of a policy, first those in force, then removed ones while somebody waits there.
func (i Inspector) lines(policy string) ([]string, error) {
	lines := slices.DeleteFunc(i.limiter.Lines(), func(line string) bool { return script.PolicyOf(line) != policy })
	if len(lines) == 0 {
		return nil, fmt.Errorf("%w %q", throttle.ErrUnknownPolicy, quote.Short(policy))
	}
	return lines, nil
}

// A line reads one line of a policy, in pages. For its keys see internal/script/lua/line.lua.
type line struct {
	*throttle.Line
	name   string
	config throttle.Config
	err    error // the first one: nothing is read after it
}

func (i Inspector) line(name string) *line {
	return &line{i.limiter.Line(name), name, i.limiter.Config(), nil}
}

// try calls f, unless something has failed.
func (l *line) try(ctx context.Context, f func(client redis.UniversalClient, prefix string) error) {
	if l.err == nil {
		l.err = script.Classify(ctx, script.PolicyOf(l.name), f(l.config.Client, script.Prefix(l.config.Prefix, l.name)))
	}
}

// readFlow reads "tickets units weight tag suffix rank ..." into a state that has no more than that.
func readFlow(name, record string) (f State, err error) {
	f.flow = name
	err = scan(name, record, &f.Waiting, &f.cost, &f.weight, &f.tag, new(string), &f.rank)
	return f, err
}

// parseQueue returns the queue, empty for calls that wait in place, and the class in the name of a queue or flow.
func parseQueue(name string) (queue string, class throttle.Class) {
	queue, batch, _, _ := script.ParseFlow(name)
	class = map[bool]throttle.Class{true: throttle.ClassBatch, false: throttle.ClassLive}[batch]
	if strings.HasPrefix(name, "!") {
		queue = ""
	}
	return queue, class
}

// scan reads the first fields of a record.
func scan(name, record string, fields ...any) error {
	if _, err := fmt.Sscan(strings.ReplaceAll(record, "  ", " - "), fields...); err != nil { // an empty word leaves "  "
		return &script.ReplyError{Reason: fmt.Sprintf("record %q: %v", name, err)}
	}
	return nil
}

// queues adds the line's queues where tickets wait to all, by queue and class, and returns their names.
func (l *line) queues(ctx context.Context, all map[[2]string]QueueState) (names []string) {
	l.try(ctx, func(client redis.UniversalClient, prefix string) error {
		records, err := client.HGetAll(ctx, prefix+"z").Result()
		for name, record := range records { // "asked tickets weights first last server since taken flows ..."
			q, skip, asked, since := QueueState{}, "", int64(0), int64(0)
			bad := scan(name, record, &asked, &q.Waiting, &q.weights, &skip, &skip, &skip, &since, &skip, &q.Flows)
			if err = cmp.Or(err, bad); q.Waiting == 0 {
				continue
			}
			q.Queue, q.Class = parseQueue(name)
			key := [2]string{q.Queue, string(q.Class)}
			sum := all[key]
			q.Waiting, q.Flows, q.weights = q.Waiting+sum.Waiting, q.Flows+sum.Flows, q.weights+sum.weights
			q.Asked = time.UnixMicro(max(asked, sum.Asked.UnixMicro()))
			if q.Binds = sum.Binds; since > 0 {
				q.Binds = throttle.BySlots
			}
			names, all[key] = append(names, name), q
		}
		return err
	})
	return names
}

// page returns about n flows from a cursor on, 0 at first, and the next cursor, 0 at the end. A flow may come twice.
func (l *line) page(ctx context.Context, cursor uint64, n int) (flows []State, next uint64) {
	l.try(ctx, func(client redis.UniversalClient, prefix string) (err error) {
		var pairs []string
		pairs, next, err = client.HScan(ctx, prefix+"f", cursor, "", int64(n)).Result()
		for pair := range slices.Chunk(pairs, 2) {
			f, bad := readFlow(pair[0], pair[1])
			flows, err = append(flows, f), cmp.Or(err, bad)
		}
		return err
	})
	return flows, next
}

// all returns all flows that wait, in the order of their ranks.
func (l *line) all(ctx context.Context) []State {
	byName := map[string]State{}
	for cursor := uint64(0); ; {
		flows, next := l.page(ctx, cursor, 1000)
		for _, f := range flows {
			byName[f.flow] = f
		}
		if cursor = next; l.err != nil || cursor == 0 {
			return slices.SortedFunc(maps.Values(byName), func(a, b State) int { return cmp.Compare(a.rank, b.rank) })
		}
	}
}

// read reads fields of a hash of a line, and parses each that exists.
func read[T any](
	ctx context.Context, l *line, key string, parse func(field, record string) (T, error), fields ...string,
) (found []T) {
	if len(fields) == 0 {
		return nil
	}
	l.try(ctx, func(client redis.UniversalClient, prefix string) error {
		records, err := client.HMGet(ctx, prefix+key, fields...).Result()
		for i, record := range records {
			if text, ok := record.(string); ok {
				one, bad := parse(fields[i], text)
				found, err = append(found, one), cmp.Or(err, bad)
			}
		}
		return err
	})
	return found
}

// oldest returns when the oldest tickets of flows began to wait, by the flows' names. The oldest is the first
// ticket that joined at the end, or the first of the tickets in front, whose tasks ran before.
func (l *line) oldest(ctx context.Context, flows []State) map[string]time.Time {
	var names []string
	l.try(ctx, func(client redis.UniversalClient, prefix string) error {
		pipe, first := client.Pipeline(), []*redis.StringSliceCmd{}
		for _, f := range flows {
			key := prefix + "f:" + f.flow
			end := redis.ZRangeArgs{Key: key, Start: script.LineZero, Stop: "+inf", ByScore: true, Count: 1}
			first = append(first, pipe.ZRangeArgs(ctx, end), pipe.ZRange(ctx, key, 0, 0))
		}
		_, err := pipe.Exec(ctx)
		for _, ticket := range first {
			names = append(names, ticket.Val()...)
		}
		return err
	})
	oldest := map[string]time.Time{}
	for _, t := range read(ctx, l, "t", script.ReadTicket, names...) {
		if since, known := oldest[t.Flow]; !known || t.Since < since.UnixMicro() {
			oldest[t.Flow] = time.UnixMicro(t.Since)
		}
	}
	return oldest
}

package inspect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A line reads one line of a policy. Its keys are described in internal/script/lua/line.lua. No
// command takes longer the more tickets wait: they read pages.
type line struct {
	*throttle.Line
	err error // the first one: nothing is read after it
}

func (i Inspector) line(name string) *line { return &line{Line: i.limiter.Line(name)} }

// try calls f, unless something has failed.
func (l *line) try(ctx context.Context, f func(client redis.UniversalClient, prefix string) error) {
	if l.err == nil {
		l.err = l.Read(ctx, f)
	}
}

// A flow is the tickets of one tenant, with its attributes, in one queue.
type flow struct {
	name    string
	tickets int64
	units   string // what each costs, or all together: see internal/script/lua/line_units.lua
	weight  int64  // in thousandths
	rank    string // of its first ticket, 16 digits; says nothing if the flow waits at no node
	tag     string // of its tenant: a take moves it; 0 if windows count by other attributes, too

	ticket, cost string // of the ticket that is asked about; if empty, that is the last one of the flow
}

// costs returns the average costs of one ticket of the flow.
func (f flow) costs() string {
	parts := strings.Split(f.units, ",")
	for i, part := range parts {
		unit, text, _ := strings.Cut(part, "=")
		if sum, _, summed := strings.Cut(text, "/"); summed {
			n, _ := strconv.ParseInt(sum, 10, 64)
			parts[i] = unit + "=" + strconv.FormatInt((n+f.tickets/2)/max(1, f.tickets), 10)
		}
	}
	return strings.Join(parts, ",")
}

// readFlow reads "tickets units weight tag suffix rank ...".
func readFlow(name, record string) (flow, error) {
	f, suffix := flow{name: name}, ""
	err := scan(name, record, &f.tickets, &f.units, &f.weight, &f.tag, &suffix, &f.rank)
	return f, err
}

// parseQueue returns the queue, empty for calls that wait in place, and the class in the name of a queue or flow.
func parseQueue(name string) (queue string, class throttle.Class) {
	queue, batch, _, _ := script.ParseFlow(name)
	if class = throttle.ClassLive; batch {
		class = throttle.ClassBatch
	}
	if strings.HasPrefix(name, "!") {
		queue = ""
	}
	return queue, class
}

// scan reads the first fields of a record.
func scan(name, record string, fields ...any) error {
	if _, err := fmt.Sscan(strings.ReplaceAll(record, "  ", " - "), fields...); err != nil { // "  " holds an empty word
		return &script.ReplyError{Reason: fmt.Sprintf("record %q: %v", name, err)}
	}
	return nil
}

// queues adds the queues where tickets wait to those of other lines, by queue and class, and returns their names.
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
			if q.Asked = time.UnixMicro(asked); since > 0 {
				q.Binds = throttle.BySlots
			}
			key := [2]string{q.Queue, string(q.Class)}
			sum := all[key]
			q.Waiting, q.Flows, q.weights = q.Waiting+sum.Waiting, q.Flows+sum.Flows, q.weights+sum.weights
			if q.Binds = cmp.Or(q.Binds, sum.Binds); sum.Asked.After(q.Asked) {
				q.Asked = sum.Asked
			}
			names, all[key] = append(names, name), q
		}
		return err
	})
	return names
}

// page returns about n flows from a cursor on, 0 at first, and the next cursor, 0 at the end. A flow may come twice.
func (l *line) page(ctx context.Context, cursor uint64, n int) (flows []flow, next uint64) {
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

// all returns all flows that wait, the first one first.
func (l *line) all(ctx context.Context) ([]flow, error) {
	byName := map[string]flow{}
	for cursor := uint64(0); ; {
		flows, next := l.page(ctx, cursor, 1000)
		for _, f := range flows {
			byName[f.name] = f
		}
		if cursor = next; l.err != nil || cursor == 0 {
			byRank := func(a, b flow) int { return cmp.Compare(a.rank, b.rank) }
			return slices.SortedFunc(maps.Values(byName), byRank), l.err
		}
	}
}

// read reads fields of a hash of a line, and parses the ones that exist.
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
// ticket that joined at the end, or the first of the tickets in front, which ran before.
func (l *line) oldest(ctx context.Context, flows []flow) map[string]time.Time {
	var names []string
	l.try(ctx, func(client redis.UniversalClient, prefix string) error {
		pipe, first := client.Pipeline(), []*redis.StringSliceCmd{}
		for _, f := range flows {
			key := prefix + "f:" + f.name
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
		if before, known := oldest[t.Flow]; !known || t.Since < before.UnixMicro() {
			oldest[t.Flow] = time.UnixMicro(t.Since)
		}
	}
	return oldest
}

package inspect

import (
	"cmp"
	"context"
	"errors"
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

// A line is one line of a policy as it is read. Its keys are those of internal/script/lua/line.lua. No
// command depends on how many tickets or tenants wait.
type line struct {
	*throttle.Line
	queues map[string]QueueState // by name
}

// A flow is the tickets of one tenant, with its attributes, in one queue.
type flow struct {
	name          string
	queue, values string // its parts; the queue with the class, as queues are named
	tickets       int64
	units         string // what each costs, or all together: see internal/script/lua/line_units.lua
	weight        int64  // in thousandths
	rank          string // that of its first ticket there, of 16 digits
	tag           int64  // of its tenant, which moves by each grant
}

func newFlow(name string) flow {
	queue, values, _ := strings.Cut(name, "|")
	return flow{name: name, queue: queue, values: values}
}

// costs are those of one ticket of the flow, on average.
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
	f, suffix := newFlow(name), ""
	_, err := fmt.Sscan(record, &f.tickets, &f.units, &f.weight, &f.tag, &suffix, &f.rank)
	if err != nil {
		err = &script.ReplyError{Reason: fmt.Sprintf("flow %q: %v", name, err)}
	}
	return f, err
}

// readQueue reads "asked tickets weights first last server since taken flows ...". Flows begin with the name.
func readQueue(name, record string) (q QueueState, err error) {
	asked, skip := int64(0), ""
	_, err = fmt.Sscan(record, &asked, &q.Waiting, &q.weights, &skip, &skip, &skip, &q.since, &q.taken, &q.Flows)
	if err != nil {
		err = &script.ReplyError{Reason: fmt.Sprintf("queue %q: %v", name, err)}
	}
	name, batch := strings.CutSuffix(name, "!")
	if q.Asked, q.Class = time.UnixMicro(asked), throttle.ClassLive; batch {
		q.Class = throttle.ClassBatch
	}
	if !strings.HasPrefix(name, "!") {
		q.Queue = script.Unescape(name)
	}
	if q.since > 0 {
		q.Binds = throttle.BySlots
	}
	return q, err
}

// line returns one that is not read yet.
func (i Inspector) line(name string) *line {
	return &line{i.limiter.Line(name), map[string]QueueState{}}
}

// open reads the queues of a line.
func (l *line) open(ctx context.Context) error {
	return l.Read(ctx, func(client redis.UniversalClient, prefix string) error {
		records, err := client.HGetAll(ctx, prefix+"z").Result()
		for name, record := range records {
			q, bad := readQueue(name, record)
			if err = cmp.Or(err, bad); q.Waiting > 0 {
				l.queues[name] = q
			}
		}
		return err
	})
}

// page returns about n of the flows that wait, behind a cursor that begins at 0, and the next cursor,
// 0 at the end. A flow may come twice.
func (l *line) page(ctx context.Context, cursor uint64, n int64) (flows []flow, next uint64, err error) {
	err = l.Read(ctx, func(client redis.UniversalClient, prefix string) (err error) {
		var pairs []string
		pairs, next, err = client.HScan(ctx, prefix+"f", cursor, "", n).Result()
		for pair := range slices.Chunk(pairs, 2) {
			f, bad := readFlow(pair[0], pair[1])
			flows, err = append(flows, f), cmp.Or(err, bad)
		}
		return err
	})
	return flows, next, err
}

// all returns all flows that wait, the first one first.
func (l *line) all(ctx context.Context) ([]flow, error) {
	byName := map[string]flow{}
	for cursor := uint64(0); ; {
		flows, next, err := l.page(ctx, cursor, 1000)
		for _, f := range flows {
			byName[f.name] = f
		}
		if cursor = next; err != nil || cursor == 0 {
			byRank := func(a, b flow) int { return cmp.Compare(a.rank, b.rank) }
			return slices.SortedFunc(maps.Values(byName), byRank), err
		}
	}
}

// named returns those flows of the names that wait.
func (l *line) named(ctx context.Context, names []string) (flows []flow, err error) {
	for part := range slices.Chunk(names, 1000) {
		err = cmp.Or(err, l.Read(ctx, func(client redis.UniversalClient, prefix string) error {
			records, err := client.HMGet(ctx, prefix+"f", part...).Result()
			for i, record := range records {
				if text, ok := record.(string); ok {
					f, bad := readFlow(part[i], text)
					flows, err = append(flows, f), cmp.Or(err, bad)
				}
			}
			return err
		}))
	}
	return flows, err
}

// oldest returns when the oldest tickets of flows began to wait, by flow. The oldest is the first ticket that
// joined at the end, or the first of those in front, which ran before.
func (l *line) oldest(ctx context.Context, flows []flow) (map[string]time.Time, error) {
	oldest := map[string]time.Time{}
	return oldest, l.Read(ctx, func(client redis.UniversalClient, prefix string) error {
		pipe := client.Pipeline()
		first := make([]*redis.StringSliceCmd, 2*len(flows))
		for i, f := range flows {
			from := redis.ZRangeArgs{
				Key: prefix + "f:" + f.name, Start: script.LineZero, Stop: "+inf", ByScore: true, Count: 1,
			}
			first[2*i], first[2*i+1] = pipe.ZRangeArgs(ctx, from), pipe.ZRange(ctx, from.Key, 0, 0)
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		names := []string{"-"}
		for _, ticket := range first {
			names = append(names, ticket.Val()...)
		}
		records, err := client.HMGet(ctx, prefix+"t", names...).Result()
		for i, record := range records {
			text, ok := record.(string)
			if !ok {
				continue
			}
			t, bad := script.ReadTicket(names[i], text)
			since := time.UnixMicro(t.Since)
			if before, known := oldest[t.Flow]; !known || since.Before(before) {
				oldest[t.Flow] = since
			}
			err = cmp.Or(err, bad)
		}
		return err
	})
}

// ticket returns the ticket of a name, its position in its flow from 1, and how many wait there; 0 if it does not
// wait.
func (l *line) ticket(ctx context.Context, name string) (t script.Ticket, position, tickets int64, err error) {
	err = l.Read(ctx, func(client redis.UniversalClient, prefix string) error {
		record, err := client.HGet(ctx, prefix+"t", name).Result()
		if err == nil {
			t, err = script.ReadTicket(name, record)
		}
		if err == nil {
			tickets, err = client.ZCard(ctx, prefix+"f:"+t.Flow).Result()
		}
		if err == nil {
			position, err = client.ZRank(ctx, prefix+"f:"+t.Flow, name).Result()
			position++
		}
		if errors.Is(err, redis.Nil) { // it does not wait, or has just left
			position, err = 0, nil
		}
		return err
	})
	return t, position, tickets, err
}

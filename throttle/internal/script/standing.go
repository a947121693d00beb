package script

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// What lua/line.lua keeps, as it is read without a script. Nothing here depends on how many tickets
// or tenants wait.

// A Standing is the flow of one tenant as it waits, with its attributes, in one queue.
type Standing struct {
	Name    string
	Tickets int64
	Units   map[string]int64 // of all tickets together
	Weight  int64            // in thousandths
	Node    string           // the suffix of the node where it waits
	Rank    string           // that of its first ticket there, of 16 digits
}

func readFlows(names, records []string) ([]Standing, error) {
	flows := make([]Standing, len(names))
	for i, name := range names {
		var err error
		if flows[i], err = readFlow(name, records[i]); err != nil {
			return nil, err
		}
	}
	return flows, nil
}

// readFlow reads "tickets units hour weight tag suffix rank ...".
func readFlow(name, record string) (Standing, error) {
	f := strings.SplitN(record, " ", 8)
	if len(f) < 8 {
		return Standing{}, &ReplyError{fmt.Sprintf("flow %q", name)}
	}
	flow := Standing{Name: name, Units: map[string]int64{}, Node: f[5], Rank: f[6]}
	flow.Tickets, _ = strconv.ParseInt(f[0], 10, 64)
	flow.Weight, _ = strconv.ParseInt(f[3], 10, 64)
	for part := range strings.SplitSeq(f[1], ",") {
		unit, text, _ := strings.Cut(part, "=")
		sum, _, summed := strings.Cut(text, "/")
		n, _ := strconv.ParseInt(sum, 10, 64)
		if !summed { // it is what each costs
			n *= flow.Tickets
		}
		flow.Units[unit] = n
	}
	return flow, nil
}

// FlowPage returns about n of the flows that wait in a line, behind a cursor that begins at 0, and
// the next cursor, 0 at the end. A flow may come twice.
func (r *Runner) FlowPage(ctx context.Context, line string, cursor uint64, n int64) ([]Standing, uint64, error) {
	names, records, next, err := r.page(ctx, Prefix(r.prefix, line)+"f", cursor, n)
	if err != nil {
		return nil, 0, err
	}
	flows, err := readFlows(names, records)
	return flows, next, err
}

// FlowsOf returns those flows of the names that wait.
func (r *Runner) FlowsOf(ctx context.Context, line string, names []string) ([]Standing, error) {
	if len(names) == 0 {
		return nil, nil
	}
	found, err := r.client.HMGet(ctx, Prefix(r.prefix, line)+"f", names...).Result()
	if err != nil {
		return nil, err
	}
	var waiting, records []string
	for i, record := range found {
		if text, ok := record.(string); ok {
			waiting, records = append(waiting, names[i]), append(records, text)
		}
	}
	return readFlows(waiting, records)
}

// FirstRanks returns the ranks of the first tickets of flows, 0 if none waits any more.
func (r *Runner) FirstRanks(ctx context.Context, line string, flows []Standing) ([]int64, error) {
	pipe, prefix := r.client.Pipeline(), Prefix(r.prefix, line)+"f:"
	first := make([]*redis.ZSliceCmd, len(flows))
	for i, f := range flows {
		first[i] = pipe.ZRangeWithScores(ctx, prefix+f.Name, 0, 0)
	}
	if len(flows) > 0 {
		if _, err := pipe.Exec(ctx); err != nil {
			return nil, err
		}
	}
	ranks := make([]int64, len(flows))
	for i, f := range first {
		for _, z := range f.Val() {
			ranks[i] = int64(z.Score)
		}
	}
	return ranks, nil
}

// A Queue is what is known of one queue in a line, for one class of its tickets. Times are
// microseconds.
type Queue struct {
	Name         string // as flows begin with it
	Queue        string
	Batch        bool
	Claims       bool  // of one process, which waits in place
	Asked        int64 // when a server asked for it last
	Tickets      int64
	Weights      int64 // of its flows, in thousandths
	Flows        int64
	Since, Taken int64 // since when servers left tickets that fit, 0 if they do not, and how many they took
}

// Rate returns how many tickets servers took in a second, while slots are what they wait for; 0 if
// they are not, or that is not known yet.
func (q Queue) Rate(now int64) float64 {
	if span := now - q.Since; q.Since > 0 && span >= 1_000_000 && q.Taken >= 10 {
		return float64(q.Taken) / float64(span) * 1e6
	}
	return 0
}

// readQueue reads "asked tickets weights first last with since taken flows".
func readQueue(name, record string) (Queue, bool) {
	f := strings.Fields(record)
	if len(f) < 9 {
		return Queue{}, false
	}
	own, batch := strings.CutSuffix(name, "!")
	q := Queue{Name: name, Queue: Unescape(own), Batch: batch, Claims: strings.HasPrefix(name, "!")}
	for i, to := range map[int]*int64{0: &q.Asked, 1: &q.Tickets, 2: &q.Weights, 6: &q.Since, 7: &q.Taken, 8: &q.Flows} {
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return Queue{}, false
		}
		*to = n
	}
	return q, true
}

// Queues returns what is known of the queues of a line, in any order, with those where nobody waits
// now.
func (r *Runner) Queues(ctx context.Context, line string) ([]Queue, error) {
	records, err := r.client.HGetAll(ctx, Prefix(r.prefix, line)+"z").Result()
	if err != nil {
		return nil, err
	}
	queues := make([]Queue, 0, len(records))
	for name, record := range records {
		q, ok := readQueue(name, record)
		if !ok {
			return nil, &ReplyError{fmt.Sprintf("queue %q", name)}
		}
		queues = append(queues, q)
	}
	return queues, nil
}

// A Ticket is one that waits in a line. Times are microseconds.
type Ticket struct {
	Flow  string
	Costs string
	Key   string
	Rank  int64
}

// Ticket returns the ticket of that name, made by TicketName; false if it does not wait.
func (r *Runner) Ticket(ctx context.Context, line, name string) (Ticket, bool, error) {
	record, err := r.client.HGet(ctx, Prefix(r.prefix, line)+"t", name).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return Ticket{}, false, nil
	case err != nil:
		return Ticket{}, false, err
	}
	t, err := readTicketRecord(name, record)
	return t, err == nil, err
}

// readTicketRecord reads "costs |VALUES key", behind its rank of 7 bytes.
func readTicketRecord(name, record string) (Ticket, error) {
	f := strings.Split(record[min(7, len(record)):], " ")
	if len(f) != 3 {
		return Ticket{}, &ReplyError{fmt.Sprintf("ticket %q", name)}
	}
	queue, _, _ := strings.Cut(name, "/")
	t := Ticket{Flow: queue + f[1], Costs: cmp.Or(f[0], "requests=1"), Key: unfield(f[2])}
	for i := range 7 {
		t.Rank = t.Rank<<8 | int64(record[i])
	}
	return t, nil
}

// A Spot is where a ticket stands.
type Spot struct {
	Before int64    // tickets of its own flow
	Flows  int64    // that go before its own where that waits
	First  []string // of them, the first ones, by name
	There  int64    // tickets that wait in this queue for the scope where the flow waits; 0 if that is not counted
}

// Spot returns where a ticket of a flow stands, with the first n flows before its own. It is zero
// if the ticket or the flow has left.
func (r *Runner) Spot(ctx context.Context, line, ticket string, flow Standing, n int64) (s Spot, err error) {
	prefix, pipe := Prefix(r.prefix, line), r.client.Pipeline()
	queue, _, _ := strings.Cut(flow.Name, "|")
	node := queue + "|" + flow.Node
	behind := pipe.ZRank(ctx, prefix+"f:"+flow.Name, ticket)
	place := pipe.ZRank(ctx, prefix+"n:"+node, flow.Rank+" "+flow.Name)
	first := pipe.ZRange(ctx, prefix+"n:"+node, 0, n-1)
	there := pipe.HGet(ctx, prefix+"u", "n "+node)
	if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return s, err
	}
	s.Before, s.Flows = behind.Val(), place.Val()
	for _, member := range first.Val()[:min(s.Flows, int64(len(first.Val())))] {
		_, name, _ := strings.Cut(member, " ")
		s.First = append(s.First, name)
	}
	tickets, _, _ := strings.Cut(there.Val(), " ")
	s.There, _ = strconv.ParseInt(tickets, 10, 64)
	return s, nil
}

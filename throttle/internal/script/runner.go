package script

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Runner sends calls. Scripts know it by its process ID, and a call by its sequence number, which
// is the same when the call is repeated. It is safe for concurrent use.
type Runner struct {
	// Called, if not nil, is called after each call of a script, which is "decide" or "take", for n
	// requests, or by which n tickets were taken. It is set before the first one.
	Called func(ctx context.Context, line, script string, n int, took time.Duration, err error)

	client  redis.UniversalClient
	cluster cluster // nil if the client is of no Cluster
	now     func() int64
	prefix  string
	process string
}

// NewRunner returns a runner. Prefix is that of the Library. Now returns the time for the scripts
// in microseconds, or 0 for the clock of Redis.
func NewRunner(client redis.UniversalClient, prefix string, now func() int64) *Runner {
	c, _ := client.(cluster)
	return &Runner{client: client, cluster: c, now: now, prefix: prefix, process: NewID()}
}

// Client returns the client that the runner was made with.
func (r *Runner) Client() redis.UniversalClient { return r.client }

// NewID returns 16 random hex digits.
func NewID() string { return fmt.Sprintf("%016x", rand.Uint64()) }

// IsID reports whether an ID has the form of NewID's.
func IsID(id string) bool { return len(id) == 16 && strings.Trim(id, "0123456789abcdef") == "" }

func (r *Runner) decide(
	ctx context.Context, p *Policy, seq int64, requests []Request, args []any,
) (answers []Answer, err error) {
	begun := time.Now()
	reply, err := r.run(ctx, p, p.scripts.decide, append(p.header(r.now(), r.process, seq, len(args)), args...))
	if err == nil {
		answers, err = p.readAnswers(reply, requests)
	}
	r.called(ctx, p, "decide", len(requests), begun, err)
	return answers, err
}

func (r *Runner) called(ctx context.Context, p *Policy, script string, n int, begun time.Time, err error) {
	if r.Called != nil {
		r.Called(ctx, p.Line, script, n, time.Since(begun), err)
	}
}

// take sends one take. Without queues it only acknowledges the take before.
func (r *Runner) take(ctx context.Context, p *Policy, seq int64, q TakeRequest) (Taken, error) {
	queues := q.arguments()
	args := p.header(r.now(), r.process, seq, 4+len(queues))
	args = append(args, q.Max, fmt.Sprintf("%010x", rand.Uint64()>>24), len(queues), q.Strict)
	args = append(args, queues...)
	begun := time.Now()
	var taken Taken
	reply, err := r.run(ctx, p, p.scripts.take, args)
	if err == nil {
		taken, err = p.readTaken(reply)
	}
	r.called(ctx, p, "take", len(taken.Tickets), begun, err)
	return taken, err
}

// Flows calls do for pages of the flows that wait in the policy's line. Some may come twice.
func (r *Runner) Flows(ctx context.Context, policy string, do func(flows []string) error) error {
	return r.pages(ctx, Prefix(r.prefix, policy)+"f", 100, func(flows, _ []string) error { return do(flows) })
}

// A Ticket is one that waits in a line.
type Ticket struct {
	Flow, Costs, Key string
	Since            int64 // when it began to wait (us)
}

// ReadTicket reads "costs |VALUES key", behind its rank of 16 digits, as lua/line.lua keeps it.
func ReadTicket(name, record string) (Ticket, error) {
	digits := record[:min(16, len(record))]
	f := strings.Split(record[len(digits):], " ")
	rank, err := strconv.ParseInt(digits, 10, 64)
	if len(f) != 3 || err != nil {
		return Ticket{}, &ReplyError{fmt.Sprintf("ticket %q", name)}
	}
	queue, _, _ := strings.Cut(name, "/")
	t := Ticket{Flow: queue + f[1], Costs: cmp.Or(f[0], "requests=1")}
	t.Key, t.Since = readKey(f[2], rank)
	return t, nil
}

// Tickets calls do for pages of the tickets in the policy's line, by their queues, IDs and flows,
// without claims. Some may come twice.
func (r *Runner) Tickets(ctx context.Context, policy string, do func(queues, ids, flows []string) error) error {
	return r.pages(ctx, Prefix(r.prefix, policy)+"t", 500, func(names, records []string) error {
		var queues, ids, flows []string
		for i, name := range names {
			t, err := ReadTicket(name, records[i])
			if queue, id, ok := parseTicket(name); ok && err == nil && !strings.HasPrefix(queue, "!") {
				queues, ids, flows = append(queues, queue), append(ids, id), append(flows, t.Flow)
			}
		}
		return do(queues, ids, flows)
	})
}

// CountTickets returns how many tickets are in the policy's line, with claims.
func (r *Runner) CountTickets(ctx context.Context, policy string) (int64, error) {
	return r.client.HLen(ctx, Prefix(r.prefix, policy)+"t").Result()
}

// pages calls do for pages of about n fields of a hash, and their values.
func (r *Runner) pages(ctx context.Context, key string, n int64, do func(fields, values []string) error) error {
	for cursor := uint64(0); ; {
		fields, values, next, err := r.page(ctx, key, cursor, n)
		if err == nil {
			err = do(fields, values)
		}
		if cursor = next; err != nil || cursor == 0 {
			return err
		}
	}
}

// page returns about n fields of a hash behind a cursor, their values, and the next cursor, 0 at
// the end.
func (r *Runner) page(
	ctx context.Context, key string, cursor uint64, n int64,
) (fields, values []string, next uint64, err error) {
	page, next, err := r.client.HScan(ctx, key, cursor, "", n).Result()
	for pair := range slices.Chunk(page, 2) {
		fields, values = append(fields, pair[0]), append(values, pair[1])
	}
	return fields, values, next, err
}

package modeltest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A crowd is the model of a line: which tickets wait where, in plain lists. The algorithms' models have the windows.
type crowd struct {
	t         *rapid.T
	client    *redis.Client
	c         *limitertest.Clock
	p         throttle.Policy
	servers   []*limitertest.Hooked
	m         *model
	flows     map[string][]*standing
	taken     []had               // what was taken and is not given back
	failed    []had               // what was taken to fail, as it never fits
	lost      map[string]lostTake // by ticket: taken by a process that is gone
	seq       int
	asked     int  // servers that ever were
	nested    bool // of two scopes of a request one contains the other
	same      bool // all cost the same
	light     bool // a tenant weighed as little as batches do
	changedAt int64
}

type standing struct {
	id      throttle.Ticket
	request throttle.Request
	rank    int64
}

// A had ticket is what a standing one becomes.
type had struct {
	throttle.TakenTicket
	request throttle.Request
}

type lostTake struct {
	at int64
	standing
}

func (cr *crowd) flow(id throttle.Ticket, r throttle.Request) string {
	values := []string{id.Queue, string(r.Class), r.Tenant}
	for _, w := range cr.p.Windows {
		values = append(values, scopeOf(w, r).String())
	}
	return strings.Join(values, "/")
}

func (cr *crowd) find(id throttle.Ticket) (flow string, i int) {
	for flow, list := range cr.flows {
		if i := slices.IndexFunc(list, func(w *standing) bool { return w.id == id }); i >= 0 {
			return flow, i
		}
	}
	return "", -1
}

func (cr *crowd) remove(id throttle.Ticket) {
	if flow, i := cr.find(id); i >= 0 {
		if cr.flows[flow] = slices.Delete(cr.flows[flow], i, i+1); len(cr.flows[flow]) == 0 {
			delete(cr.flows, flow)
		}
	}
}

func (cr *crowd) insert(w standing) {
	flow := cr.flow(w.id, w.request)
	i, _ := slices.BinarySearchFunc(cr.flows[flow], w.rank, func(w *standing, rank int64) int { return int(w.rank - rank) })
	cr.flows[flow] = slices.Insert(cr.flows[flow], i, &w)
}

// append stands behind all, or behind those in front: of ranks only the order matters.
func (cr *crowd) append(id throttle.Ticket, r throttle.Request) {
	if flow, i := cr.find(id); i >= 0 {
		if flow == cr.flow(id, r) {
			return
		}
		cr.remove(id)
	}
	record := limitertest.ReadLine(cr.t, cr.client).Hashes["t"][id.Queue+"/"+id.ID]
	expect.Require(cr.t, record != "", id, "does not stand in line")
	rank := expect.Got(strconv.ParseInt(record[:16], 10, 64))(cr.t)
	cr.insert(standing{id, r, rank - limitertest.LineZero})
	cr.c.US.Add(1) // no two joins are at the same time
	for _, list := range cr.flows {
		for _, w := range list {
			front := w.request.Front
			expect.Require(cr.t, w.id == id || (rank-limitertest.LineZero > w.rank) == (front || !r.Front),
				id, "the rank", rank-limitertest.LineZero, w.id, "has", w.rank)
		}
	}
}

func (cr *crowd) waiting() (all []*standing) {
	for _, list := range cr.flows {
		all = append(all, list...)
	}
	slices.SortFunc(all, func(a, b *standing) int { return int(a.rank - b.rank) })
	return all
}

// fatal fails the test with all that is kept.
func (cr *crowd) fatal(format string, args ...any) {
	cr.t.Helper()
	var lines []string
	for key, value := range limitertest.Dump(cr.t, cr.client) {
		if !strings.Contains(key, ":k:") && !strings.Contains(key, ":r:") {
			lines = append(lines, fmt.Sprintf("%s %q", strings.TrimPrefix(key, "sluice:{p}:"), value))
		}
	}
	slices.Sort(lines)
	cr.t.Fatalf("%s\n%d %+v\n%s", fmt.Sprintf(format, args...), cr.now(), cr.p.Windows, strings.Join(lines, "\n"))
}

func (cr *crowd) now() int64 { return cr.c.US.Load() }

// grant charges the model, which says that it fits.
func (cr *crowd) grant(r throttle.Reservation, what any) {
	if d := cr.m.reserve(r.Request, r.ID, cr.now()); !d.Granted || !d.At.Equal(r.At) {
		cr.fatal("%v was granted at %v, the model says %s", what, r.At, describe(d))
	}
}

// shares reports whether two requests are counted together anywhere.
func (cr *crowd) shares(a, b throttle.Request) bool {
	return slices.ContainsFunc(cr.p.Windows, func(w throttle.Window) bool { return scopeOf(w, a).String() == scopeOf(w, b).String() })
}

func (cr *crowd) reserve(r throttle.Request) {
	d, err := cr.servers[0].Reserve(cr.t.Context(), r)
	if cr.m.neverFits(r) {
		if !errors.As(err, new(*throttle.RequestError)) {
			cr.fatal("a cost that never fits: %v", err)
		}
		return
	}
	expect.Must(cr.t, err)
	fits := cr.m.peek(r, cr.now())
	if d.Granted {
		// A ticket that waits only for a slot, where no window is shared, holds up no other.
		shared := slices.ContainsFunc(cr.p.Windows, func(w throttle.Window) bool { return w.Shared })
		if flow := cr.flows[cr.flow(r.Ticket, r)]; len(flow) > 0 && flow[0].id != r.Ticket && (shared || !cr.fits(flow[0])) {
			cr.fatal("%v is let in before %v", r.Ticket, flow[0].id)
		}
		cr.grant(d.Reservation, r.Ticket)
		cr.remove(r.Ticket)
		return
	}
	if fits.Granted && !slices.ContainsFunc(cr.waiting(), func(w *standing) bool {
		return w.id != r.Ticket && cr.shares(w.request, r) && (r.Class == throttle.ClassBatch || w.request.Class != throttle.ClassBatch)
	}) {
		cr.fatal("%v is denied for %v, fits, and nobody waits beside it", r.Ticket, d.RetryIn)
	}
	noBound := fits.Granted && d.Latest == 0 // it waits for slots of others
	if d.RetryIn < fits.RetryIn || d.Latest < d.RetryIn && !noBound {
		cr.fatal("%v is denied for %v to %v, it fits in %v", r.Ticket, d.RetryIn, d.Latest, fits.RetryIn)
	}
	if d.Queued != (r.Ticket != throttle.Ticket{}) {
		cr.fatal("%v is queued: %v", r.Ticket, d.Queued)
	} else if d.Queued {
		cr.append(r.Ticket, r)
	}
}

func (cr *crowd) join(r throttle.Request, maxWait time.Duration, backlog int) {
	stands := func() string {
		st := limitertest.ReadLine(cr.t, cr.client)
		for queue, record := range st.Hashes["z"] { // forgets queues in which nobody waits, too
			if strings.Fields(record)[1] == "0" {
				delete(st.Sets, "d:"+queue)
			}
		}
		delete(st.Hashes, "z")
		return fmt.Sprint(st.Hashes, st.Sets)
	}
	before, known := stands(), false
	if _, i := cr.find(r.Ticket); i >= 0 {
		known = true
	}
	r.MaxWait, r.Backlog, r.Key = maxWait, backlog, "key/"+r.Ticket.ID
	decisions, err := cr.servers[0].Line("p").Join(cr.t.Context(), []throttle.Request{r})
	expect.Must(cr.t, err)
	var late *throttle.DeniedError
	switch err := decisions[0].Err; {
	case err == nil:
		if n := len(cr.flows[cr.flow(r.Ticket, r)]); backlog > 0 && n >= backlog && !known {
			cr.fatal("%v joined %d others", r.Ticket, n)
		}
		cr.append(r.Ticket, r)
	case errors.As(err, &late) && (maxWait > 0 && errors.Is(err, context.DeadlineExceeded) || backlog > 0 && late.Cause.Error() == fmt.Sprint(backlog, " wait already")):
		if after := stands(); after != before && !known {
			cr.fatal("a refusal made\n%s\nof\n%s", after, before)
		} else if known {
			cr.remove(r.Ticket) // it had been in another flow
		}
	case !errors.As(err, new(*throttle.RequestError)) || !cr.m.neverFits(r):
		cr.t.Fatal(err)
	}
}

// lostAreBack puts in line what was put back in a take.
func (cr *crowd) lostAreBack() {
	for id, lost := range cr.lost {
		if cr.now() >= lost.at+(5*s).Microseconds() {
			delete(cr.lost, id)
			if _, i := cr.find(lost.id); i < 0 {
				cr.insert(lost.standing)
			}
		}
	}
}

// acknowledge lets the servers that are alive acknowledge their takes. A call that does so puts back what is lost.
func (cr *crowd) acknowledge() {
	for _, server := range cr.servers {
		expect.Must(cr.t, server.Line("p").Acknowledge(cr.t.Context()))
	}
	tickets := limitertest.ReadLine(cr.t, cr.client).Hashes["t"]
	for _, lost := range cr.lost {
		if tickets[lost.id.Queue+"/"+lost.id.ID] != "" {
			cr.lostAreBack()
			return
		}
	}
}

func (cr *crowd) pass(d time.Duration) {
	cr.acknowledge()
	cr.c.US.Add(d.Microseconds())
}

// take takes once, and checks what it got.
func (cr *crowd) take(server *limitertest.Hooked, most int, queues ...string) throttle.Taken {
	taken, err := server.Line("p").Take(cr.t.Context(), throttle.TakeOptions{Queues: limitertest.Queues(queues...), Max: most})
	expect.Must(cr.t, err)
	cr.lostAreBack()
	for _, ticket := range taken.Tickets {
		flow, i := cr.find(ticket.Ticket)
		if i != 0 {
			cr.fatal("%v is taken as number %d of its flow", ticket.Ticket, i+1)
		}
		w := cr.flows[flow][0]
		if w.rank != ticket.Rank-limitertest.LineZero || ticket.NeverFits != cr.m.neverFits(w.request) || !slices.Contains(queues, ticket.Queue) {
			cr.fatal("taken is %+v, the model has %+v", ticket, w)
		}
		cr.remove(ticket.Ticket)
		if ticket.NeverFits {
			cr.failed = append(cr.failed, had{ticket, w.request})
		} else {
			cr.grant(ticket.Decision.Reservation, ticket.Ticket)
			cr.taken = append(cr.taken, had{ticket, w.request})
		}
	}
	if len(taken.Tickets) > most {
		cr.fatal("%d are taken of %d", len(taken.Tickets), most)
	}
	waits := slices.ContainsFunc(cr.waiting(), func(w *standing) bool { return slices.Contains(queues, w.id.Queue) })
	if waits != (taken.Next >= 0) || taken.Next > 2*s {
		cr.fatal("some wait: %v, ask again in %v", waits, taken.Next)
	}
	if taken.Next != 0 {
		cr.conserves(taken.Next, queues)
	}
	if i := slices.IndexFunc(taken.Tickets, func(t throttle.TakenTicket) bool { return t.Decision.Reservation.Class == throttle.ClassBatch }); i >= 0 && cr.same && !cr.light && !cr.justChanged() {
		for _, w := range cr.waiting() {
			if flow, first := cr.find(w.id); first == 0 && w.request.Class != throttle.ClassBatch && slices.Contains(queues, w.id.Queue) && cr.fits(w) && !cr.afterOthers(w, queues) {
				cr.fatal("%v of a batch is taken, and %v fits, the first of %q", taken.Tickets[i].Ticket, w.id, flow)
			}
		}
	}
	return taken
}

// afterOthers reports whether it may be the turn of a queue of another server.
func (cr *crowd) afterOthers(w *standing, queues []string) bool {
	asks := cr.asks()
	return slices.ContainsFunc(cr.waiting(), func(g *standing) bool {
		return !slices.Contains(queues, g.id.Queue) && cr.shares(g.request, w.request) && asks[g.id.Queue]
	})
}

// fits says of a ticket that never does that it does: it is handed out.
func (cr *crowd) fits(w *standing) bool {
	return cr.m.neverFits(w.request) || cr.m.peek(w.request, cr.now()).Granted
}

// asks tells which queues a server is about to ask for, or asked for lately: room is left to them, and a
// ticket of the same server that had to wait for theirs looks again within a second.
func (cr *crowd) asks() map[string]bool {
	asks := map[string]bool{}
	for queue, record := range limitertest.ReadLine(cr.t, cr.client).Hashes["z"] {
		var asked, n, weights, first, last int64
		expect.Must(cr.t, expect.ErrOf(fmt.Sscan(record, &asked, &n, &weights, &first, &last)))
		queue = strings.TrimSuffix(queue, "!") // of either class
		asks[queue] = asks[queue] || last > cr.now()-leftFor.Microseconds() || asked > cr.now()-s.Microseconds()
	}
	return asks
}

// justChanged reports whether nodes may not have been looked at since limits changed: that is done once a second.
func (cr *crowd) justChanged() bool { return cr.now() < cr.changedAt+s.Microseconds() }

const (
	spacing = 7 * ms  // of the servers' appointments
	leftFor = 20 * ms // is room to others
)

// conserves fails if a ticket fits that was not taken, or fits before the line is asked again.
func (cr *crowd) conserves(next time.Duration, queues []string) {
	if cr.justChanged() {
		return
	}
	for _, list := range cr.flows {
		w := list[0]
		if !slices.Contains(queues, w.id.Queue) || w.request.Class == throttle.ClassBatch || cr.afterOthers(w, queues) {
			continue // a batch has its pace
		}
		// Each other server may have an appointment before. Room is left for a while to a side that had its turn,
		// also if its ticket went on to another scope.
		most := leftFor + time.Duration(cr.asked)*spacing
		if exact := cr.same; exact {
			if cr.m.neverFits(w.request) {
				cr.fatal("%v never fits, and was not handed out", w.id)
			}
			if d := cr.m.peek(w.request, cr.now()); next-d.RetryIn > most {
				cr.fatal("%v fits in %v, and the line is asked in %v", w.id, d.RetryIn, next)
			}
		} else if next > most && cr.fits(w) && !slices.ContainsFunc(cr.waiting(), func(g *standing) bool {
			return g != w && slices.Contains(queues, g.id.Queue) && cr.shares(g.request, w.request) && !cr.fits(g)
		}) { // none passes a larger one of the same server
			cr.fatal("%v fits, and is asked for in %v", w.id, next)
		}
	}
}

// takeAll takes until the line says to wait.
func (cr *crowd) takeAll(queues ...string) (next time.Duration) {
	for n := 0; ; n++ {
		if taken := cr.take(cr.servers[0], throttle.MaxTake, queues...); taken.Next != 0 {
			return taken.Next
		} else if n > 50 {
			cr.t.Fatal("takes without end")
		}
	}
}

func (cr *crowd) set() {
	for _, server := range cr.servers {
		expect.Must(cr.t, server.SetPolicies([]throttle.Policy{cr.p}))
		expect.Must(cr.t, server.Refresh(cr.t.Context(), "p"))
	}
}

func (cr *crowd) newServer() *limitertest.Hooked {
	cr.asked++
	l := limitertest.NewEdited(cr.t, cr.client, cr.c, []func(string) string{limitertest.WithoutShortExpiry}, cr.p)
	expect.Must(cr.t, l.Refresh(cr.t.Context(), "p"))
	return l
}

func (cr *crowd) agree() {
	if faults := limitertest.ReadLine(cr.t, cr.client).Faults(true); len(faults) > 0 {
		cr.fatal("the line does not agree:\n%s", strings.Join(faults, "\n"))
	}
}

// drain lets everybody through. Tickets that stay were lost.
func (cr *crowd) drain() {
	for turn := 0; len(cr.flows)+len(cr.lost) > 0; turn++ {
		next := cr.takeAll("q1", "q2")
		if turn > 3000 {
			cr.fatal("%d wait for ever", len(cr.waiting()))
		}
		if next < 0 {
			next = s // for those whose process was lost
		}
		cr.pass(next)
	}
	cr.agree()
	limitertest.IsGone(cr.t, cr.client)
}

package linetest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func ids(taken throttle.Taken) string {
	var ids []string
	for _, ticket := range taken.Tickets {
		ids = append(ids, ticket.ID)
	}
	return strings.Join(ids, " ")
}

func TestJoinAnswersForEachTicket(t *testing.T) {
	p := policy(throttle.Window{Name: "own", Limit: 2, Period: 10 * s}, sharedWindow(5, 10*s))
	p.Tenants = map[string]throttle.Tenant{"x": {Exempt: true}, "b": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, p)
		sc.granted("a0", "a1")
		ticket := func(id string, change func(*throttle.Ticket)) throttle.Ticket {
			ticket := throttle.Ticket{TicketID: ticketID(id), Request: sc.of(id), Key: "key of " + id}
			if change != nil {
				change(&ticket)
			}
			return ticket
		}
		cost := func(n int64) func(*throttle.Ticket) {
			return func(t *throttle.Ticket) { t.Request.Cost = map[string]int64{"requests": n} }
		}
		now := time.Now()
		soon := now.Add(20*s - us)
		tickets := []throttle.Ticket{
			ticket("a2", nil),
			ticket("a9", func(t *throttle.Ticket) { t.TicketID.ID = "" }),
			ticket("a3", cost(3)),
			ticket("x1", nil),
			ticket("b1", cost(2)),
			ticket("a4", func(t *throttle.Ticket) { t.MaxWait = 10*s - us }),
			ticket("a4", func(t *throttle.Ticket) { t.MaxWait = 10 * s }),
			ticket("a5", func(t *throttle.Ticket) { t.Backlog = 2 }),
			ticket("a5", func(t *throttle.Ticket) { t.Backlog = 3 }),
			ticket("a6", func(t *throttle.Ticket) { t.Deadline = soon }),
			ticket("a6", func(t *throttle.Ticket) { t.Deadline = now }),
			ticket("a2", nil),
			ticket("a7", func(t *throttle.Ticket) { t.Key = strings.Repeat("k", 65) }),
			ticket("c1", func(t *throttle.Ticket) { t.Request.Attributes = map[string]string{"unused": "x"} }),
		}
		places, err := sc.l.Line("p").Join(t.Context(), tickets)
		if err != nil || len(places) != len(tickets) {
			t.Fatalf("%d places, %v", len(places), err)
		}
		for i, want := range []string{
			"10s", `throttle: policy "p": ticket "": must have an ID`,
			`throttle: policy "p", window "own": cost of 3 requests never fits: the window holds 2 at most`, "exempt",
			`throttle: policy "p", window "own": cost of 2 requests never fits: the window holds 1 at most`,
			`throttled: p, tenant a, 10s: may wait for 10s, longer than 9.999999s`, "10s",
			`throttle: policy "p": tenant a has 2 waiting already`, "20s",
			`throttled: p, tenant a, 20s: too late for ` + soon.String(),
			`throttled: p, tenant a, 20s: too late for ` + now.String(), "10s again",
			`throttle: policy "p": key "` + strings.Repeat("k", 64) + `...": must be at most 64 bytes`, "0s",
		} {
			got := places[i].StartsIn.String()
			var late *throttle.TooLateError
			switch p := places[i]; {
			case errors.As(p.Err, &late) && !late.Deadline.IsZero():
				got = late.Decision.Reason() + ": too late for " + late.Deadline.String()
				if wait := late.StartsAt.Sub(now); wait < 20*s || wait > 1*m {
					t.Errorf("ticket %d would start in %v", i, wait)
				}
			case p.Err != nil:
				got = p.Err.Error()
			case p.Exempt:
				got = "exempt"
			case p.AlreadyQueued:
				got += " again"
			}
			if got != want {
				t.Errorf("ticket %d: %s, want %s", i, got, want)
			}
			if places[i].StartsInMost < places[i].StartsIn {
				t.Errorf("ticket %d starts in %v at least and %v at most", i, places[i].StartsIn, places[i].StartsInMost)
			}
		}
		var refused *throttle.TooLateError
		if !errors.As(places[5].Err, &refused) || refused.MaxWait != 10*s-us || !refused.Deadline.IsZero() || !errors.Is(refused, context.DeadlineExceeded) || refused.Decision.RetryInMost != 10*s {
			t.Errorf("%+v", refused)
		}
		if got := ids(take(t, sc.l, 64, "q")); got != "c1" {
			t.Errorf("took %s", got)
		}
		sc.at(10*s).takes("a2", "a4")
		sc.at(20 * s).takes("a5")
		if key := sc.took["a5"].Key; key != "key of a5" {
			t.Errorf("key %q", key)
		}
		if _, err := sc.l.Line("q").Join(t.Context(), tickets); !errors.Is(err, throttle.ErrUnknownPolicy) {
			t.Error(err)
		}
	})
}

func TestJoinOfHundreds(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, policy(sharedWindow(50, 10*s)))
		var tickets []throttle.Ticket
		for i := range 300 {
			id := fmt.Sprint("a", i)
			tickets = append(tickets, throttle.Ticket{TicketID: ticketID(id), Request: sc.of(id)})
		}
		places, err := sc.l.Line("p").Join(t.Context(), tickets)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range places {
			if want := time.Duration(i/50) * 10 * s; p.Err != nil || p.StartsIn != want || p.StartsInMost != want {
				t.Fatalf("ticket %d: %+v, want %v", i, p, want)
			}
		}
		if !places[0].Nudge || places[1].Nudge {
			t.Errorf("nudges %v, %v: one is to be woken", places[0].Nudge, places[1].Nudge)
		}
		var got []string
		for i := range 6 {
			sc.at(time.Duration(i) * 10 * s)
			for {
				taken := take(t, sc.l, 20, "q")
				for _, ticket := range taken.Tickets {
					got = append(got, ticket.ID)
				}
				if taken.Next != 0 {
					break
				}
			}
			if len(got) != (i+1)*50 {
				t.Fatalf("after %d periods %d are taken", i+1, len(got))
			}
		}
		if !slices.IsSortedFunc(got, func(a, b string) int { return len(a)*1000 - len(b)*1000 + strings.Compare(a, b) }) {
			t.Errorf("not in order: %q", got)
		}
	})
}

// The reply of a take is lost, again and again: its tickets come with the next one, and are charged
// once.
func TestATakeWhoseReplyIsLost(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := newProxy(t, client.Options().Addr)
		through := redis.NewClient(&redis.Options{Addr: p.Addr, MaxRetries: -1})
		defer through.Close()
		l := newLimiter(t, through, policy(sharedWindow(4, h)))
		take(t, l, 0, "q") // loads the script
		var tickets []throttle.Ticket
		for i, queue := range []string{"q", "q", "other", "q"} {
			tickets = append(tickets, throttle.Ticket{TicketID: throttle.TicketID{Queue: queue, ID: fmt.Sprint(i)}, Request: acme(1)})
		}
		if _, err := l.Line("p").Join(t.Context(), tickets); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			p.Lose.Store(1)
			if taken, err := l.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: []string{"other", "q"}, Max: 3}); !errors.Is(err, throttle.ErrUnavailable) {
				t.Fatalf("%+v, %v", taken, err)
			}
			if err := l.Line("p").Acknowledge(t.Context()); err != nil { // nobody knows of what
				t.Fatal(err)
			}
		}
		// The next one asks for a queue less: what it did not ask for goes back.
		if got := ids(take(t, l, 64, "q")); got != "0 1" {
			t.Errorf("took %s", got)
		}
		plain := newLimiter(t, client, l.Policies()...)
		if d := peek(t, plain, acme(1)); d.Windows[0].Used != 2 {
			t.Errorf("%d are counted", d.Windows[0].Used)
		}
		if got := ids(take(t, l, 64, "other", "q")); got != "2 3" {
			t.Errorf("took %s", got)
		}
		if d := peek(t, plain, acme(1)); d.Windows[0].Used != 4 {
			t.Errorf("%d are counted", d.Windows[0].Used)
		}
	})
}

func TestATakeThatNobodyAcknowledges(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, policy(sharedWindow(2, 10*s)))
		other := newBy(t, client, sc.c, policy(sharedWindow(2, 10*s)))
		sc.joins("a1", "a2", "a3", "a4", "a5", "a6")
		sc.takes("a1", "a2") // and the process is gone
		if got := ids(take(t, other, 64, "q")); got != "" {
			t.Errorf("took %s", got)
		}
		sc.at(10 * s)
		if got := ids(take(t, other, 64, "q")); got != "a1 a2" { // at their ranks; the units of the first take have been spent
			t.Errorf("took %s", got)
		}
		sc.at(14 * s)
		if err := other.Line("p").Acknowledge(t.Context()); err != nil {
			t.Fatal(err)
		}
		sc.at(20*s).takes("a3", "a4")
	})
}

// The reply to a put-back is lost. Its caller repeats it after the ticket was taken again, or had
// been refunded: that changes nothing.
func TestLatePutBackIsIgnored(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, policy(sharedWindow(3, 10*s)))
		sc.joins("a1", "a2", "a3")
		sc.takes("a1", "a2", "a3")
		first := sc.took["a1"]
		sc.at(1 * s).putBack("a1").takes("a1")
		check := func(want int64) {
			t.Helper()
			if err := sc.l.Line("p").PutBack(t.Context(), []throttle.TakenTicket{first}); err != nil {
				t.Fatal(err)
			}
			if d := peek(t, sc.l, acme(1)); !slices.Equal(used(d), []int64{want}) {
				t.Errorf("used %v, want %d", used(d), want)
			}
			sc.takes()
		}
		check(3)
		if err := sc.l.Line("p").Refund(t.Context(), []throttle.TakenTicket{sc.took["a1"]}); err != nil {
			t.Fatal(err)
		}
		check(2)
		first = sc.took["a1"]
		check(2)
	})
}

// The reply to a ReserveAgain is lost, and its caller gives the ticket's units back. Those of
// another ticket of the same take stay.
func TestRefundAfterReserveAgainGivesBackNothing(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		for _, limit := range []int64{2, 1} { // granted, and denied after a cut
			sc := newScene(t, client, policy(sharedWindow(2, 10*s)))
			sc.at(0).joins("a1", "a2")
			sc.takes("a1", "a2")
			sc.at(1 * s).set(policy(sharedWindow(limit, 10*s)))
			d, err := sc.l.Line("p").ReserveAgain(t.Context(), sc.took["a1"], sc.of("a1"))
			if err != nil || d.Granted != (limit == 2) {
				t.Fatalf("granted %v, %v", d.Granted, err)
			}
			for range 2 {
				if err := sc.l.Line("p").Refund(t.Context(), []throttle.TakenTicket{sc.took["a1"]}); err != nil {
					t.Fatal(err)
				}
			}
			if d := peek(t, sc.l, acme(1)); !slices.Equal(used(d), []int64{limit}) {
				t.Errorf("used %v, want %d", used(d), limit)
			}
			if d.Granted {
				cancel(t, sc.l, d.Reservation)
				if d := peek(t, sc.l, acme(1)); !slices.Equal(used(d), []int64{1}) {
					t.Errorf("used %v after its own cancel", used(d))
				}
				cancel(t, sc.l, sc.took["a2"].Decision.Reservation)
			}
		}
	})
}

func TestPutBackAndGiveBack(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, policy(sharedWindow(3, 10*s), slots(3)))
		sc.joins("a1", "a2", "a3", "a4", "a5")
		sc.takes("a1", "a2", "a3")
		sc.putBack("a2", "a1", "a2")
		if d := peek(t, sc.l, acme(1)); !slices.Equal(used(d), []int64{1, 1}) {
			t.Errorf("used %v", used(d))
		}
		sc.takes("a1", "a2")
		give := []throttle.TakenTicket{sc.took["a3"], sc.took["a1"]}
		for range 2 {
			if err := sc.l.Line("p").Refund(t.Context(), give); err != nil {
				t.Fatal(err)
			}
			if d := peek(t, sc.l, acme(1)); !slices.Equal(used(d), []int64{1, 1}) {
				t.Errorf("used %v", used(d))
			}
		}
		sc.takes("a4", "a5")
		w := sc.took["a5"].Decision.Windows
		if len(w) != 2 || w[0].Used != 3 || w[0].Remaining != 0 || w[0].Limit != 3 || w[1].Used != 3 || w[1].Name != "slots" {
			t.Errorf("%+v", w)
		}
		// A decision of a take is one like any other.
		r := sc.took["a5"].Decision.Reservation
		if held, err := r.Renew(t.Context()); !held || err != nil {
			t.Errorf("held %v, %v", held, err)
		}
		if d := cancel(t, sc.l, r); !d.Granted || !slices.Equal(used(d), []int64{2, 2}) {
			t.Errorf("%+v", d)
		}
	})
}

func TestReserveAgain(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, policy(sharedWindow(2, 10*s), slots(9)))
		sc.joins("a1", "a2", "a3")
		sc.takes("a1", "a2")
		sc.at(1 * s)
		again := func(ticket string, r throttle.Request) throttle.Decision {
			d, err := sc.l.Line("p").ReserveAgain(t.Context(), sc.took[ticket], r)
			if err != nil {
				t.Fatal(err)
			}
			return d
		}
		d := again("a1", sc.of("a1")) // although a3 waits
		if !d.Granted || !d.At.Equal(at(1*s)) || d.Reservation.ID != sc.took["a1"].Decision.Reservation.ID || !slices.Equal(used(d), []int64{2, 2}) {
			t.Errorf("%+v", d)
		}
		sc.cost = 2
		if d := again("a2", sc.of("a2")); d.Granted || !d.Queued || !slices.Equal(used(d), []int64{1, 1}) {
			t.Errorf("who costs more than was taken: %+v", d)
		}
		sc.cost = 1
		sc.takes("a3") // the unit that a2 gave back
		if !sc.l.Line("p").Matches(sc.took["a3"], sc.of("a3")) || sc.l.Line("p").Matches(sc.took["a3"], sc.of("b3")) || sc.l.Line("p").Matches(sc.took["a3"], acme(1)) {
			t.Error("Same")
		}
		other := sc.of("a3")
		other.Policy = "other"
		if sc.l.Line("p").Matches(sc.took["a3"], other) {
			t.Error("another policy is the same")
		}
	})
}

// What is removed goes on being taken from until its line is empty.
func TestRemovedPolicies(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		keep := throttle.Policy{Name: "keep", Windows: []throttle.Window{{Name: "w", Limit: 1, Period: s}}}
		sc := newScene(t, client, policy(sharedWindow(1, 10*s)))
		d := sc.granted("a1")
		sc.waits("a2", "a3")
		check := func(want ...string) {
			t.Helper()
			if got := sc.l.Lines(); !slices.Equal(got, want) {
				t.Errorf("take from %q, want %q", got, want)
			}
		}
		check("p")
		sc.set(keep)
		check("keep", "p")
		if _, err := sc.l.Reserve(t.Context(), sc.of("a4")); !errors.Is(err, throttle.ErrUnknownPolicy) {
			t.Error(err)
		}
		if d := cancel(t, sc.l, d.Reservation); !d.Granted {
			t.Errorf("%+v", d)
		}
		sc.takes("a2")
		sc.putBack("a2")
		sc.takes("a2")
		sc.at(5 * s).takes()
		check("keep", "p")
		if next := take(t, sc.l, 1, "another").Next; next >= 0 {
			t.Errorf("next %v", next)
		}
		check("keep", "p") // somebody waits elsewhere
		sc.at(10 * s).takes("a3").takes()
		check("keep")
		sc.set(policy(sharedWindow(1, 10*s)))
		check("p", "keep")
		sc.at(20 * s).granted("a5")
	})
}

// What a policy says of tenants holds for those who wait already.
func TestTenantsOfThoseWhoWait(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := policy(throttle.Window{Name: "own", Limit: 5, Period: 10 * s}, sharedWindow(100, 10*s))
		p.Tenants = map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: 1}}}}
		sc := newScene(t, client, p)
		sc.granted("a0")
		sc.waits("a1", "a2", "a3", "a4")
		sc.takes()
		p.Tenants = map[string]throttle.Tenant{"a": {Weight: 7, Windows: map[string]throttle.Override{"own": {Limit: 3}}}}
		sc.set(p)
		var got []string
		for end := time.Now().Add(10 * time.Second); len(got) < 2 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			sc.c.US.Add(1) // the refresh is in the background, and what it changes is due at its time
			for _, ticket := range take(t, sc.l, 64, "q").Tickets {
				got = append(got, ticket.ID)
				if w := ticket.Decision.Windows[0]; w.Limit != 3 {
					t.Errorf("%+v", w)
				}
			}
		}
		if !slices.Equal(got, []string{"a1", "a2"}) {
			t.Errorf("took %q", got)
		}
		if record := client.HGet(t.Context(), "sluice:{p}:f", "q|a").Val(); !strings.Contains(record, " 7000 a ") {
			t.Errorf("the weight is not written: %q", record)
		}
	})
}

// Whatever a limiter hands out is the caller's to change.
func TestNothingThatIsHandedOutIsLive(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := throttle.Policy{
			Name: "p", Match: []string{"http:*"}, Windows: []throttle.Window{{Name: "w", Limit: 5, Period: m, Scope: throttle.Per("tenant", "user")}},
			Tenants: map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"w": {Limit: 2}}}},
		}
		l := newLimiter(t, client, p)
		want := l.Policies()
		for _, got := range []throttle.Policy{l.Policies()[0], p} {
			got.Match[0], got.Windows[0].Limit, got.Windows[0].Scope.Attributes()[0] = "other", 1, "other"
			got.Tenants["a"].Windows["w"] = throttle.Override{Limit: 1}
			got.Tenants["b"] = throttle.Tenant{}
		}
		r := throttle.Request{Policy: "p", Tenant: "a", Attributes: map[string]string{"user": "bob"}}
		d := reserve(t, l, r)
		d.Windows[0].Scope.Attributes[0], d.Windows[0].Scope.Values[0] = "other", "other"
		_ = append(d.Windows[0].Scope.Attributes, "more")
		if d := reserve(t, l, r); d.Windows[0].Scope.String() != "tenant=a,user=bob" || d.Windows[0].Limit != 2 {
			t.Errorf("%+v", d.Windows)
		}
		if got := l.Policies(); !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
		if info, ok := l.Match("http:get"); !ok || info != (throttle.PolicyInfo{MaxPause: h, Name: "p", Fail: throttle.FailClosed, Requeue: throttle.RequeueWhenFits}) {
			t.Errorf("%+v", info)
		}
		if _, ok := l.Match("smtp"); ok {
			t.Error("matched")
		}
		if _, ok := l.Lookup("q"); ok {
			t.Error("found")
		}
	})
}

// counts notes how many scripts ran.
type counts struct {
	twice
	n atomic.Int64
}

func (c *counts) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if isScript(cmd) {
			c.n.Add(1)
			time.Sleep(time.Millisecond) // somebody else comes meanwhile
		}
		return next(ctx, cmd)
	}
}

// Many who ask at once share calls to Redis, each with a context and an error of its own.
func TestManyAskAtOnce(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		counted := &counts{}
		client.AddHook(counted)
		l := newLimiter(t, client, policy(sharedWindow(300, h)))
		peek(t, l, acme(1))
		client.Set(t.Context(), "sluice:{p}:w:tenant:broken", "what is this", 0)
		p := policy(sharedWindow(300, h), throttle.Window{Name: "own", Limit: 1000, Period: h})
		if err := l.SetPolicies([]throttle.Policy{p}); err != nil {
			t.Fatal(err)
		}
		counted.n.Store(0)
		var granted, gone, broken, never atomic.Int64
		var callers sync.WaitGroup
		for i := range 400 {
			callers.Go(func() {
				ctx, r := t.Context(), acme(1)
				switch i % 8 {
				case 1:
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*10*us)
					defer cancel()
				case 2:
					r.Tenant = "broken"
				case 3:
					r = acme(301)
				}
				d, err := l.Reserve(ctx, r)
				switch {
				case err == nil && d.Granted:
					granted.Add(1)
				case errors.Is(err, context.DeadlineExceeded) && i%8 == 1:
					gone.Add(1)
				case errors.Is(err, throttle.ErrState) && i%8 == 2:
					broken.Add(1)
				case errors.As(err, new(*throttle.NeverFitsError)) && i%8 == 3:
					never.Add(1)
				default:
					t.Errorf("caller %d: %+v, %v", i, d, err)
				}
			})
		}
		callers.Wait()
		reserve(t, l, acme(1)) // behind what was cancelled for those who had gone
		if n := peek(t, l, acme(1)).Windows[0].Used; n != granted.Load()+1 {
			t.Errorf("%d are counted, %d were granted", n, granted.Load()+1)
		}
		if granted.Load()+gone.Load() != 300 || broken.Load() != 50 || never.Load() != 50 {
			t.Errorf("%d granted, %d gone, %d broken, %d never fit", granted.Load(), gone.Load(), broken.Load(), never.Load())
		}
		if n := counted.n.Load(); n > 100 {
			t.Errorf("400 callers took %d calls", n)
		}
	})
}

package linetest

import (
	"container/heap"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// server is another process by the same clock.
func (sc *scene) server() *throttle.Limiter {
	sc.t.Helper()
	return limitertest.NewBy(sc.t, sc.client, sc.c, sc.l.Policies()...)
}

func (sc *scene) joinIn(queue string, tickets ...string) (last throttle.Place) {
	sc.t.Helper()
	for _, ticket := range tickets {
		r := sc.of(ticket)
		r.Ticket.Queue = queue
		last = limitertest.Join(sc.t, sc.l, r)
	}
	return last
}

func TestQueuesShareALine(t *testing.T) {
	t.Parallel()
	two := limitertest.Policy(limitertest.SharedWindow(2, 10*s))
	plays(t, map[string]play{
		"of one server, by strict priority": {two, func(sc *scene) {
			sc.joinIn("low", "a1", "a2", "a3")
			sc.joinIn("high", "b1", "b2", "b3")
			for i, want := range []string{"b1 b2", "b3 a1", "a2 a3"} {
				sc.at(steps(i) * 10 * s)
				taken, err := sc.l.Line("p").Take(sc.t.Context(), throttle.TakeOptions{
					Queues: map[string]int{"high": 2, "low": 1}, Strict: true, Max: throttle.MaxTake,
				})
				if got := ids(taken); got != want || err != nil {
					sc.t.Errorf("took %q, %v, want %q", got, err, want)
				}
			}
		}},
		"are told of alone": {two, func(sc *scene) {
			sc.joinIn("one", "a1", "a2", "a3")
			if next := limitertest.Take(sc.t, sc.l, 64, "other").Next; next >= 0 {
				sc.t.Errorf("ask the other queue again in %v", next)
			}
			limitertest.Take(sc.t, sc.l, 64, "one")
			if next := limitertest.Take(sc.t, sc.l, 64, "other", "one").Next; next <= 0 {
				sc.t.Errorf("ask again in %v", next)
			}
		}},
		"share the windows": {two, func(sc *scene) {
			sc.joinIn("one", "a1", "a2", "a3")
			if p := sc.joinIn("two", "b1", "b2"); p.Expected != 10*s {
				sc.t.Errorf("%+v", p)
			}
			limitertest.Take(sc.t, sc.l, 1, "one")
			if got := ids(limitertest.Take(sc.t, sc.l, 64, "two")); got != "b1" {
				sc.t.Errorf("took %q", got)
			}
		}},
		"whose server is gone hold up nobody after a minute": {two, func(sc *scene) {
			sc.joinIn("dead", "a1", "a2", "a3", "a4")
			if d := limitertest.Reserve(sc.t, sc.l, sc.without("b")); d.Granted {
				sc.t.Error("granted before those that wait")
			}
			sc.at(50 * s)
			limitertest.Take(sc.t, sc.server(), 0, "dead") // asks once more
			sc.at(110*s - us)
			if d := limitertest.Reserve(sc.t, sc.l, sc.without("b")); d.Granted {
				sc.t.Error("let in before those whose server asked 60 s ago")
			}
			sc.at(110 * s)
			if p := sc.joinIn("live", "c1"); p.Expected != 0 {
				sc.t.Errorf("%+v", p)
			}
			if got := ids(limitertest.Take(sc.t, sc.l, 64, "live")); got != "c1" {
				sc.t.Errorf("took %q", got)
			}
			if d := limitertest.Reserve(sc.t, sc.l, sc.without("b")); !d.Granted {
				sc.t.Errorf("denied for %v", d.RetryIn)
			}
			if p := sc.joinIn("live", "c2"); p.Expected != 10*s {
				sc.t.Errorf("%+v", p)
			}
			sc.at(120 * s)
			if got := ids(limitertest.Take(sc.t, sc.l, 64, "dead")); got != "a1 a2" { // it lives again
				sc.t.Errorf("took %q", got)
			}
			if d := limitertest.Reserve(sc.t, sc.l, sc.without("b")); d.Granted {
				sc.t.Error("granted before those that wait")
			}
		}},
	})
}

const spacing = 7 * ms // of appointments

// Up to 285 idle servers together ask the line every 7 ms, and again after a take that got all that
// it asked for. A ticket that is due is taken at the next of these times. However many servers there
// are, each asks within two seconds.
func TestAppointments(t *testing.T) {
	t.Parallel()
	client := throttletest.Client(t, throttletest.Redis(t))
	const again = 500 * us
	for _, servers := range []int{1, 7, 250, 400} {
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(1, 100*ms)))
		const tickets = 20
		for i := range tickets {
			sc.joins(fmt.Sprint("a", i))
		}
		var asks moments
		now, seq := time.Duration(0), 0
		ask := func(l *throttle.Limiter) {}
		at := func(d time.Duration, l *throttle.Limiter) {
			seq++
			heap.Push(&asks, moment{d, seq, func() { ask(l) }})
		}
		perSecond, late := map[int]int{}, []time.Duration{}
		ask = func(l *throttle.Limiter) {
			taken := limitertest.Take(t, l, 1, "q")
			perSecond[int(now/s)]++
			for range taken.Tickets {
				late = append(late, now-steps(len(late))*100*ms)
			}
			if taken.Next > 2*s {
				t.Errorf("%d servers: one asks again in %v", servers, taken.Next)
			}
			if taken.Next >= 0 {
				// Each is late by what a network and a loop cost.
				at(now+taken.Next+time.Duration(seq%5)*again/5, l)
			}
		}
		for i := range servers {
			at(time.Duration(i)*s/time.Duration(servers), sc.server())
		}
		for len(asks) > 0 && len(late) < tickets {
			next := heap.Pop(&asks).(moment)
			now = next.at
			sc.at(now)
			next.do()
		}
		for second, n := range perSecond {
			if second > 0 && n > max(int(s/spacing), servers/2)+10 { // and after each of ten tickets
				t.Errorf("%d servers ask %d times in second %d", servers, n, second)
			}
		}
		// Each start is late by what those before it were, too.
		for i := len(late) - 1; i > 0; i-- {
			late[i] -= late[i-1]
		}
		if worst := slices.Max(late[1:]); len(late) < tickets || worst > spacing+again {
			t.Errorf("%d servers: %d taken, late by %v", servers, len(late), late)
		}
	}
}

func TestAJoinThatFitsWakesOneServer(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(10, 10*s)))
		nudges := func(want bool, tickets ...string) {
			t.Helper()
			for _, ticket := range tickets {
				if p := sc.joins(ticket); p.Nudge != want {
					t.Fatalf("%s: nudge %v, want %v", ticket, p.Nudge, want)
				}
				sc.c.US.Add(1)
			}
		}
		nudges(true, "a1") // nobody has an appointment
		nudges(false, "a2", "a3", "b1")
		sc.at(5*ms).takes("a1", "b1", "a2", "a3")
		// The server has the line's word that nobody waits: the next one wakes it.
		nudges(true, "a4")
		nudges(false, "a5")
		sc.at(10 * ms)
		nudges(false, "a6") // the server that was woken is on its way
		sc.at(40 * ms)
		nudges(true, "a7") // and did not come
		sc.takes("a4", "a5", "a6", "a7")
		for i := range 4 { // the window is full, with two that wait until 10 s
			sc.joins(fmt.Sprint("c", i))
		}
		sc.at(100*ms).takes("c0", "c1").asks(s) // an appointment at 1.1 s
		nudges(false, "c4")                     // it starts after that
		sc.at(9500 * ms).takes()
		sc.at(9990 * ms).takes().asks(15 * ms) // four units are free then
		nudges(false, "d1", "d2")              // they start with the others
		sc.at(10*s + 4*ms)
		nudges(false, "d3")
		sc.at(10*s + 5*ms - us).takes()
		if got := ids(limitertest.Take(t, sc.at(10*s+5*ms).l, 64, "q")); got != "d1 c2 d2 c3" {
			t.Errorf("took %q", got)
		}

		// Before every appointment.
		sc = newScene(t, client, limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 10 * s}))
		sc.joins("a1", "a2")
		sc.takes("a1").asks(s)
		sc.at(500 * ms)
		if p := sc.joins("b1"); p.Expected != 0 || !p.Nudge {
			t.Errorf("it fits half a second before any server asks: %+v", p)
		}
		if p := sc.joins("c1"); p.Expected != 0 || p.Nudge {
			t.Errorf("one was nudged: %+v", p)
		}
		sc.takes("b1", "c1").asks(s)
		sc.at(1497 * ms)
		if p := sc.joins("d1"); p.Nudge {
			t.Errorf("a server asks in 3 ms: %+v", p)
		}
	})
}

// Somebody waits in another queue, which keeps the line: also then the servers of an empty queue
// are woken for the next ticket, however soon it comes after the last one was taken.
func TestNudgesBesideAnotherQueue(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(10, 10*s)))
		other := sc.of("z1")
		other.Ticket.Queue = "other"
		limitertest.Join(t, sc.l, other)
		for _, ticket := range []string{"a1", "a2", "a3"} {
			if p := sc.joins(ticket); !p.Nudge {
				t.Fatalf("%s: nobody is nudged", ticket)
			}
			sc.c.US.Add(100)
			sc.takes(ticket).asks(-1)
		}
	})
}

// A server keeps its appointment in whichever order the servers before it went.
func TestAppointmentsOfServersThatAreGone(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		sc := newScene(t, client, limitertest.Policy(limitertest.SharedWindow(1, 500*ms)))
		sc.joins("a0", "a1", "a2")
		sc.takes("a0").asks(500 * ms)
		other := sc.server()
		if next := limitertest.Take(t, other, 1, "q").Next; next != 507*ms {
			t.Errorf("the second one asks in %v", next)
		}
		sc.at(s) // none of them came
		if taken := limitertest.Take(t, sc.server(), 1, "q"); ids(taken) != "a1" || taken.Next != 500*ms {
			t.Errorf("%+v", taken)
		}
		sc.at(1400 * ms)
		if p := sc.joins("b0"); p.Nudge {
			t.Errorf("somebody asks at 1.5 s: %+v", p)
		}
		sc.at(1520 * ms)
		if p := sc.joins("b1"); !p.Nudge {
			t.Errorf("nobody came: %+v", p)
		}

		sc = newScene(t, client, limitertest.Policy(limitertest.SharedWindow(1, 500*ms)))
		sc.joins("a0", "a1")
		sc.takes("a0").asks(500 * ms)
		for range 4 {
			limitertest.Take(t, sc.server(), 1, "q") // the last one asks at 528 ms
		}
		sc.at(514 * ms)
		if p := sc.joins("b0"); p.Nudge {
			t.Errorf("the first one is 14 ms late: %+v", p)
		}
		sc.at(514*ms + us)
		if p := sc.joins("b1"); !p.Nudge {
			t.Errorf("the first one is gone: %+v", p)
		}
	})
}

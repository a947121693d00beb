package linetest

import (
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func TestQueuesShareALine(t *testing.T) {
	t.Parallel()
	two := limitertest.Policy(limitertest.SharedWindow(2, 10*s))
	tell(t, map[string]lineCase{
		"of one server, by strict priority": {two, func(st *story) {
			st.joinIn("low", "a1", "a2", "a3")
			st.joinIn("high", "b1", "b2", "b3")
			for i, want := range []string{"b1 b2", "b3 a1", "a2 a3"} {
				st.at(steps(i) * 10 * s)
				taken, err := st.line().Take(st.Context(), throttle.TakeOptions{
					Queues: map[string]int{"high": 2, "low": 1}, Strict: true, Max: throttle.MaxTake,
				})
				expect.Must(st, err)
				expect.Equal(st, strings.Join(ids(taken.Tickets), " "), want)
			}
		}},
		"are told of alone": {two, func(st *story) {
			st.joinIn("one", "a1", "a2", "a3")
			st.from("other").takes().asks(-1)
			st.from("one").takes("a1", "a2")
			st.from("other", "one").takes().asks(s)
		}},
		"of one server that takes all it can, and is told when more fit": {two, func(st *story) {
			st.joinIn("one", "a1", "a2", "a3")
			st.joinIn("two", "b1", "b2", "b3")
			expect.Equal(st, limitertest.Take(st, st.l, 1, "one", "two").Next, 0)
			expect.Equal(st, limitertest.Take(st, st.l, 1, "one", "two").Next, s)
		}},
		"share the windows": {two, func(st *story) {
			st.joinIn("one", "a1", "a2", "a3")
			expect.Equal(st, st.joinIn("two", "b1", "b2").RetryIn, 10*s)
			limitertest.Take(st, st.l, 1, "one")
			st.from("two").takes("b1")
		}},
		"whose server is gone hold up nobody after a minute": {two, func(st *story) {
			st.joinIn("dead", "a1", "a2", "a3", "a4")
			st.newcomer("b", false)
			st.at(50 * s)
			limitertest.Take(st, st.server().l, 0, "dead") // asks once more
			st.at(110*s-us).newcomer("b", false)
			st.at(110 * s)
			expect.Equal(st, st.joinIn("live", "c1").RetryIn, 0)
			st.from("live").takes("c1")
			st.newcomer("b", true)
			expect.Equal(st, st.joinIn("live", "c2").RetryIn, 10*s)
			st.at(120*s).from("dead").takes("a1", "a2")
			st.newcomer("b", false)
		}},
	})
}

// nudges joins, a microsecond apart, and fails unless each of the tickets wakes a server, or none does.
func (st *story) nudges(want bool, tickets ...string) {
	st.Helper()
	for _, ticket := range tickets {
		expect.Equal(st, st.joins(ticket).Nudge, want, ticket, "nudges")
		st.pass(us)
	}
}

func TestAJoinThatFitsWakesOneServer(t *testing.T) {
	t.Parallel()
	one := limitertest.Policy(limitertest.SharedWindow(1, 500*ms))
	gcra := throttle.Window{Name: "own", Algorithm: throttle.AlgorithmGCRA, Limit: 100, Burst: 1, Period: s}
	slow := limitertest.Policy(gcra)
	slow.Tenants = map[string]throttle.Tenant{"a": {Windows: map[string]throttle.Override{"own": {Limit: 1, Burst: 1}}}}
	tell(t, map[string]lineCase{
		"once": {limitertest.Policy(limitertest.SharedWindow(10, 10*s)), func(st *story) {
			st.nudges(true, "a1") // nobody has an appointment
			st.nudges(false, "a2", "a3", "b1")
			st.at(5*ms).takes("a1", "b1", "a2", "a3")
			// The server has the line's word that nobody waits: the next one wakes it.
			st.nudges(true, "a4")
			st.nudges(false, "a5")
			st.at(10*ms).nudges(false, "a6") // the server that was woken is on its way
			st.at(40*ms).nudges(true, "a7")  // and did not come
			st.takes("a4", "a5", "a6", "a7")
			st.joins("c0", "c1", "c2", "c3") // the window is full, with two that wait until 10 s
			st.at(100*ms).takes("c0", "c1").asks(s)
			st.nudges(false, "c4") // it starts after the appointment at 1.1 s
			st.at(9500 * ms).takes()
			st.at(9990 * ms).takes().asks(15 * ms) // four units are free then
			st.nudges(false, "d1", "d2")           // they start with the others
			st.at(10*s+4*ms).nudges(false, "d3")
			st.at(10*s + 5*ms - us).takes()
			st.at(10*s+5*ms).takes("d1", "c2", "d2", "c3")
		}},
		"before every appointment": {limitertest.Policy(throttle.Window{Name: "own", Limit: 1, Period: 10 * s}), func(st *story) {
			st.joins("a1", "a2")
			st.takes("a1").asks(s)
			st.at(500*ms).nudges(true, "b1") // it fits half a second before any server asks
			st.nudges(false, "c1")           // one was nudged
			st.takes("b1", "c1").asks(s)
			st.at(1497*ms).nudges(false, "d1") // a server asks in 3 ms
		}},
		// The other queue keeps the line.
		"of an empty queue, beside another queue": {limitertest.Policy(limitertest.SharedWindow(10, 10*s)), func(st *story) {
			st.joinIn("other", "z1")
			for _, ticket := range []string{"a1", "a2", "a3"} {
				st.nudges(true, ticket)
				st.takes(ticket).asks(-1)
			}
			st.next = 0
		}},
		// A server keeps its appointment in whichever order the servers before it went.
		"whose servers are gone": {one, func(st *story) {
			st.joins("a0", "a1", "a2")
			st.takes("a0").asks(500 * ms)
			st.server().takes().asks(507 * ms)
			st.at(s).server().takes("a1").asks(500 * ms) // none of them came
			st.at(1400*ms).nudges(false, "b0")           // somebody asks at 1.5 s
			st.at(1520*ms).nudges(true, "b1")            // nobody came
		}},
		"whose servers ask ahead of them": {one, func(st *story) {
			st.joins("a0", "a1")
			st.takes("a0").asks(500 * ms)
			other := st.server()
			other.takes().asks(507 * ms)
			st.at(100 * ms).takes().asks(400 * ms)
			other.takes().asks(407 * ms)
			st.takes().asks(400 * ms)
		}},
		"whose only server had another one in between": {slow, func(st *story) {
			st.granted("a0")
			st.joins("a1")
			st.from("q", "r").takes().asks(s)
			st.at(10*ms).joinIn("r", "b1", "b2")
			st.from("q", "r").takes("b1").asks(10 * ms)
			st.at(20*ms).from("q", "r").takes("b2").asks(980 * ms)
		}},
		"of which the first is late": {one, func(st *story) {
			st.joins("a0", "a1")
			st.takes("a0").asks(500 * ms)
			for range 4 {
				st.server().takes() // the last one asks at 528 ms
			}
			st.at(514*ms).nudges(false, "b0") // the first one is 14 ms late
			st.nudges(true, "b1")             // and gone
		}},
	})
}

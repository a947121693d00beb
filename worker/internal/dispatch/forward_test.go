package dispatch_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// later enqueues a throttled task for a time, by a plain client.
func (b *dispatcherFixture) later(id string, in time.Duration) {
	b.Helper()
	_, err := b.plain.Enqueue(asynq.NewTask("throttled", []byte("acme")), asynq.TaskID(id), asynq.ProcessIn(in))
	b.ok(err)
}

func (b *dispatcherFixture) forward() int {
	b.Helper()
	return expect.Got(b.Forward(b.Context(), "default", false))(b)
}

// next score of a scheduled task, from now on.
func (b *dispatcherFixture) dueIn(id string) time.Duration {
	b.Helper()
	score := expect.Got(b.client.ZScore(b.Context(), "asynq:{default}:scheduled", id).Result())(b)
	return time.Until(time.Unix(int64(score), 0))
}

// Tasks that are due join their line, those whose ticket was lost join again, and those in line stay there.
func TestTasksThatAreDueJoinTheirLine(t *testing.T) {
	inBubble(t, policies(perHour(1)), nil, func(b *dispatcherFixture) {
		b.later("at its time", 10*time.Second)
		b.wait("default", "in line")
		_, err := b.asynq.Store(b.Context(), "default", "", []asynqredis.EnqueueCall{b.message("default", "lost")}, time.Now())
		b.ok(err)
		time.Sleep(121 * time.Second)
		b.want("forwarded", b.forward(), 3)
		b.want("forwarded again", b.forward(), 0)
		for _, id := range []string{"at its time", "in line", "lost"} {
			b.want(id, b.state("default", id), "scheduled")
		}
		b.want("in line", len(b.inLine()), 3)
		b.want("the first", b.inLine()[0], "in line")
		b.want("ran", b.run(1), "[in line]")
		// A task is looked at two minutes after its expected start, however far away that is.
		for i, id := range b.inLine() {
			in := b.dueIn(id) - time.Duration(i+1)*time.Hour
			expect.That(t, in >= time.Minute && in <= 3*time.Minute, id, "is looked after", in, "after its expected start")
		}
	})
}

// That a task which waits stands in no line is reported once: its client has another limiter, or the
// line is lost. What never joined, or could not, is not reported.
func TestATaskThatStandsInNoLineIsReported(t *testing.T) {
	store := func(b *dispatcherFixture, id string) {
		_, err := b.asynq.Store(b.Context(), "default", "", []asynqredis.EnqueueCall{b.message("default", id)}, time.Now().Add(2*time.Minute))
		b.ok(err)
	}
	inBubble(t, policies(perHour(1)), nil, func(b *dispatcherFixture) {
		b.wait("default", "in line")
		b.later("at its time", time.Minute)
		time.Sleep(121 * time.Second)
		b.forward()
		b.want("reports", b.logs.Count("stood in no line"), 0)
		store(b, "other prefix")
		store(b, "another one")
		time.Sleep(121 * time.Second)
		b.forward()
		b.want("reports", b.logs.Count("stood in no line"), 1)
		store(b, "a third one")
		time.Sleep(121 * time.Second)
		b.forward()
		b.want("reports", b.logs.Count("stood in no line"), 1)
	})
	inBubble(t, policies(perHour(1)), nil, func(b *dispatcherFixture) {
		b.later("cannot join", time.Second)
		b.toLimiter.Store(&sitetest.Fault{Is: sitetest.WithArg("join"), Err: errLost})
		for i := range 50 {
			if time.Sleep(10 * time.Second); i == 30 {
				b.toLimiter.Store(nil)
			}
			b.forward()
		}
		b.want("in line", b.inLine(), "[cannot join]")
		b.want("reports", b.logs.Count("stood in no line"), 0)
	})
}

// A task that joins and fits wakes another server at once, if this one has no slot.
func TestATaskThatIsDueAndFitsWakesAServer(t *testing.T) {
	inBubble(t, policies(perHour(2)), nil, func(b *dispatcherFixture) {
		b.wait("default", "a")
		b.want("next", b.next(), "a")
		b.later("b", time.Second)
		time.Sleep(2 * time.Second)
		nudges := "asynq:{default}:sluice:nudge"
		b.client.Del(b.Context(), nudges)
		b.want("forwarded", b.forward(), 1)
		time.Sleep(time.Millisecond)
		b.want("nudges", b.client.LRange(b.Context(), nudges, 0, -1).Val(), "[api]")
	})
}

// What joins no line goes where asynq forwards it.
func TestWhatJoinsNoLineIsForwardedAsByAsynq(t *testing.T) {
	inBubble(t, policies(perHour(1)), func(c *dispatch.Config) {
		match := c.Match
		c.Match = func(m asynqredis.Message, _ bool) (throttle.Request, bool) {
			if m.Type() == "removed" { // its policy, since it was matched
				return throttle.Request{Policy: "removed", Tenant: "acme", Key: m.JoinKey()}, true
			}
			return match(m, false)
		}
	}, func(b *dispatcherFixture) {
		_, err := b.plain.Enqueue(asynq.NewTask("plain", nil), asynq.TaskID("unmatched"), asynq.ProcessIn(time.Second))
		b.ok(err)
		_, err = b.plain.Enqueue(asynq.NewTask("removed", nil), asynq.TaskID("removed"), asynq.ProcessIn(time.Second))
		b.ok(err)
		_, err = b.plain.Enqueue(asynq.NewTask("throttled", nil), asynq.TaskID("no tenant"), asynq.ProcessIn(time.Second))
		b.ok(err)
		b.ok(expect.ErrOf(b.plain.Enqueue(asynq.NewTask("throttled", []byte("acme")), asynq.TaskID("too late"),
			asynq.ProcessIn(time.Second), asynq.Deadline(time.Now().Add(3*time.Second)))))
		b.wait("default", "first", "second")
		time.Sleep(2 * time.Second)
		b.want("forwarded", b.forward(), 4)
		for _, id := range []string{"unmatched", "removed", "no tenant", "too late"} {
			b.want(id, b.state("default", id), "pending")
		}
		b.want("in line", b.inLine(), "[first second]")
		b.want("failures of the limiter", b.logs.Count("the limiter is"), 0)
	})
}

// Without the limiter tasks that are due wait for ten seconds, or run if their policy says so.
func TestTasksThatAreDueWaitForTheLimiter(t *testing.T) {
	for _, open := range []bool{false, true} {
		p := perHour(1)
		if open {
			p.FailOpen = true
		}
		inBubble(t, policies(p), nil, func(b *dispatcherFixture) {
			b.toLimiter.Store(&sitetest.Fault{Is: sitetest.WithArg("join"), Err: errLost})
			b.later("a", time.Second)
			time.Sleep(2 * time.Second)
			b.want("forwarded", b.forward(), 1)
			if open {
				b.want("a", b.state("default", "a"), "pending")
				return
			}
			b.want("a", b.state("default", "a"), "scheduled")
			b.want("looked after in", b.dueIn("a"), dispatch.UnavailableFor)
			b.want("logged", b.logs.Count("the limiter is unavailable"), 1)
		})
	}
}

// The reply to a join is lost. The ticket may be in line all the same: the line is asked.
func TestAJoinWhoseReplyIsLostIsAskedFor(t *testing.T) {
	inBubble(t, policies(perHour(1)), func(c *dispatch.Config) { c.Poll = time.Hour }, func(b *dispatcherFixture) {
		b.toLimiter.Store(loses(sitetest.WithArg("join")))
		b.want("next", b.next(), "none")
		b.want("next", b.next(), "none") // the next look at an empty line is in five seconds
		b.later("a", time.Second)
		time.Sleep(2 * time.Second)
		b.want("forwarded", b.forward(), 1)
		begun := time.Now()
		b.want("next", b.next(), "a")
		expect.Equal(t, time.Since(begun), 0, "it started after")
	})
}

// Should the server die before a task joins, another one finds it in seconds, and not in two minutes.
func TestATaskThatHasNotJoinedYetIsDueSoon(t *testing.T) {
	inBubble(t, policies(perHour(1)), nil, func(b *dispatcherFixture) {
		var dueJoining time.Duration
		b.toLimiter.Store(&sitetest.Fault{Is: sitetest.WithArg("join"), Meanwhile: func() { dueJoining = b.dueIn("a") }})
		b.later("a", time.Second)
		time.Sleep(2 * time.Second)
		b.want("forwarded", b.forward(), 1)
		dueJoined := b.dueIn("a")
		expect.That(t, dueJoining <= 5*time.Second && dueJoined >= time.Minute, "it is due in", dueJoining, "while it joins, and then in", dueJoined)
	})
}

// A scriptError is an error of a script.
type scriptError struct{ error }

func (scriptError) RedisError() {}

// One ticket that no script can decide holds up no others.
func TestATicketThatCannotJoinHoldsUpNoOther(t *testing.T) {
	inBubble(t, policies(perHour(1)), nil, func(b *dispatcherFixture) {
		unlucky := func(args []any) bool { return strings.Contains(fmt.Sprint(args...), "unlucky") }
		b.toLimiter.Store(&sitetest.Fault{Is: unlucky, Err: scriptError{errors.New("ERR user_script:1: oh")}})
		for _, id := range []string{"a", "unlucky", "c"} {
			b.later(id, time.Second)
		}
		time.Sleep(2 * time.Second)
		b.want("forwarded", b.forward(), 3)
		b.want("in line", b.inLine(), "[a c]")
		b.want("looked after in", b.dueIn("unlucky"), dispatch.UnavailableFor)
	})
}

// A task that waits for a time and in no line runs in that second, with any interval of asynq.
func TestATaskOutOfLineRunsInItsSecond(t *testing.T) {
	inBubble(t, nil, func(c *dispatch.Config) { c.Poll = time.Hour }, func(b *dispatcherFixture) {
		b.want("next", b.next(), "none")
		_, err := b.plain.Enqueue(asynq.NewTask("plain", nil), asynq.TaskID("a"), asynq.ProcessIn(10*time.Second))
		b.ok(err)
		at := time.Now().Add(10 * time.Second)
		b.WakeAt("default", at)
		b.WakeAt("default", at)
		var got string
		for got = b.next(); got == "none"; got = b.next() {
		}
		late := time.Since(at)
		expect.That(t, got == "a" && late >= 0 && late <= time.Second, got, "came", late, "late")
	})
}

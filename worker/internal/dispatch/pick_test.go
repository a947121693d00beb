package dispatch_test

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// The reply to a pick is lost. Its tasks are active, and no server has them. It is repeated first, until it is
// answered.
func TestAPickWhoseReplyWasLostIsRepeated(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprint("only the reply: ", lost), func(t *testing.T) {
			inBubble(t, policies(perHour(3)), slots(8), func(b *dispatcherFixture) {
				b.wait("default", "a", "b", "c", "d")
				b.toAsynq.Store(&sitetest.Fault{Is: sitetest.IsPick, Lost: lost, Err: errLost})
				for range 5 {
					_, ok := b.Next(b.Context())
					b.want("a task", ok, false)
				}
				b.want("logged of asynq's Redis", b.logs.Count("asynq's Redis is unavailable"), 1)
				b.want("takes", len(b.asked()), 1)
				b.toAsynq.Store(nil)
				b.want("ran", b.run(4), "[a b c none]")
				b.want("used", b.used(), 3)
				b.want("logged of the limiter", b.logs.Count("the limiter is"), 0)
			})
		})
	}
}

// A take is not answered in time. The next one hands out what it got, which is as old as its charge.
func TestAGrantOfALostTakeIsAsOldAsItsCharge(t *testing.T) {
	inBubble(t, policies(perHour(1)), nil, func(b *dispatcherFixture) {
		b.wait("default", "a")
		b.toLimiter.during(func() { time.Sleep(2 * dispatch.TakeTimeout) })
		charged := time.Now()
		for range 3 {
			if task, ok := b.Next(b.Context()); ok {
				b.want("it is handed out late", time.Since(charged) >= dispatch.TakeTimeout, true)
				after := task.Verdict.DecidedAt.Sub(charged)
				expect.That(b, after <= 0, "it seems to be charged", after, "later than it was")
				return
			}
		}
		t.Error("it is not handed out")
	})
}

// The reply of a take is lost, and the next take is of other queues. The tickets go back to their line, even if
// the limiter does not answer at once, and are taken again.
func TestALostTakeThatIsRepeatedForOtherQueues(t *testing.T) {
	inBubble(t, policies(perHour(1)), func(c *dispatch.Config) {
		c.Strict, c.Queues = true, map[string]int{"high": 2, "low": 1}
	}, func(b *dispatcherFixture) {
		b.want("next", b.next(), "none")
		isTake := func(args []any) bool { return takenQueue.MatchString(fmt.Sprint(args[len(args)-1])) }
		isOther := func(args []any) bool { return sitetest.IsScript(args) && !isTake(args) }
		lost := loses(isTake)
		lost.Meanwhile = func() {
			b.toLimiter.Store(&sitetest.Fault{Is: isOther, Hits: func(n int) bool { return n <= 2 }, Err: errLost})
			b.Nudge("high", "api")
		}
		b.wait("low", "a")
		b.toLimiter.Store(lost)
		begun := time.Now()
		b.want("next", b.next(), "a")
		b.want("it waits for the limiter alone", time.Since(begun) <= 350*time.Millisecond, true)
		b.want("used", b.used(), 1)
	})
}

// A server that stops before a lost pick was repeated puts the tasks back, and their tickets.
func TestAStopAfterALostPickPutsTasksBack(t *testing.T) {
	inBubble(t, policies(perHour(2)), slots(8), func(b *dispatcherFixture) {
		b.wait("default", "a", "b")
		b.toAsynq.Store(loses(sitetest.IsPick))
		_, ok := b.Next(b.Context())
		b.want("a task", ok, false)
		b.want("a", b.state("default", "a"), "active")
		b.toAsynq.Store(nil)
		b.Close(b.Context())
		time.Sleep(time.Second)
		b.want("a and b", b.state("default", "a")+" "+b.state("default", "b"), "scheduled scheduled")
		b.want("in line", b.inLine(), "[a b]")
		b.want("used", b.used(), 0)
	})
}

// A dequeue of pending tasks whose reply is lost is repeated too.
func TestADequeueWhoseReplyWasLostIsRepeated(t *testing.T) {
	inBubble(t, nil, slots(8), func(b *dispatcherFixture) {
		b.enqueue("plain", "default", "a", "b", "c")
		b.toAsynq.Store(loses(scriptOf("", ":lease")))
		_, ok := b.Next(b.Context())
		b.want("a task", ok, false)
		b.toAsynq.Store(nil)
		b.enqueue("plain", "default", "d")
		b.want("ran", b.run(4), "[a b c d]")
	})
}

// Tasks that are ready and for which no slot becomes free go back after half a second, their tickets to their ranks.
func TestReadyTasksGoBack(t *testing.T) {
	for _, row := range []struct {
		name string
		end  func(b *dispatcherFixture)
	}{
		{"no slot", func(b *dispatcherFixture) { time.Sleep(600 * time.Millisecond) }},
		{"stopped", func(b *dispatcherFixture) { b.Stop(); time.Sleep(time.Millisecond) }},
		{"shut down", func(b *dispatcherFixture) { b.Close(b.Context()) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			inBubble(t, policies(perHour(100)), slots(4), func(b *dispatcherFixture) {
				b.wait("default", "a", "b", "c", "d", "e", "f")
				b.enqueue("plain", "default", "p", "q")
				b.want("next", b.next(), "a")
				b.want("ready", b.state("default", "b")+" "+b.state("default", "d"), "active active")
				b.client.Del(b.Context(), "asynq:{default}:sluice:nudge")
				row.end(b)
				time.Sleep(time.Millisecond)
				b.want("nudges", b.client.LRange(b.Context(), "asynq:{default}:sluice:nudge", 0, -1).Val(), "[api]")
				b.want("b and d", b.state("default", "b")+" "+b.state("default", "d"), "scheduled scheduled")
				b.want("in line", b.inLine(), "[b c d e f]")
				b.want("used", b.used(), 1)
				if row.name == "no slot" {
					b.want("ran", b.run(7), "[b c d p e f q]")
				}
			})
		})
	}
}

// A server is told to stop while it picks tasks. Those that it does not hand out any more go back.
func TestAServerThatStopsDuringAPickPutsTasksBack(t *testing.T) {
	inBubble(t, policies(perHour(100)), slots(4), func(b *dispatcherFixture) {
		b.wait("default", "a", "b")
		b.toAsynq.Store(&sitetest.Fault{Is: sitetest.IsPick, Lost: true, Meanwhile: b.Stop})
		_, ok := b.Next(b.Context())
		b.want("handed out", ok, false)
		time.Sleep(time.Millisecond)
		b.want("a and b", b.state("default", "a")+" "+b.state("default", "b"), "scheduled scheduled")
		b.want("in line", b.inLine(), "[a b]")
		b.want("used", b.used(), 0)
	})
}

// A ticket that joined before its policy had all its scopes is taken without units. If no slot
// becomes free, its task is forwarded at once, and not two minutes later.
func TestReadyTasksWithoutUnitsAreForwarded(t *testing.T) {
	p := perHour(100)
	region := p.Windows[0]
	region.Name, region.Per = "region", []string{"region"}
	p.Windows = append(p.Windows, region)
	inBubble(t, policies(perHour(100)), slots(3), func(b *dispatcherFixture) {
		b.wait("default", "a", "b", "c")
		b.ok(b.limiter.SetPolicies(policies(p)))
		b.want("next", b.next(), "a")
		b.want("ready", b.state("default", "b")+" "+b.state("default", "c"), "active active")
		time.Sleep(2 * time.Second)
		b.want("b and c", b.state("default", "b")+" "+b.state("default", "c"), "pending pending") // without a region
		b.want("ran", b.run(2), "[b c]")
	})
	inBubble(t, policies(perHour(100)), nil, func(b *dispatcherFixture) { // nor if their queue is paused
		b.want("next", b.next(), "none")
		b.ok(b.tools.PauseQueue("default"))
		b.wait("default", "a")
		b.ok(b.limiter.SetPolicies(policies(p)))
		b.want("next", b.next(), "none")
		b.want("forwarded", b.forward(), 1)
		b.want("a", b.state("default", "a"), "pending")
	})
}

// When a policy's shards change, tasks that wait in the line of before reserve in that of now, in their order,
// before they are handed out: in their handlers, the later ones could be the first. Those that are denied stand
// in the line of now, and go back.
func TestTasksOfAFormerShardReserveInOrder(t *testing.T) {
	p := perHour(2)
	p.Shards = 3
	inBubble(t, policies(p), slots(4), func(b *dispatcherFixture) {
		b.waitIn(b.limiter.LineOf("api", "acme"), "default", "a", "b", "c", "d")
		p.Shards = 2
		b.ok(b.limiter.SetPolicies(policies(p)))
		b.want("next", b.next(), "a")
		time.Sleep(600 * time.Millisecond)
		b.want("b, c and d", b.state("default", "b")+" "+b.state("default", "c")+" "+b.state("default", "d"), "scheduled scheduled scheduled")
		b.want("next", b.next(), "b")
		b.Ended()
		b.Ended()
		b.want("in line", b.inLine(), "[c d]")
		p.Windows[0].Limit = 4
		b.ok(b.limiter.SetPolicies(policies(p)))
		b.want("ran", b.run(2), "[c d]")
	})
}

// While asynq's Redis is away nothing is forgotten, and what it did meanwhile is undone or goes on.
func TestReadyTasksOutlastAnOutage(t *testing.T) {
	inBubble(t, policies(perHour(100)), slots(3), func(b *dispatcherFixture) {
		b.wait("default", "a", "b", "c")
		b.want("next", b.next(), "a")
		b.toAsynq.Store(&sitetest.Fault{Is: func([]any) bool { return true }, Err: errLost})
		time.Sleep(5 * time.Second)
		b.want("next", b.next(), "b")
		time.Sleep(11 * time.Second)
		b.want("next, when its lease may soon end", b.next(), "none")
		b.toAsynq.Store(nil)
		time.Sleep(2 * time.Second)
		b.want("c", b.state("default", "c"), "scheduled")
		b.want("in line", b.inLine(), "[c]")
		b.want("ran", b.run(1), "[c]")
	})
}

// That a task without retries left may have started is noted before. One that was recovered meanwhile does not start.
func TestALastAttemptIsNotedBeforeItStarts(t *testing.T) {
	inBubble(t, nil, slots(3), func(b *dispatcherFixture) {
		b.enqueue("plain", "default", "a", "b", "c")
		b.want("next", b.next(), "a")
		started := func(id string) bool {
			return b.client.HExists(b.Context(), "asynq:{default}:t:"+id, "sluice_started").Val()
		}
		b.want("started", []bool{started("a"), started("b")}, "[true false]")
		b.client.HSet(b.Context(), "asynq:{default}:t:b", "state", "scheduled")
		b.want("next", b.next(), "c")
	})
}

// While asynq's Redis is away, the start of a last attempt cannot be noted. It stays ready meanwhile, and a call for
// the next task ends in time. Then it starts with a new lease, or goes back if the server stops.
func TestALastAttemptOutlastsAnOutage(t *testing.T) {
	for _, stops := range []bool{false, true} {
		inBubble(t, nil, nil, func(b *dispatcherFixture) {
			var away atomic.Bool
			isStart := scriptOf(":t:a", ":t:a")
			b.toAsynq.Store(&sitetest.Fault{Err: errLost, Is: func(args []any) bool {
				return away.Load() || isStart(args) && away.CompareAndSwap(false, true)
			}})
			b.enqueue("plain", "default", "a")
			for range 20 {
				begun := time.Now()
				_, ok := b.Next(b.Context())
				expect.That(t, !ok && time.Since(begun) < 2*dispatch.WaitMax, ok, "after", time.Since(begun))
			}
			if stops {
				b.Stop()
			}
			b.toAsynq.Store(nil)
			if time.Sleep(time.Second); stops {
				b.want("a", b.state("default", "a"), "pending")
				return
			}
			b.want("next", b.next(), "a")
			lease := b.client.ZScore(b.Context(), "asynq:{default}:lease", "a").Val() - float64(time.Now().Unix())
			expect.That(t, lease > 25, "its lease ends in", lease, "s")
		})
	}
}

// A task that is active when its ticket is taken runs elsewhere, or is on its way back to wait. Its ticket
// leaves, and its units are for the next. If it is put back to wait it is due, and joins in front.
func TestATicketOfAnActiveTaskLeaves(t *testing.T) {
	inBubble(t, policies(perHour(3)), nil, func(b *dispatcherFixture) {
		b.wait("default", "a", "b", "c", "d")
		call := b.asynq.NewCall()
		message := b.message("default", "a").Message
		b.ok(expect.ErrOf(b.asynq.Pick(b.Context(), "default", call, []asynqredis.WaitingTask{{ID: "a", JoinKey: message.JoinKey()}})))
		b.want("ran", b.run(1), "[b]")
		b.want("in line", b.inLine(), "[c d]")
		time.Sleep(time.Millisecond) // it is refunded in the background
		b.want("used", b.used(), 1)
		due, err := b.asynq.Restore(b.Context(), asynqredis.RestoreOptions{
			Ref: asynqredis.Ref{Queue: "default", ID: "a"}, CallKey: call, Message: message, At: time.Now().Add(time.Hour),
			Line: "api", Mark: asynqredis.Mark(message.JoinKey(), b.asynq.NewCall()),
		})
		b.ok(err)
		b.want("due now", due, true)
		b.want("forwarded", b.forward(), 1)
		b.want("ran", b.run(3), "[a c none]")
		b.want("in line", b.inLine(), "[d]")
	})
}

// What is gone, has ended, is pending or waits for something else leaves, and its units are for the next.
func TestWhatCannotBePickedLeaves(t *testing.T) {
	inBubble(t, policies(perHour(1)), slots(4), func(b *dispatcherFixture) {
		b.wait("default", "deleted", "archived", "kept", "run by hand", "another", "last")
		b.ok(b.tools.DeleteTask("default", "deleted"))
		b.ok(b.tools.ArchiveTask("default", "archived"))
		b.client.HSet(b.Context(), "asynq:{default}:t:kept", "state", "completed")
		b.ok(b.tools.RunTask("default", "run by hand"))
		b.client.HSet(b.Context(), "asynq:{default}:t:another", "sluice_join", "0123456789abcdef.")
		got := b.run(2)
		slices.Sort(got)
		b.want("ran", got, "[last run by hand]")
		b.want("in line", b.inLine(), "[]")
		b.want("used", b.used(), 1)
		for id, want := range map[string]string{"another": "scheduled", "archived": "archived", "kept": "completed"} {
			b.want(id, b.state("default", id), want)
		}
	})
}

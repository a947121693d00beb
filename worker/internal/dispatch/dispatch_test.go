package dispatch_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// recently is how far back hand-outs count as the latest.
const recently = 10 * time.Millisecond

func policies(policies ...throttle.Policy) []throttle.Policy { return policies }

func slots(n int) func(*dispatch.Config) { return func(c *dispatch.Config) { c.Concurrency = n } }

// Tasks in line go in their order, as far as they fit, and each brings what it was granted.
func TestTasksInLineGoInOrder(t *testing.T) {
	inBubble(t, policies(perHour(3)), slots(8), func(b *dispatcherFixture) {
		b.wait("default", "a", "b", "c", "d")
		b.want("ran", b.run(4), "[a b c none]")
		b.want("in line", b.inLine(), "[d]")
		b.want("used", b.used(), 3)
		b.want("d", b.state("default", "d"), "scheduled")
	})
}

// Nothing is taken from a paused queue. Its tickets keep their places, and other queues go on.
func TestAPausedQueueKeepsItsPlaces(t *testing.T) {
	inBubble(t, policies(perHour(100)), func(c *dispatch.Config) {
		c.Concurrency, c.Queues = 4, map[string]int{"default": 1, "other": 1}
	}, func(b *dispatcherFixture) {
		b.wait("default", "a", "b")
		b.ok(b.tools.PauseQueue("default"))
		b.wait("other", "x")
		b.want("ran", b.run(2), "[x none]")
		// Calls ask when they begin and when they end: how often, depends on the scheduler. A loop would ask without end.
		n := len(b.asked())
		expect.That(t, n <= 15, n, "takes in the meantime")
		b.want("used", b.used(), 1)
		b.ok(b.tools.UnpauseQueue("default"))
		b.want("ran", b.run(2), "[a b]")
	})
}

// Who has learnt that a queue is paused, from its line or its pending tasks, takes nothing for it until it is
// checked.
func TestNobodyTakesForAPausedQueue(t *testing.T) {
	for _, row := range []struct {
		name  string
		first bool // its pending tasks are looked for first
		takes int
	}{{"from its line", false, 2}, {"from its pending tasks", true, 1}} {
		t.Run(row.name, func(t *testing.T) {
			inBubble(t, policies(perHour(100)), func(c *dispatch.Config) { c.Poll = time.Hour }, func(b *dispatcherFixture) {
				if row.first {
					b.ok(b.tools.PauseQueue("default"))
				}
				b.next()
				b.want("takes of the empty line", len(b.asked()), 1)
				if !row.first {
					b.ok(b.tools.PauseQueue("default"))
				}
				b.wait("default", "a")
				for range 3 {
					b.want("next", b.next(), "none")
				}
				b.want("takes", len(b.asked()), row.takes)
				b.ok(b.tools.UnpauseQueue("default"))
				b.want("next", b.next(), "a")
			})
		})
	}
}

// As many are taken as there are free slots. Where tasks end at once, it is as many as the slots run in a moment.
func TestAsManyAreTakenAsSlotsAreFree(t *testing.T) {
	inBubble(t, policies(perHour(1000)), slots(4), func(b *dispatcherFixture) {
		var ids []string
		for i := range 300 {
			ids = append(ids, fmt.Sprintf("t%03d", i))
		}
		b.wait("default", ids...)
		b.want("the first", b.next(), "t000")
		b.want("used, with 4 slots", b.used(), 4)
		b.Ended()
		b.want("ran", b.run(64)[63], "t064")
		synctest.Wait()
		takes, used := len(b.asked()), b.used()
		b.run(64)
		synctest.Wait()
		takes, used = len(b.asked())-takes, b.used()-used
		few := takes <= (64+dispatch.TakeMax-1)/dispatch.TakeMax+1 // one is ahead of time
		expect.That(t, few && used <= int64(dispatch.TakeMax*takes), takes, "takes of", used, "tasks for 64 of no time")
		for range 40 { // slow tasks
			b.next()
			time.Sleep(time.Second)
			b.Ended()
		}
		used = b.used()
		b.next()
		b.want("used after slow tasks", b.used()-used, 4)
		b.Ended()
		b.run(40) // fast ones: older tasks count less and less
		takes = len(b.asked())
		b.run(32)
		// By the four slots alone it would be one for every 4. It is one for twice as many, at least.
		takes = len(b.asked()) - takes
		expect.That(t, takes <= 32/4/2, takes, "takes for 32 of no time after slow ones")
	})
}

// Lines with work take turns: next is the one whose tenants have had the least.
func TestLinesTakeTurns(t *testing.T) {
	inBubble(t, policies(perHour(100), perHour(100, "other")), nil, func(b *dispatcherFixture) {
		b.wait("default", "a1", "a2", "a3")
		b.waitIn("other", "default", "b1", "b2", "b3")
		var got []string
		for range 6 {
			got = append(got, b.next())
			time.Sleep(20 * time.Millisecond) // so that one is taken at a time
			b.Ended()
		}
		text := strings.Join(got, " ")
		expect.That(t, text == "a1 b1 a2 b2 a3 b3" || text == "b1 a1 b2 a2 b3 a3", "ran", text)
	})
}

// While tasks are handed out fast the next are made ready in the background, so that slots do not
// wait for Redis. Who needs a task meanwhile waits for these, and asks for no others.
func TestTasksAreFetchedAhead(t *testing.T) {
	inBubble(t, policies(perHour(1000)), slots(16), func(b *dispatcherFixture) {
		var ids []string
		for i := range 300 {
			ids = append(ids, fmt.Sprintf("t%03d", i))
		}
		b.wait("default", ids...)
		b.run(1)
		b.toLimiter.during(func() { time.Sleep(50 * time.Millisecond) })
		b.run(14) // of the 16 that the first take got
		synctest.Wait()
		expect.Require(t, len(b.asked()) == 2, len(b.asked()), "takes: nothing is fetched ahead")
		b.run(1)
		b.want("ran next", b.run(1), "[t016]")
		b.want("takes", len(b.asked()), 2)
		b.toLimiter.Store(nil)
		for range 50 {
			b.run(1)
			synctest.Wait()
		}
		// A take of the next begins when a third is left of the 64 that become free soon, at most.
		n := b.used() - (17 + 50)
		expect.That(t, n <= 64/3+dispatch.TakeMax, n, "are ready")
	})
}

// A limiter that is silent holds up pending tasks by 250 ms at most now and then, and is no error.
func TestASilentLimiterHoldsPendingTasksUpBriefly(t *testing.T) {
	var policies []throttle.Policy
	for i := range 20 {
		policies = append(policies, perHour(1, fmt.Sprint("p", i)))
	}
	inBubble(t, policies, nil, func(b *dispatcherFixture) {
		b.limits(func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() })
		begun := time.Now()
		for i := range 20 {
			b.enqueue("plain", "default", fmt.Sprint("t", i))
			b.want("ran", b.run(1), fmt.Sprintf("[t%d]", i))
			time.Sleep(100 * time.Millisecond)
		}
		// Two lines are asked at first. Between tasks are 2 s, for pauses of 100, 200, 400 and 800 ms.
		const takes = 2 + 4
		b.want("takes", len(b.asked()), takes)
		b.want("20 plain tasks were delayed for", time.Since(begun)-2*time.Second, takes*dispatch.TakeTimeout)
		expect.That(t, b.logs.Count("the limiter is unavailable") == 1, "want it logged once", &b.logs)
		b.limits(nil)
		b.waitIn("p7", "default", "a")
		b.want("ran", b.run(1), "[a]")
	})
}

// A line that fails is skipped for 0.1 s, 0.2 s and so on up to a second, also while others answer.
func TestALineThatFailsIsSkippedForAWhile(t *testing.T) {
	inBubble(t, policies(perHour(100), perHour(100, "other")), nil, func(b *dispatcherFixture) {
		b.next()
		var mu sync.Mutex
		var asked []time.Time
		b.limits(func(_ context.Context, line string) error {
			if line != "api" {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, time.Now())
			return errLost
		})
		b.Expect("api", "default", 0)
		const every = 50 * time.Millisecond
		for i := range 100 {
			id := fmt.Sprint("x", i)
			b.waitIn("other", "default", id)
			b.want("ran", b.run(1), "["+id+"]")
			time.Sleep(every)
		}
		mu.Lock()
		defer mu.Unlock()
		delays := []time.Duration{100, 200, 400, 800, 1000, 1000, 1000} // ms
		for i, delay := range delays {
			delay *= time.Millisecond
			expect.Require(t, i+1 < len(asked), "it was asked", len(asked), "times in 5 s")
			took := asked[i+1].Sub(asked[i])
			expect.That(t, took >= delay && took <= delay+every, "delay", i, "took", took, ", want", delay)
		}
	})
}

// A wait ends within a second, and at once when the server stops.
func TestWaitIsBounded(t *testing.T) {
	inBubble(t, policies(perHour(1)), func(c *dispatch.Config) {
		c.Poll, c.Queues = time.Hour, map[string]int{"default": 3, "other": 1}
	}, func(b *dispatcherFixture) {
		begun := time.Now()
		for range 10 {
			_, ok := b.Next(b.Context())
			b.want("a task", ok, false)
		}
		expect.Equal(t, time.Since(begun), 10*dispatch.WaitMax, "ten waits took")
		time.AfterFunc(100*time.Millisecond, b.Stop)
		begun = time.Now()
		b.Next(b.Context())
		expect.Equal(t, time.Since(begun)-100*time.Millisecond, dispatch.RetryAfterError,
			"it ended", "after it was stopped")
	})
}

// Three hand-outs from the line earn pending tasks one.
func TestPendingTasksHaveTurns(t *testing.T) {
	inBubble(t, policies(perHour(1000)), nil, func(b *dispatcherFixture) {
		var line, pending []string
		for i := range 60 {
			line, pending = append(line, fmt.Sprint("l", i)), append(pending, fmt.Sprint("p", i))
		}
		b.wait("default", line...)
		b.enqueue("plain", "default", pending...)
		n := 0
		for range 40 {
			if strings.HasPrefix(b.next(), "p") {
				n++
			}
			time.Sleep(20 * time.Millisecond)
			b.Ended()
		}
		b.want("pending, of 40", n, 40/(dispatch.TasksPerPending+1))
	})
}

// Under strict order a more important queue's pending tasks go before a less important queue's line.
func TestStrictOrderHoldsForLinesAndPendingTasks(t *testing.T) {
	inBubble(t, policies(perHour(1000)), func(c *dispatch.Config) {
		c.Strict, c.Queues = true, map[string]int{"high": 3, "middle": 2, "low": 1}
	}, func(b *dispatcherFixture) {
		b.enqueue("plain", "low", "low pending")
		b.wait("low", "low line")
		b.enqueue("plain", "middle", "middle pending")
		b.wait("middle", "middle line")
		b.enqueue("plain", "high", "high pending")
		b.wait("high", "high line")
		b.want("ran", strings.Join(b.run(6), ", "), "high line, high pending, middle line, middle pending, low line, low pending")
		b.want("ran", b.run(1), "[none]")
		b.wait("low", "first")
		b.want("ran", b.run(1), "[first]")
		time.Sleep(2 * recently)
		b.wait("low", "second")
		b.enqueue("plain", "high", "urgent")
		b.want("ran", b.run(2), "[urgent second]")
	})
}

// The weights of queues say which one is asked first.
func TestQueuesAreAskedByTheirWeights(t *testing.T) {
	inBubble(t, policies(perHour(100000)), func(c *dispatch.Config) {
		c.Queues = map[string]int{"high": 30, "low": 10}
	}, func(b *dispatcherFixture) {
		for _, queue := range []string{"high", "low"} {
			for i := range 300 {
				b.enqueue("plain", queue, fmt.Sprint(queue, i))
			}
		}
		n := 0
		for range 320 { // so that neither queue is empty before
			if strings.HasPrefix(b.next(), "high") {
				n++
			}
			time.Sleep(20 * time.Millisecond)
			b.Ended()
		}
		// Draws of a coin with 3 of 4 parts: 1 of 3 million runs is further off.
		off := 5 * math.Sqrt(320*3./4*1/4)
		expect.That(t, math.Abs(float64(n)-240) <= off, n, "of 320 were of the queue with 3 of 4 parts, want 240 within", off)
	})
}

// A take is acknowledged by the next, or after 2.5 s by a call of its own, once its tasks are picked: none goes back.
func TestTakesAreAcknowledged(t *testing.T) {
	inBubble(t, policies(perHour(100)), nil, func(b *dispatcherFixture) {
		b.wait("default", "a", "b", "c")
		b.want("ran", b.run(3), "[a b c]")
		b.Nudge("default", "api")
		b.Next(b.Context())
		time.Sleep(3 * time.Second)
		b.want("acknowledged", b.acknowledged(), 0) // the last take, of nothing, did it
		b.wait("default", "x")
		b.want("ran", b.run(1), "[x]")
		for range 3 {
			time.Sleep(3 * time.Second)
			b.want("acknowledged", b.acknowledged(), 1)
		}
		b.wait("default", "d", "e")
		b.toAsynq.Store(&sitetest.Fault{Is: sitetest.IsPick, Err: errLost})
		b.Next(b.Context())
		time.Sleep(3 * time.Second)
		b.want("acknowledged, and not picked", b.acknowledged(), 1)
		b.toAsynq.Store(nil)
		b.want("ran", b.run(2), "[d e]")
		time.Sleep(3 * time.Second)
		b.want("acknowledged", b.acknowledged(), 2)
		time.Sleep(10 * time.Second)
		b.want("in line", b.inLine(), "[]")
		b.wait("default", "f")
		b.toAsynq.Store(&sitetest.Fault{Is: sitetest.IsPick, Err: errLost})
		b.Next(b.Context())
		ended, end := context.WithCancel(b.Context())
		end()
		b.Close(ended)
		time.Sleep(3 * time.Second)
		b.want("acknowledged, and never picked", b.acknowledged(), 2)
	})
}

// A take is not acknowledged either while only the tasks of one of its two queues are picked.
func TestATakeIsAcknowledgedWhenAllIsPicked(t *testing.T) {
	for _, lost := range []string{"default", "other"} {
		t.Run(lost, func(t *testing.T) {
			inBubble(t, policies(perHour(100)), func(c *dispatch.Config) {
				c.Concurrency, c.Queues = 8, map[string]int{"default": 1 << 30, "other": 1} // in this order
			}, func(b *dispatcherFixture) {
				b.wait("default", "a")
				b.wait("other", "b")
				b.toAsynq.Store(loses(scriptOf("{"+lost+"}:scheduled", ":paused")))
				left := 2
				if _, ok := b.Next(b.Context()); ok { // of the other queue
					left = 1
				}
				time.Sleep(10 * time.Second)
				b.want("acknowledged, and not picked", b.acknowledged(), 0)
				b.toAsynq.Store(nil)
				b.run(left)
				time.Sleep(3 * time.Second)
				b.want("acknowledged", b.acknowledged(), 1)
			})
		})
	}
}

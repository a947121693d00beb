package dispatch_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// recently is how far back hand-outs count as the latest.
const recently = 10 * time.Millisecond

func of(policies ...throttle.Policy) []throttle.Policy { return policies }

func slots(n int) func(*dispatch.Config) { return func(c *dispatch.Config) { c.Concurrency = n } }

// Tasks in line go in their order, as far as they fit, and each brings what it was granted.
func TestLineInOrder(t *testing.T) {
	inBubble(t, of(perHour(3)), slots(8), func(b *bench) {
		b.wait("default", "a", "b", "c", "d")
		b.want("ran", b.run(4), "[a b c none]")
		b.want("in line", b.inLine(), "[d]")
		b.want("used", b.used(), 3)
		b.want("d", b.state("default", "d"), "scheduled")
	})
}

// Rule 1: the reply to a pick is lost. The tasks are active and nobody has them: the same pick is
// asked again, and again nothing else, until it is answered.
func TestPickWhoseReplyWasLost(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprint("only the reply: ", lost), func(t *testing.T) {
			inBubble(t, of(perHour(3)), slots(8), func(b *bench) {
				b.wait("default", "a", "b", "c", "d")
				if lost {
					b.breaks(nil, picks(errLost), nil)
				} else {
					b.breaks(picks(errLost), nil, nil)
				}
				for range 5 {
					if _, ok, err := b.Next(b.Context()); ok || err == nil {
						t.Errorf("a task: %v, %v", ok, err)
					}
				}
				b.want("takes", len(b.asked()), 1)
				b.breaks(nil, nil, nil)
				b.want("ran", b.run(4), "[a b c none]")
				b.want("used", b.used(), 3)
				b.want("told of the limiter", b.failed.Load(), 0)
			})
		})
	}
}

// Rule 1: so too the reply to a dequeue of pending tasks.
func TestDequeueWhoseReplyWasLost(t *testing.T) {
	inBubble(t, nil, slots(8), func(b *bench) {
		b.pending("default", "a", "b", "c")
		b.breaks(nil, calls("", ":lease", errLost), nil)
		if _, ok, err := b.Next(b.Context()); ok || err == nil {
			t.Errorf("a task: %v, %v", ok, err)
		}
		b.breaks(nil, nil, nil)
		b.pending("default", "d")
		b.want("ran", b.run(4), "[a b c d]")
	})
}

// Rule 1: tasks that are ready and for which no slot becomes free go back after half a second, and
// their tickets to their ranks with their units.
func TestReadyTasksGoBack(t *testing.T) {
	for _, row := range []struct {
		name string
		end  func(b *bench)
	}{
		{"no slot", func(b *bench) { time.Sleep(600 * time.Millisecond) }},
		{"stopped", func(b *bench) { b.Stop(); time.Sleep(time.Millisecond) }},
		{"shut down", func(b *bench) { b.Drain(b.Context()) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			inBubble(t, of(perHour(100)), slots(4), func(b *bench) {
				b.wait("default", "a", "b", "c", "d", "e", "f")
				b.pending("default", "p", "q")
				b.want("next", b.next(), "a")
				b.want("ready", b.state("default", "b")+" "+b.state("default", "d"), "active active")
				row.end(b)
				time.Sleep(time.Millisecond)
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

// Rule 1: what was pending goes back to the head of pending.
func TestReadyPendingTasksGoBack(t *testing.T) {
	inBubble(t, nil, slots(3), func(b *bench) {
		b.pending("default", "a", "b", "c", "d")
		b.want("next", b.next(), "a")
		b.want("ready", b.state("default", "b"), "active")
		time.Sleep(600 * time.Millisecond)
		b.want("b and c", b.state("default", "b")+" "+b.state("default", "c"), "pending pending")
		b.want("ran", b.run(3), "[b c d]")
	})
}

// Rule 1: while asynq's Redis is away nothing is forgotten, and what it did meanwhile is undone or
// goes on.
func TestReadyTasksOutlastAnOutage(t *testing.T) {
	inBubble(t, of(perHour(100)), slots(3), func(b *bench) {
		b.wait("default", "a", "b", "c")
		b.want("next", b.next(), "a")
		b.breaks(func(redis.Cmder) error { return errLost }, nil, nil)
		time.Sleep(5 * time.Second)
		b.want("next", b.next(), "b")
		b.breaks(nil, nil, nil)
		time.Sleep(2 * time.Second)
		b.want("c", b.state("default", "c"), "scheduled")
		b.want("in line", b.inLine(), "[c]")
		b.want("ran", b.run(1), "[c]")
	})
}

// Rule 2: a task that is active when its ticket is taken is on its way: its ticket goes back, and
// is taken again shortly.
func TestActiveTaskIsPickedShortly(t *testing.T) {
	inBubble(t, of(perHour(100)), slots(4), func(b *bench) {
		b.wait("default", "a", "b")
		b.client.HSet(b.Context(), "asynq:{default}:t:a", "state", "active")
		time.AfterFunc(50*time.Millisecond, func() {
			b.client.HSet(context.Background(), "asynq:{default}:t:a", "state", "scheduled")
		})
		begun := time.Now()
		b.want("ran", b.run(2), "[b a]")
		if took := time.Since(begun); took > 200*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		b.want("used", b.used(), 2)
	})
}

// Rule 2: one that stays active, as it runs elsewhere, loses its place after a second, and is
// charged nothing.
func TestActiveTaskLeavesAtLast(t *testing.T) {
	inBubble(t, of(perHour(1)), slots(4), func(b *bench) {
		b.wait("default", "a", "b")
		b.client.HSet(b.Context(), "asynq:{default}:t:a", "state", "active")
		begun := time.Now()
		b.want("ran", b.run(1), "[b]")
		if took := time.Since(begun); took < time.Second || took > 3*time.Second {
			t.Errorf("it took %v", took)
		}
		if n := len(b.asked()); n > 20 {
			t.Errorf("%d takes in the meantime", n)
		}
		b.want("in line", b.inLine(), "[]")
		b.want("used", b.used(), 1)
	})
}

// Rule 2: what is gone, has ended, is pending or waits for something else leaves, and its units are
// for the next.
func TestWhatCannotBePickedLeaves(t *testing.T) {
	inBubble(t, of(perHour(1)), slots(4), func(b *bench) {
		b.wait("default", "deleted", "archived", "run by hand", "another", "last")
		b.ok(b.tools.DeleteTask("default", "deleted"))
		b.ok(b.tools.ArchiveTask("default", "archived"))
		b.ok(b.tools.RunTask("default", "run by hand"))
		b.client.HSet(b.Context(), "asynq:{default}:t:another", "sluice_join", "0123456789abcdef.")
		got := b.run(2)
		slices.Sort(got)
		b.want("ran", got, "[last run by hand]")
		b.want("in line", b.inLine(), "[]")
		b.want("used", b.used(), 1)
		b.want("archived", b.state("default", "archived"), "archived")
		b.want("another", b.state("default", "another"), "scheduled")
	})
}

// Rules 2 and 14: of a paused queue nothing is taken, its tickets keep their places, and other
// queues go on.
func TestPausedQueue(t *testing.T) {
	inBubble(t, of(perHour(100)), func(c *dispatch.Config) {
		c.Concurrency, c.Queues = 4, map[string]int{"default": 1, "other": 1}
	}, func(b *bench) {
		b.wait("default", "a", "b")
		b.ok(b.tools.PauseQueue("default"))
		b.wait("other", "x")
		b.want("ran", b.run(2), "[x none]")
		if n := len(b.asked()); n > 12 {
			t.Errorf("%d takes in the meantime", n)
		}
		b.want("used", b.used(), 1)
		b.ok(b.tools.UnpauseQueue("default"))
		b.want("ran", b.run(2), "[a b]")
	})
}

// Rule 8: as many are taken as there are free slots, or as were handed out a moment ago.
func TestHowManyAreTaken(t *testing.T) {
	inBubble(t, of(perHour(1000)), slots(4), func(b *bench) {
		var ids []string
		for i := range 200 {
			ids = append(ids, fmt.Sprintf("t%03d", i))
		}
		b.wait("default", ids...)
		b.want("the first", b.next(), "t000")
		b.want("used, with 4 slots", b.used(), 4)
		b.Ended()
		b.want("ran", b.run(64)[63], "t064")
		before := len(b.asked())
		b.run(64)
		if n := len(b.asked()) - before; n > 2 {
			t.Errorf("%d takes for 64 tasks of no time", n)
		}
		time.Sleep(time.Second)
		used := b.used()
		b.next()
		b.want("used after a pause", b.used()-used, 4)
	})
}

// While tasks are handed out fast the next are made ready in the background, so that slots do not
// wait for Redis.
func TestTasksAreFetchedAhead(t *testing.T) {
	inBubble(t, of(perHour(1000)), slots(16), func(b *bench) {
		var ids []string
		for i := range 100 {
			ids = append(ids, fmt.Sprintf("t%03d", i))
		}
		b.wait("default", ids...)
		b.run(15) // of the 16 that the first take got
		synctest.Wait()
		if n := b.used(); n <= 16 {
			t.Errorf("%d are taken: nothing was fetched ahead", n)
		}
		b.want("ran in order", b.run(50)[49], "t064")
	})
}

// Rule 11: of lines that were found empty one is asked every 5 s, whatever their number, and each
// in turn.
func TestEmptyLinesTakeTurns(t *testing.T) {
	var policies []throttle.Policy
	for i := range 10 {
		policies = append(policies, perHour(1, fmt.Sprint("p", i)))
	}
	inBubble(t, policies, nil, func(b *bench) {
		b.next()
		b.want("asked at first", len(b.asked()), 10)
		for begun := time.Now(); time.Since(begun) < 50*time.Second; {
			b.next()
		}
		asked := b.asked()[10:]
		if len(asked) < 9 || len(asked) > 11 {
			t.Errorf("%d takes in 50 s: %q", len(asked), asked)
		}
		slices.Sort(asked)
		if got := len(slices.Compact(asked)); got < 9 {
			t.Errorf("%d of 10 lines were asked", got)
		}
	})
}

// Lines with work are served in rotation.
func TestLinesTakeTurns(t *testing.T) {
	inBubble(t, of(perHour(100), perHour(100, "other")), nil, func(b *bench) {
		b.wait("default", "a1", "a2", "a3")
		b.waitIn("other", "default", "b1", "b2", "b3")
		var got []string
		for range 6 {
			got = append(got, b.next())
			time.Sleep(20 * time.Millisecond) // so that one is taken at a time
			b.Ended()
		}
		if text := strings.Join(got, " "); text != "a1 b1 a2 b2 a3 b3" && text != "b1 a1 b2 a2 b3 a3" {
			t.Errorf("ran %s", text)
		}
	})
}

// Rule 12: a limiter that is silent holds up pending tasks by 250 ms at most now and then, and is
// no error.
func TestSilentLimiter(t *testing.T) {
	var policies []throttle.Policy
	for i := range 20 {
		policies = append(policies, perHour(1, fmt.Sprint("p", i)))
	}
	inBubble(t, policies, nil, func(b *bench) {
		b.breaks(nil, nil, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		begun := time.Now()
		for i := range 20 {
			b.pending("default", fmt.Sprint("t", i))
			b.want("ran", b.run(1), fmt.Sprintf("[t%d]", i))
			time.Sleep(100 * time.Millisecond)
		}
		if took := time.Since(begun) - 2*time.Second; took > 4*time.Second {
			t.Errorf("20 plain tasks took %v", took)
		}
		if n := len(b.asked()); n > 20 {
			t.Errorf("%d takes in %v", n, time.Since(begun))
		}
		if b.failed.Load() == 0 {
			t.Error("nobody was told")
		}
		b.breaks(nil, nil, nil)
		b.waitIn("p7", "default", "a")
		b.want("ran", b.run(1), "[a]")
	})
}

// Rule 13: a wait ends within a second, and at once when the server stops.
func TestWaitIsBounded(t *testing.T) {
	inBubble(t, of(perHour(1)), func(c *dispatch.Config) {
		c.Poll, c.Queues = time.Hour, map[string]int{"default": 3, "other": 1}
	}, func(b *bench) {
		begun := time.Now()
		for range 10 { // passes over two queues
			for range 2 {
				if _, ok, err := b.Next(b.Context()); ok || err != nil {
					t.Errorf("a task: %v, %v", ok, err)
				}
			}
		}
		if took := time.Since(begun); took < 9*time.Second || took > 11*time.Second {
			t.Errorf("ten passes took %v", took)
		}
		time.AfterFunc(100*time.Millisecond, b.Stop)
		begun = time.Now()
		b.Next(b.Context())
		if took := time.Since(begun); took > 150*time.Millisecond {
			t.Errorf("it ended %v after it was stopped", took-100*time.Millisecond)
		}
	})
}

// Rule 14: three hand-outs from the line earn pending tasks one.
func TestPendingTasksHaveTurns(t *testing.T) {
	inBubble(t, of(perHour(1000)), nil, func(b *bench) {
		var line, pending []string
		for i := range 60 {
			line, pending = append(line, fmt.Sprint("l", i)), append(pending, fmt.Sprint("p", i))
		}
		b.wait("default", line...)
		b.pending("default", pending...)
		n := 0
		for range 40 {
			if strings.HasPrefix(b.next(), "p") {
				n++
			}
			time.Sleep(20 * time.Millisecond)
			b.Ended()
		}
		if n < 9 || n > 11 {
			t.Errorf("%d of 40 were pending, want 10", n)
		}
	})
}

// Under strict order a more important queue's pending tasks go before a less important queue's
// line.
func TestStrictOrder(t *testing.T) {
	inBubble(t, of(perHour(1000)), func(c *dispatch.Config) {
		c.Strict, c.Queues = true, map[string]int{"high": 3, "middle": 2, "low": 1}
	}, func(b *bench) {
		b.pending("low", "low pending")
		b.wait("low", "low line")
		b.pending("middle", "middle pending")
		b.wait("middle", "middle line")
		b.pending("high", "high pending")
		b.wait("high", "high line")
		b.want("ran", strings.Join(b.run(6), ", "), "high line, high pending, middle line, middle pending, low line, low pending")
		b.want("ran", b.run(1), "[none]")
		b.wait("low", "first")
		b.want("ran", b.run(1), "[first]")
		time.Sleep(2 * recently)
		b.wait("low", "second")
		b.pending("high", "urgent")
		b.want("ran", b.run(2), "[urgent second]")
	})
}

// Between queues their weights say who is asked first.
func TestWeightedQueues(t *testing.T) {
	inBubble(t, of(perHour(100000)), func(c *dispatch.Config) {
		c.Queues = map[string]int{"high": 30, "low": 10}
	}, func(b *bench) {
		for _, queue := range []string{"high", "low"} {
			for i := range 300 {
				b.pending(queue, fmt.Sprint(queue, i))
			}
		}
		n := 0
		for range 400 {
			if strings.HasPrefix(b.next(), "high") {
				n++
			}
			time.Sleep(20 * time.Millisecond)
			b.Ended()
		}
		if n < 260 { // of 300, as the queue is empty then
			t.Errorf("%d of 400 were of the queue with 3 of 4 parts", n)
		}
	})
}

// Rule 10: an idle server is woken by a nudge, and starts at once.
func TestNudge(t *testing.T) {
	inBubble(t, of(perHour(100)), func(c *dispatch.Config) { c.Poll = time.Hour }, func(b *bench) {
		b.want("next", b.next(), "none")
		time.AfterFunc(300*time.Millisecond, func() { b.wait("default", "a") })
		begun := time.Now()
		b.want("next", b.next(), "a")
		if took := time.Since(begun); took > 310*time.Millisecond {
			t.Errorf("it started %v after it was enqueued", took-300*time.Millisecond)
		}
		// A server that listens, and has no slot free by now, leaves nudges to others.
		b.Ended()
		b.quiet = true
		time.AfterFunc(300*time.Millisecond, func() {
			b.wait("default", "b")
			b.Expect("api", "default", 0)
		})
		b.want("next", b.next(), "b")
		b.quiet = false
		b.wait("default", "c")
		time.Sleep(10 * time.Millisecond)
		if n := b.client.LLen(b.Context(), "asynq:{default}:sluice:nudge").Val(); n != 1 {
			t.Errorf("%d nudges are left", n)
		}
	})
}

// Who joins while a take is on its way is asked for, although the take's reply knows nothing of it and comes later.
func TestJoinedDuringATake(t *testing.T) {
	inBubble(t, of(perHour(100)), func(c *dispatch.Config) { c.Poll = time.Hour }, func(b *bench) {
		b.quiet = true
		b.want("next", b.next(), "none")
		b.took = func() {
			b.wait("default", "a")
			b.Expect("api", "default", 0)
		}
		b.Nudge("default", "api")
		begun := time.Now()
		b.want("next", b.next(), "a")
		if took := time.Since(begun); took > 100*time.Millisecond {
			t.Errorf("it started after %v", took)
		}
	})
}

// A server that has an appointment and no slot free passes it on.
func TestAppointmentIsPassedOn(t *testing.T) {
	inBubble(t, of(throttle.Policy{Name: "api", Windows: []throttle.Window{{Name: "window", Limit: 1, Period: 2 * time.Second}}}), nil, func(b *bench) {
		b.wait("default", "a", "b")
		b.want("next", b.next(), "a")
		b.client.Del(b.Context(), "asynq:{default}:sluice:nudge")
		time.Sleep(3 * time.Second)
		if n := b.client.LLen(b.Context(), "asynq:{default}:sluice:nudge").Val(); n != 1 {
			t.Errorf("%d nudges for the other servers", n)
		}
	})
}

// Rule 5: a take is acknowledged by the next, or after a second by a call of its own, once its
// tasks are picked; so nobody puts its tickets back.
func TestTakesAreAcknowledged(t *testing.T) {
	inBubble(t, of(perHour(100)), nil, func(b *bench) {
		b.wait("default", "a", "b", "c")
		b.want("ran", b.run(3), "[a b c]")
		b.want("acknowledged", b.acked.Load(), 0)
		for range 3 {
			time.Sleep(2 * time.Second)
			b.want("acknowledged", b.acked.Load(), 1)
		}
		b.wait("default", "d", "e")
		b.breaks(picks(errLost), nil, nil)
		b.Next(b.Context())
		time.Sleep(2 * time.Second)
		b.want("acknowledged, and not picked", b.acked.Load(), 1)
		b.breaks(nil, nil, nil)
		b.want("ran", b.run(2), "[d e]")
		time.Sleep(2 * time.Second)
		b.want("acknowledged", b.acked.Load(), 2)
		time.Sleep(10 * time.Second)
		b.want("in line", b.inLine(), "[]")
	})
}

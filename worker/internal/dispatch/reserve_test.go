package dispatch_test

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// decisions returns how many of the next n tasks were granted, denied, or not decided yet.
func (b *dispatcherFixture) decisions(n int) (granted, denied, open int) {
	b.Helper()
	for range n {
		task, ok := b.Next(b.Context())
		switch {
		case !ok:
			b.Fatal("there is no task")
		case task.Verdict == nil:
			open++
		case task.Verdict.Decision.Granted:
			granted++
		case task.Verdict.Decision.Queued:
			denied++
		}
	}
	return granted, denied, open
}

// Pending tasks are decided when they are dequeued. Those that are denied stand in line by then.
func TestPendingTasksAreDecidedWhenTheyAreDequeued(t *testing.T) {
	inBubble(t, policies(perHour(3)), slots(8), func(b *dispatcherFixture) {
		b.enqueue("throttled", "default", "a", "b", "c", "d", "e")
		granted, denied, open := b.decisions(5)
		b.want("granted, denied, open", []int{granted, denied, open}, "[3 2 0]")
		b.want("used", b.used(), 3)
		b.want("in line", b.inLine(), "[d e]")
	})
}

// What was pending goes back to the head of pending, and what it was granted is refunded.
func TestReadyPendingTasksGiveBack(t *testing.T) {
	inBubble(t, policies(perHour(100)), slots(3), func(b *dispatcherFixture) {
		b.enqueue("throttled", "default", "a", "b", "c", "d")
		b.want("next", b.next(), "a")
		b.want("used", b.used(), 3)
		time.Sleep(600 * time.Millisecond)
		b.want("b and c", b.state("default", "b")+" "+b.state("default", "c"), "pending pending")
		b.want("used", b.used(), 1)
		b.want("ran", b.run(3), "[b c d]")
	})
}

// Nobody waits for a reply that is late, and what it grants is refunded.
func TestAGrantThatComesLateIsRefunded(t *testing.T) {
	const poll = 10 * time.Millisecond
	inBubble(t, policies(perHour(100)), func(c *dispatch.Config) { c.Poll = poll }, func(b *dispatcherFixture) {
		b.next() // the line is empty by now
		b.toLimiter.during(func() { time.Sleep(time.Second) })
		b.enqueue("throttled", "default", "a")
		begun := time.Now()
		_, _, open := b.decisions(1)
		expect.That(t, open == 1, "there was a decision")
		took := time.Since(begun)
		expect.That(t, took <= dispatch.TakeTimeout+poll*3/2, "it took", took) // polls are spread by a half
		b.want("used", b.used(), 1)
		time.Sleep(time.Second)
		b.want("used", b.used(), 0)
	})
}

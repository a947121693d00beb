package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// An idle server is woken by a nudge, and starts at once.
func TestANudgeWakesAnIdleServer(t *testing.T) {
	inBubble(t, policies(perHour(100)), func(c *dispatch.Config) { c.Poll = time.Hour }, func(b *dispatcherFixture) {
		b.want("next", b.next(), "none")
		time.AfterFunc(300*time.Millisecond, func() { b.wait("default", "a") })
		begun := time.Now()
		b.want("next", b.next(), "a")
		expect.Equal(t, time.Since(begun)-300*time.Millisecond, 0, "it started", "after it was enqueued")
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
		expect.Equal(t, b.client.LLen(b.Context(), "asynq:{default}:sluice:nudge").Val(), 1, "nudges are left")
	})
}

// The queues of a Cluster are in slots of their own: one command waits for the nudges of each. Where
// it ends while the server goes on waiting, another one follows.
func TestANudgeWakesAServerOfACluster(t *testing.T) {
	type cluster struct{ *redis.Client }
	inBubble(t, policies(perHour(100)), func(c *dispatch.Config) {
		c.Tasks = asynqredis.New(cluster{c.Tasks.Redis().(*redis.Client)})
		c.Poll, c.Queues = time.Hour, map[string]int{"one": 1, "two": 1}
	}, func(b *dispatcherFixture) {
		b.toAsynq.Store(&sitetest.Fault{
			Is: func(args []any) bool {
				return args[0] == "blpop" && len(args) > len([]string{"blpop", "list", "timeout"})
			},
			Err: errors.New("CROSSSLOT Keys in request don't hash to the same slot"),
		})
		b.want("next", b.next(), "none")
		for _, queue := range []string{"one", "two"} {
			time.AfterFunc(300*time.Millisecond, func() { b.wait(queue, queue) })
			begun := time.Now()
			b.want("next", b.next(), queue)
			b.want("it started after", time.Since(begun), 300*time.Millisecond)
			b.Ended()
		}
	})
}

// One nudge wakes one server. If that one fills its slots, more may fit, and it wakes the next one at once.
func TestAServerWithoutASlotLeftPassesTheNudgeOn(t *testing.T) {
	for tickets, left := range map[int]int64{1: 0, 2: 1} {
		inBubble(t, policies(perHour(100)), func(c *dispatch.Config) { c.Concurrency, c.Poll = 2, time.Hour }, func(b *dispatcherFixture) {
			b.want("next", b.next(), "none")
			time.AfterFunc(300*time.Millisecond, func() { b.wait("default", []string{"a", "b"}[:tickets]...) })
			b.want("next", b.next(), "a")
			time.Sleep(time.Millisecond)
			b.want(fmt.Sprint("nudges with ", tickets), b.client.LLen(b.Context(), "asynq:{default}:sluice:nudge").Val(), left)
		})
	}
}

// A ticket that joins while a take is on its way is asked for, although the take's later reply does not know it.
func TestATicketThatJoinsDuringATakeIsAskedFor(t *testing.T) {
	inBubble(t, policies(perHour(100)), func(c *dispatch.Config) { c.Poll = time.Hour }, func(b *dispatcherFixture) {
		b.quiet = true
		b.want("next", b.next(), "none")
		b.toLimiter.during(func() {
			b.wait("default", "a")
			b.Expect("api", "default", 0)
		})
		b.Nudge("default", "api")
		begun := time.Now()
		b.want("next", b.next(), "a")
		expect.Equal(t, time.Since(begun), 0, "it started after")
	})
}

// Capacity that is given back while a take is on its way is asked for, although the take's reply does not know it.
func TestWhatIsFreedDuringATakeIsAskedFor(t *testing.T) {
	inBubble(t, policies(perHour(1)), func(c *dispatch.Config) { c.Concurrency, c.Poll = 2, time.Hour }, func(b *dispatcherFixture) {
		b.quiet = true
		b.wait("default", "a", "b")
		a, _ := b.Next(b.Context())
		b.toLimiter.during(func() {
			b.ok(expect.ErrOf(a.Verdict.Decision.Reservation.Cancel(b.Context())))
			b.Freed("api")
		})
		b.Nudge("default", "api")
		begun := time.Now()
		b.want("next", b.next(), "b")
		expect.Equal(t, time.Since(begun), 0, "it started after")
	})
}

// A server that stops has others keep its appointments.
func TestAppointmentsArePassedOn(t *testing.T) {
	w := throttle.Window{Name: "window", Limit: 1, Period: 2 * time.Second}
	inBubble(t, policies(throttle.Policy{Name: "api", Windows: []throttle.Window{w}}, perHour(1, "empty")), nil, func(b *dispatcherFixture) {
		b.wait("default", "a", "b")
		b.want("ran", b.run(1), "[a]")
		b.Next(b.Context())
		b.client.Del(b.Context(), "asynq:{default}:sluice:nudge")
		b.Close(b.Context())
		time.Sleep(time.Second)
		b.want("nudges", b.client.LRange(b.Context(), "asynq:{default}:sluice:nudge", 0, -1).Val(), "[api]")
	})
}

// A server whose slots are all taken asks no line. Another one, which is idle, keeps its appointment at most
// three seconds late, whenever the slots were taken.
func TestAnIdleServerKeepsTheAppointmentOfABusyOne(t *testing.T) {
	const period = 10 * time.Second
	w := throttle.Window{Name: "window", Limit: 1, Period: period}
	for _, lead := range []time.Duration{1, 500, 1000, 1400, 1500, 2000, 3000} {
		var config dispatch.Config
		inBubble(t, policies(throttle.Policy{Name: "api", Windows: []throttle.Window{w}}), func(c *dispatch.Config) { config = *c }, func(b *dispatcherFixture) {
			config.Tasks = asynqredis.New(b.client)
			idle := dispatch.New(config)
			defer idle.Close(b.Context())
			idle.Next(b.Context()) // it finds the line empty
			b.quiet = true
			b.wait("default", "a", "b")
			b.want("ran", b.run(1), "[a]")
			due := time.Now().Add(period)
			has, full := context.WithDeadline(b.Context(), due.Add(-lead*time.Millisecond))
			defer full()
			go func() {
				for has.Err() == nil {
					b.Next(has)
				}
			}()
			var task dispatch.Task
			for ok := false; !ok && time.Since(due) < time.Minute; {
				if time.Since(due) < -period/2 { // the busy one has the appointment by then
					time.Sleep(period / 4)
					continue
				}
				task, ok = idle.Next(b.Context())
			}
			late := time.Since(due)
			expect.That(t, task.ID == "b" && late <= 3*time.Second,
				"busy from", lead*time.Millisecond, "before it fits:", task.ID, "started", late, "late")
		})
	}
}

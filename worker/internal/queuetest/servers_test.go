package queuetest

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A server that found a line empty hears of it in time when somebody joins: by a nudge if that was
// a client, as all the time if it was itself.
func TestServersHearOfNews(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name     string
		enqueued bool // by a plain client, so that it joins when it is denied
		period   time.Duration
		tasks    int
	}{
		{"denied", true, 3 * time.Second, 3},
		{"denied, and due soon", true, 300 * time.Millisecond, 2},
		{"enqueued by our client", false, 3 * time.Second, 3},
		{"enqueued by our client, and due soon", false, 300 * time.Millisecond, 2},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := sitetest.Policy(1, row.period)
				p.Windows = append(p.Windows, throttle.Window{Name: "all", Limit: 1000, Period: time.Minute, Scope: throttle.ScopeShared})
				others := make([]throttle.Policy, 20) // with empty lines, which are asked in rotation
				for i := range others {
					others[i] = throttle.Policy{Name: fmt.Sprint("other-", i), Windows: p.Windows}
				}
				s := sitetest.NewInBubble(t, append(others, p)...)
				l := sitetest.NewLedger()
				s.Serve(s.Ok, l.Watch, s.Apart, sitetest.Calm)
				s.Serve(s.Ok, l.Watch, s.Apart, sitetest.Calm)
				time.Sleep(10 * time.Second)
				if row.enqueued {
					s.EnqueueMany("quick", 0, row.tasks)
				} else {
					client := s.Client(s.AnotherLimiter())
					s.JoinMany(client, "quick", 0, row.tasks)
					client.Close()
				}
				s.SleepUntil(l, row.tasks, 20*time.Second)
				s.WantPace(l.Sorted(), sitetest.Spacing, p.Windows...)
				s.WantNobodyInLine()
			})
		})
	}
}

// Servers and clients may share a limiter. One that ends leaves the line to the others.
func TestServersAndClientsShareALimiter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := sitetest.Shared(2, 2*time.Second)
		s := sitetest.NewInBubble(t, p)
		l := sitetest.NewLedger()
		first := s.Client(s.Limiter)
		s.JoinMany(first, "acme", 0, 4)
		one := s.Serve(s.Ok, l.Watch, sitetest.Brisk)
		two := s.Serve(s.Ok, l.Watch, sitetest.Brisk)
		s.JoinMany(first, "acme", 4, 4)
		s.SleepUntil(l, 8, 10*time.Second)
		first.Close()
		s.JoinMany(s.Client(s.Limiter), "acme", 8, 6)
		s.SleepUntil(l, 14, 10*time.Second)
		go two.Shutdown() // which may take as long as the period
		s.EnqueueMany("acme", 14, 6)
		s.SleepUntil(l, 20, 10*time.Second)
		// Each comes within the period of those before it. Tasks of a plain client are found by a poll,
		// which may be late by half of its period.
		s.WantPace(l.Sorted(), sitetest.Spacing+sitetest.BriskPoll*3/2, p.Windows...)
		s.WantNobodyInLine()
		one.Shutdown()
		s.JoinMany(s.Client(s.Limiter), "acme", 20, 4) // there is no server
		s.Serve(s.Ok, l.Watch, sitetest.Brisk)
		s.SleepUntil(l, 24, 10*time.Second)
		s.WantWakes(l, sitetest.DeniedAndRun)
	})
}

// A server is told to stop while it picks tasks. Those that it does not hand out any more go back at
// once.
func TestAServerThatStopsDuringAPickPutsTasksBack(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(10, time.Hour), func(t *testing.T, s *sitetest.Site) {
		l := sitetest.NewLedger()
		whole := s.Asynq
		s.Asynq = hooktest.With(whole, hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if sitetest.IsPick(cmd) {
				time.Sleep(100 * time.Millisecond)
			}
			return err
		}))
		s.JoinMany(s.Client(s.Limiter), "acme", 0, 4)
		server := s.Serve(s.Ok, l.Watch, sitetest.Calm)
		s.Wait("they are picked", func() bool { return s.Counters().Active == 4 })
		server.Shutdown()
		s.WantCounters(sitetest.Counters{Scheduled: 4})
		s.Asynq = whole
		s.Serve(s.Ok, l.Watch, sitetest.Calm, s.Apart)
		s.SleepUntil(l, 4, 2*time.Second)
		s.WantWakes(l, sitetest.OnlyRuns)
	})
}

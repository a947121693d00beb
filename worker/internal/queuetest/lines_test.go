// Package queuetest tests tasks that wait in line: their order, pace and fairness, what holds them
// up, and what changes meanwhile. Read TestBacklogDrains first.
package queuetest

import (
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A backlog of a plain client drains at the rate of the tightest window, in order, and a task
// wakes at most twice: to be denied, and to run. None has a retry to lose.
func TestBacklogDrains(t *testing.T) {
	minuteAndBurst := sitetest.Policy(20, time.Minute)
	minuteAndBurst.Windows = append(minuteAndBurst.Windows, throttle.Window{Name: "burst", Limit: 5, Period: 3 * time.Second})
	type row struct {
		policy throttle.Policy
		tasks  int
		pace   func(*asynq.Config, *worker.Config)
	}
	sitetest.EachBubble(t, map[string]row{
		"20 per minute and 5 per 3 seconds": {minuteAndBurst, 60, sitetest.Calm},
		"20 per second, shared":             {sitetest.Shared(20, time.Second), 100, sitetest.Brisk},
	}, func(t *testing.T, row row) {
		s := sitetest.NewInBubble(t, row.policy)
		s.EnqueueMany("acme", 0, row.tasks, asynq.MaxRetry(0))
		s.Serve(s.Ok, row.pace, s.Apart)
		s.Serve(s.Ok, row.pace, s.Apart)
		w := row.policy.Windows[0]
		s.SleepUntil(row.tasks, 2*time.Duration(row.tasks)*w.Period/time.Duration(w.Limit))
		s.WantWakes(sitetest.DeniedAndRun)
		s.WantPace(sitetest.Spacing, row.policy.Windows...)
		s.WantInOrder()
		s.WantNobodyInLine()
		s.WantCounters(sitetest.Counters{Processed: int64(row.tasks)})
	})
}

// A client alone, whose process ends before any worker's begins, leaves a line that is found.
func TestTheLineOfAClientAloneIsFound(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, 10*time.Second), func(t *testing.T, s *sitetest.Site) {
		s.Fill("acme") // so that none is pending, and only the line tells of them
		client := s.Client(s.AnotherLimiter())
		all := s.JoinMany(client, "acme", 0, 3)
		client.Close()
		s.Serve(s.Ok, sitetest.Brisk, s.Apart)
		s.SleepUntil(3, 35*time.Second)
		s.WantOnTime(all, sitetest.Spacing)
		s.WantWakes(sitetest.OnlyRuns)
		s.WantNobodyInLine()
	})
}

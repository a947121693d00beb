package sitetest

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A task of a plain client wakes to be denied, and to run. One of ours only runs.
const (
	OnlyRuns     = 1
	DeniedAndRun = 2
)

// WantWakes fails if a task came to the middleware more often than that.
func (s *Site) WantWakes(want int) {
	s.Helper()
	wakes := s.Wakes()
	expect.That(s, slices.Max(wakes) <= want, "a task woke", slices.Max(wakes), "times, want", want, "at most:", wakes)
}

// Spacing is the time between two appointments of a line's servers, as line_appointments.lua has it.
const Spacing = 7 * time.Millisecond

// FallbackMin is the shortest time after which workers look at a task in line, as dispatch has it.
const FallbackMin = 2 * time.Minute

// WantPace fails unless each task was granted when the windows had room for it, and at most so much
// later. Tasks of cost 1 wait all the time, for windows that they share.
func (s *Site) WantPace(late time.Duration, windows ...throttle.Window) {
	s.Helper()
	grants := s.Grants()
	for i, g := range grants {
		var fits time.Time
		for _, w := range windows {
			if earlier := i - int(w.Limit); earlier >= 0 && grants[earlier].At.Add(w.Period).After(fits) {
				fits = grants[earlier].At.Add(w.Period)
			}
		}
		if off := g.At.Sub(fits); !fits.IsZero() && (off < 0 || off > late) {
			s.Errorf("%s was granted %v after it fitted: want 0 to %v", g.ID, off, late)
		}
	}
}

// WantOnTime fails unless each task was granted when its client was told, and at most so much later.
func (s *Site) WantOnTime(tasks []worker.EnqueueResult, late time.Duration) {
	s.Helper()
	granted := map[string]time.Time{}
	for _, g := range s.Grants() {
		granted[g.ID] = g.At
	}
	for _, e := range tasks {
		off := granted[e.Info.ID].Sub(e.Start.At)
		expect.That(s, off >= 0 && off <= late, e.Info.ID, "was granted", off, "after it was to start: want 0 to", late)
	}
}

// SleepUntil lets time pass until n tasks were granted, but not for longer than that.
func (s *Site) SleepUntil(n int, most time.Duration) {
	s.Helper()
	for end := time.Now().Add(most); s.Granted() < n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			s.Fatalf("after %v %d of %d tasks were granted: %v\nin the line: %v\n%s",
				most, s.Granted(), n, s.Order(), s.InLine(), s.Logs)
		}
	}
	time.Sleep(time.Second) // until granted tasks have ended
}

// InLine returns the tickets that stand in some line, as QUEUE/ID.
func (s *Site) InLine() (tickets []string) {
	ctx := context.Background()
	for _, key := range s.Redis.Keys(ctx, "sluice:{*}:t").Val() {
		for _, field := range s.Redis.HKeys(ctx, key).Val() {
			queue, id, _ := strings.Cut(field, "/")
			queue, err := url.PathUnescape(queue)
			id, wrong := url.PathUnescape(id)
			expect.Require(s, err == nil && wrong == nil, err, wrong)
			_, queue, _ = strings.Cut(queue, "/") // after the ID of asynq's Redis
			tickets = append(tickets, queue+"/"+id)
		}
	}
	slices.Sort(tickets)
	return tickets
}

// WantNobodyInLine fails if tickets wait, or a key of ours stays for ever.
func (s *Site) WantNobodyInLine() {
	s.Helper()
	for _, key := range s.Redis.Keys(context.Background(), "*sluice*").Val() {
		forEver := s.Redis.PTTL(context.Background(), key).Val() == -1 // in nanoseconds: no TTL
		expect.That(s, !forEver || strings.Contains(key, "{!control}"), key, "does not expire")
	}
	left := s.InLine()
	expect.That(s, len(left) == 0, "left in the line:", left)
}

// The order of tasks that two quick servers have at once, or that are called at one moment, is chance.
const (
	inFlight  = 2 * throttle.MaxTake
	oneMoment = 200 * time.Millisecond
)

// WantInOrder fails unless the tasks of each tenant were granted by their numbers: IDs are TENANT-NUMBER.
func (s *Site) WantInOrder() {
	s.Helper()
	grants := s.Grants()
	number := func(g TaskGrant) int {
		return expect.Got(strconv.Atoi(strings.TrimPrefix(g.ID, g.Tenant+"-")))(s)
	}
	for i, late := range grants {
		for _, early := range grants[:i] {
			apart := late.At.Sub(early.At)
			if early.Tenant == late.Tenant && number(early) > number(late)+inFlight && apart > oneMoment {
				s.Errorf("%s was granted %v after %s", late.ID, apart, early.ID)
				break
			}
		}
	}
}

// EnqueueMany enqueues tasks TENANT-0000, TENANT-0001, ... by a plain client.
func (s *Site) EnqueueMany(tenant string, from, n int, opts ...asynq.Option) {
	s.Helper()
	for i := from; i < from+n; i++ {
		s.Enqueue(worker.NewTask(worker.Identity{Tenant: tenant}, "x", nil),
			append([]asynq.Option{asynq.TaskID(fmt.Sprintf("%s-%04d", tenant, i))}, opts...)...)
	}
}

// JoinMany enqueues tasks TENANT-0000, TENANT-0001, ... by our client.
func (s *Site) JoinMany(
	client *worker.Client, tenant string, from, n int, opts ...asynq.Option,
) (all []worker.EnqueueResult) {
	s.Helper()
	for i := from; i < from+n; i++ {
		var e worker.EnqueueResult
		task := worker.NewTask(worker.Identity{Tenant: tenant}, "x", nil)
		id := asynq.TaskID(fmt.Sprintf("%s-%04d", tenant, i))
		e.Info, e.Err = client.EnqueueContext(context.Background(), task,
			append([]asynq.Option{id, worker.ReportStart(&e.Start)}, opts...)...)
		expect.Require(s, e.Err == nil, e.Err)
		all = append(all, e)
	}
	return all
}

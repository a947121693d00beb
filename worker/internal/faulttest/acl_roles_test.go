package faulttest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	limits "github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

func workOfLimiter(s *sitetest.Site) {
	s.Helper()
	follows(s)
	ctx := s.Context()
	must := func(err error) {
		s.Helper()
		if err != nil {
			s.Error(err)
		}
	}
	r := throttle.Request{Policy: "api", Tenant: "acme", IdempotencyKey: "once"}
	d, err := s.Limiter.Reserve(ctx, r)
	must(err)
	_, err = d.Reservation.Renew(ctx)
	must(err)
	must(d.Reservation.Release(ctx))
	d, err = s.Limiter.Wait(ctx, throttle.Request{Policy: "api", Tenant: "acme"})
	must(err)
	_, err = d.Reservation.Cancel(ctx)
	must(err)
	_, err = d.Reservation.Pause(ctx, time.Millisecond, "")
	must(err)
	must(s.Limiter.Resume(ctx, r))
	line := s.Limiter.Line("api")
	var requests []throttle.Request
	for i := range 8 {
		ticket := throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}
		requests = append(requests, throttle.Request{Tenant: fmt.Sprint("tenant", i%2), Ticket: ticket})
	}
	_, err = line.Join(ctx, requests)
	must(err)
	taken, err := line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 2})
	must(err)
	must(line.PutBack(ctx, taken.Tickets))
	_, err = line.Len(ctx)
	must(err)
	_, err = inspect.Of(s.Limiter).Plan(ctx, []inspect.Demand{{Count: 2, Request: throttle.Request{Policy: "api", Tenant: "acme"}}}, inspect.PlanOptions{})
	must(err)
	must(s.Limiter.SetPolicies(s.Limiter.Policies()))
	_, err = line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 2})
	must(err)
	must(s.Limiter.SetPolicies(nil)) // those that wait are looked for
	for _, r := range requests {
		must(line.Leave(ctx, r.Ticket))
	}
	_, err = line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 2})
	must(err)
}

func workOfClient(s *sitetest.Site) {
	s.Helper()
	follows(s)
	defer serves(s).Shutdown()
	client := s.Client(s.Limiter)
	enqueueAll(s, client)
	if err := client.Ping(); err != nil {
		s.Error(err)
	}
	plain := asynq.NewClient(s.Asynq)
	defer plain.Close()
	if err := plain.Ping(); err != nil {
		s.Error(err)
	}
	firesABatch(s)
	scheduler := asynq.NewScheduler(s.Asynq, &asynq.SchedulerOpts{LogLevel: asynq.FatalLevel})
	if _, err := scheduler.Register("@every 1h", sitetest.AcmeTask()); err != nil {
		s.Fatal(err)
	}
	sitetest.Must(s, scheduler.Start())
	scheduler.Shutdown()
}

// firesABatch has a scheduler of batches enqueue some tasks, pause and resume their
// firing, and tell how far it is. It returns how many tasks there are.
func firesABatch(s *sitetest.Site) (n int) {
	s.Helper()
	of, err := batch.Template{Type: "x", Count: 3}.Tasks()
	sitetest.Must(s, err)
	scheduler, err := batch.NewScheduler(s.Asynq, batch.Config{
		Batches: []batch.Batch{{Name: "b", Tasks: of, Tenants: batch.List("acme", "")}}, Client: worker.ClientConfig{Limiter: s.Limiter},
	})
	sitetest.Must(s, err)
	ctx, cancel := context.WithCancel(s.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = scheduler.Run(ctx) })
	defer func() { cancel(); running.Wait(); scheduler.Close() }()
	f, err := scheduler.Fire(ctx, "b")
	sitetest.Must(s, err)
	is := func(state batch.State) func() bool {
		return func() bool {
			status, err := scheduler.Status(ctx, f)
			return err != nil || status.State == state || status.HasEnded()
		}
	}
	s.Wait("all are enqueued", is(batch.StateRunning))
	_ = scheduler.Pause(ctx, f) // unless they have run
	s.Wait("it is paused", is(batch.StatePaused))
	_ = scheduler.Resume(ctx, f)
	s.Wait("it goes on", is(batch.StateRunning))
	if firings, err := scheduler.Firings(ctx, "b", 1); err != nil || len(firings) != 1 {
		s.Errorf("firings %v, %v", firings, err)
	}
	return 3
}

// enqueueAll enqueues tasks of every kind: some wait, and each of the others ends in its own way.
func enqueueAll(s *sitetest.Site, client *worker.Client) (n int) {
	s.Helper()
	for i, options := range [][]asynq.Option{
		{}, {}, {}, {}, {}, {},
		{asynq.MaxRetry(0)}, {asynq.MaxRetry(1)},
		{asynq.Retention(time.Hour)}, {asynq.Unique(time.Hour)},
		{asynq.ProcessIn(time.Second)}, {asynq.Group("group")},
		{worker.Backlog(1)},
	} {
		task := worker.NewTask(worker.Identity{Tenant: "acme"}, []string{"x", "fails"}[i/6%2], fmt.Append(nil, i))
		_, err := client.EnqueueContext(s.Context(), task, options...)
		if full := (*throttle.BacklogError)(nil); errors.As(err, &full) {
			continue
		}
		if err != nil {
			s.Error(err)
		}
		n++
	}
	return n
}

func workOfWorker(s *sitetest.Site) {
	s.Helper()
	follows(s)
	failed := errors.New("fails")
	server := s.Serve(func(ctx context.Context, task *asynq.Task) error {
		if _, err := task.ResultWriter().Write([]byte("result")); err != nil && task.Type() != "group" {
			s.Error(err)
		}
		if n := asynqRetried(ctx); task.Type() == "fails" && n == 0 {
			return failed
		}
		return s.Ok(ctx, task)
	}, func(c *asynq.Config, _ *worker.Config) {
		c.GroupGracePeriod = time.Second
		c.GroupAggregator = asynq.GroupAggregatorFunc(func(_ string, tasks []*asynq.Task) *asynq.Task {
			return worker.NewTask(worker.Identity{Tenant: "acme"}, "group", nil)
		})
	})
	if err := server.Ping(); err != nil {
		s.Error(err)
	}
	for i := range 6 {
		s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", fmt.Append(nil, "plain", i)))
	}
	n := 6 + enqueueAll(s, s.Client(s.Limiter)) + firesABatch(s)
	s.Wait("all but the one without retries have run", func() bool { return s.Done() >= n-1 })
	s.Wait("none is active", func() bool { c := s.Counters(); return c.Active == 0 && c.Archived == 1 })
	if n, err := s.Limiter.Line("api").Len(s.Context()); err != nil || n != 0 { // for metrics
		s.Errorf("%d wait, %v", n, err)
	}
}

func asynqRetried(ctx context.Context) int {
	n, _ := asynq.GetRetryCount(ctx)
	return n
}

// serves starts a server by another user, of a queue without tasks, until Redis shows it.
func serves(s *sitetest.Site) *asynq.Server {
	s.Helper()
	config := asynq.Config{Queues: map[string]int{"other": 1}, LogLevel: asynq.FatalLevel}
	as := sitetest.Dialed{Options: sitetest.SameRedis(s.Redis)}
	server := asynq.NewServer(as, config)
	sitetest.Must(s, server.Start(asynq.HandlerFunc(s.Ok)))
	inspector := asynq.NewInspector(as)
	defer inspector.Close()
	s.Wait("a server is shown", func() bool { servers, err := inspector.Servers(); return err != nil || len(servers) > 0 })
	return server
}

func workOfOperator(s *sitetest.Site) {
	s.Helper()
	must := func(err error) {
		s.Helper()
		if err != nil {
			s.Error(err)
		}
	}
	for _, state := range []string{"archived", "scheduled", "retry"} {
		if state == "scheduled" {
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(state), asynq.ProcessIn(time.Hour))
			continue
		}
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(state))
	}
	defer serves(s).Shutdown()
	_, err := s.Limiter.CheckRedis(s.Context()) // as `sluice doctor` does
	must(err)
	i := inspectorAs(s)
	s.Wait("a server is shown", func() bool { servers, err := i.Servers(); return err != nil || len(servers) > 0 })
	_, err = i.Queues()
	must(err)
	_, err = i.GetQueueInfo("default")
	must(err)
	_, err = i.History("default", 3)
	must(err)
	must(i.PauseQueue("default"))
	must(i.UnpauseQueue("default"))
	must(i.ArchiveTask("default", "archived"))
	must(i.RunTask("default", "archived"))
	must(i.ArchiveTask("default", "retry"))
	must(i.DeleteTask("default", "retry"))
	_, err = i.ListPendingTasks("default")
	must(err)
	_, err = i.ListScheduledTasks("default")
	must(err)
	_, err = i.ListArchivedTasks("default")
	must(err)
	_, err = i.RunAllScheduledTasks("default")
	must(err)
	_, err = i.ArchiveAllPendingTasks("default")
	must(err)
	_, err = i.DeleteAllArchivedTasks("default")
	must(err)
	_, err = i.Servers()
	must(err)
	_, err = i.SchedulerEntries()
	must(err)
	_, err = i.ListSchedulerEnqueueEvents("none")
	must(err)
	must(i.CancelProcessing("nobody"))
	must(s.Limiter.Resume(s.Context(), throttle.Request{Policy: "api", Tenant: "acme"}))
	_, err = inspect.Of(s.Limiter).State(s.Context(), inspect.Query{Policy: "api"})
	must(err)
	_, err = inspect.Of(s.Limiter).Explain(s.Context(), "api", throttle.Ticket{Queue: "default", ID: "none"})
	must(err)
	must(s.Client(s.Limiter).Ping())
	must(i.DeleteQueue("default", true))
	by, of := limits.By{Who: "ops", Why: "a test"}, store(s)
	_, err = of.Publish(s.Context(), s.Limiter.Policies(), 0, by)
	must(err)
	must(of.Pause(s.Context(), "api", "acme", time.Minute, by))
	_, err = of.Resume(s.Context(), "api", "acme", by)
	must(err)
	_, err = s.Limiter.Reset(s.Context(), "api", "")
	must(err)
	_, err = worker.Drop(s.Context(), s.Asynq, s.Limiter, worker.DropOptions{Policy: "api", Tenant: "acme"})
	must(err)
	changes, err := of.Changes(s.Context(), "", 10)
	must(err)
	if len(changes) != 3 {
		s.Errorf("the log: %+v", changes)
	}
}

// inspectorAs is an inspector by the site's user.
func inspectorAs(s *sitetest.Site) *asynq.Inspector {
	i := asynq.NewInspector(s.Asynq)
	s.Cleanup(func() { i.Close() })
	return i
}

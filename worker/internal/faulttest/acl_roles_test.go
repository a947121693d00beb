package faulttest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	limits "github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/inspect"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// errOf is the error of a call that returns something beside it.
func errOf[T any](_ T, err error) error { return err }

// wantAllowed reports the error of a call by the role's user, and goes on.
func wantAllowed(s *sitetest.Site, err error) {
	s.Helper()
	expect.That(s, err == nil, err)
}

func workOfLimiter(s *sitetest.Site) {
	s.Helper()
	follows(s)
	ctx := s.Context()
	must := func(err error) { s.Helper(); wantAllowed(s, err) }
	r := throttle.Request{Policy: "api", Tenant: "acme"}
	d := expect.Got(s.Limiter.Reserve(ctx, r))(s)
	must(errOf(d.Reservation.Renew(ctx)))
	must(d.Reservation.Release(ctx))
	d = expect.Got(s.Limiter.Wait(ctx, throttle.Request{Policy: "api", Tenant: "acme"}))(s)
	must(errOf(d.Reservation.Cancel(ctx)))
	must(errOf(d.Reservation.Pause(ctx, time.Millisecond, "")))
	must(s.Limiter.Resume(ctx, r))
	line := s.Limiter.Line("api")
	var requests []throttle.Request
	for i := range 8 {
		ticket := throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}
		requests = append(requests, throttle.Request{Tenant: fmt.Sprint("tenant", i%2), Ticket: ticket})
	}
	must(errOf(line.Join(ctx, requests)))
	taken := expect.Got(line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 2}))(s)
	must(line.PutBack(ctx, taken.Tickets))
	must(errOf(line.Len(ctx)))
	must(errOf(inspect.Of(s.Limiter).Snapshot(ctx, []inspect.Demand{{Count: 2, Request: throttle.Request{Policy: "api", Tenant: "acme"}}})))
	must(s.Limiter.SetPolicies(s.Limiter.Policies()))
	must(errOf(line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 2})))
	must(s.Limiter.SetPolicies(nil)) // those that wait are looked for
	for _, r := range requests {
		must(line.Leave(ctx, r.Ticket))
	}
	must(errOf(line.Take(ctx, throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 2})))
}

func workOfClient(s *sitetest.Site) {
	s.Helper()
	follows(s)
	defer serves(s).Shutdown()
	client := s.Client(s.Limiter)
	enqueueAll(s, client)
	wantAllowed(s, client.Ping())
	plain := asynq.NewClient(s.Asynq)
	defer plain.Close()
	wantAllowed(s, plain.Ping())
	firesABatch(s)
	scheduler := asynq.NewScheduler(s.Asynq, &asynq.SchedulerOpts{LogLevel: asynq.FatalLevel})
	expect.Must(s, expect.ErrOf(scheduler.Register("@every 1h", sitetest.AcmeTask())))
	expect.Must(s, scheduler.Start())
	scheduler.Shutdown()
}

// firesABatch has a scheduler enqueue tasks, pause and resume their firing, and tell how far it is: so many tasks.
func firesABatch(s *sitetest.Site) (n int) {
	s.Helper()
	tasks := expect.Got(batch.Template{Type: "x", Count: 3}.Tasks())(s)
	scheduler, err := batch.NewScheduler(s.Asynq, batch.Config{
		Batches: []batch.Batch{{Name: "b", Tasks: tasks, Tenants: batch.List("acme", "")}}, Client: worker.ClientConfig{Limiter: s.Limiter},
	})
	expect.Must(s, err)
	ctx, cancel := context.WithCancel(s.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = scheduler.Run(ctx) })
	defer func() { cancel(); running.Wait(); scheduler.Close() }()
	f := expect.Got(scheduler.Fire(ctx, "b"))(s)
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
	expect.Equal(s, len(expect.Got(scheduler.Firings(ctx, "b", 1))(s)), 1, "firings")
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
		if errors.As(err, new(*throttle.DeniedError)) {
			continue
		}
		expect.That(s, err == nil, err)
		n++
	}
	return n
}

func workOfWorker(s *sitetest.Site) {
	s.Helper()
	follows(s)
	failed := errors.New("fails")
	server := s.Serve(func(ctx context.Context, task *asynq.Task) error {
		_, err := task.ResultWriter().Write([]byte("result"))
		expect.That(s, err == nil || task.Type() == "group", err)
		if n, _ := asynq.GetRetryCount(ctx); task.Type() == "fails" && n == 0 {
			return failed
		}
		return s.Ok(ctx, task)
	}, func(c *asynq.Config, _ *worker.Config) {
		c.GroupGracePeriod = time.Second
		c.GroupAggregator = asynq.GroupAggregatorFunc(func(_ string, tasks []*asynq.Task) *asynq.Task {
			return worker.NewTask(worker.Identity{Tenant: "acme"}, "group", nil)
		})
	})
	wantAllowed(s, server.Ping())
	for i := range 6 {
		s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", fmt.Append(nil, "plain", i)))
	}
	n := 6 + enqueueAll(s, s.Client(s.Limiter)) + firesABatch(s)
	s.Wait("all but the one without retries have run", func() bool { return s.Done() >= n-1 })
	s.Wait("none is active", func() bool { c := s.Counters(); return c.Active == 0 && c.Archived == 1 })
	expect.Equal(s, expect.Got(s.Limiter.Line("api").Len(s.Context()))(s), 0, "wait, for metrics")
}

// serves starts a server by another user, of a queue without tasks, until Redis shows it.
func serves(s *sitetest.Site) *asynq.Server {
	s.Helper()
	config := asynq.Config{Queues: map[string]int{"other": 1}, LogLevel: asynq.FatalLevel}
	as := sitetest.Dialed{Options: sitetest.SameRedis(s.Redis)}
	server := asynq.NewServer(as, config)
	expect.Must(s, server.Start(asynq.HandlerFunc(s.Ok)))
	inspector := asynq.NewInspector(as)
	defer inspector.Close()
	s.Wait("a server is shown", func() bool { servers, err := inspector.Servers(); return err != nil || len(servers) > 0 })
	return server
}

func workOfOperator(s *sitetest.Site) {
	s.Helper()
	must := func(err error) { s.Helper(); wantAllowed(s, err) }
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("archived"))
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("retry"))
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("scheduled"), asynq.ProcessIn(time.Hour))
	defer serves(s).Shutdown()
	must(errOf(s.Limiter.CheckRedis(s.Context()))) // as `sluice doctor` does
	i := inspectorAs(s)
	s.Wait("a server is shown", func() bool { servers, err := i.Servers(); return err != nil || len(servers) > 0 })
	must(errOf(i.Queues()))
	must(errOf(i.GetQueueInfo("default")))
	must(errOf(i.History("default", 3)))
	must(i.PauseQueue("default"))
	must(i.UnpauseQueue("default"))
	must(i.ArchiveTask("default", "archived"))
	must(i.RunTask("default", "archived"))
	must(i.ArchiveTask("default", "retry"))
	must(i.DeleteTask("default", "retry"))
	must(errOf(i.ListPendingTasks("default")))
	must(errOf(i.ListScheduledTasks("default")))
	must(errOf(i.ListArchivedTasks("default")))
	must(errOf(i.RunAllScheduledTasks("default")))
	must(errOf(i.ArchiveAllPendingTasks("default")))
	must(errOf(i.DeleteAllArchivedTasks("default")))
	must(errOf(i.Servers()))
	must(errOf(i.SchedulerEntries()))
	must(errOf(i.ListSchedulerEnqueueEvents("none")))
	must(i.CancelProcessing("nobody"))
	must(s.Limiter.Resume(s.Context(), throttle.Request{Policy: "api", Tenant: "acme"}))
	must(errOf(inspect.Of(s.Limiter).State(s.Context(), inspect.Query{Policy: "api"})))
	must(errOf(inspect.Of(s.Limiter).Explain(s.Context(), throttle.Ticket{Queue: "default", ID: "none"})))
	must(s.Client(s.Limiter).Ping())
	must(i.DeleteQueue("default", true))
	author, controls := limits.Author{Who: "ops", Why: "a test"}, store(s)
	must(errOf(controls.Publish(s.Context(), s.Limiter.Policies(), 0, author)))
	must(controls.Pause(s.Context(), "api", "acme", time.Minute, author))
	must(errOf(controls.End(s.Context(), limits.Resumed, "api", "acme", author)))
	must(errOf(s.Limiter.Reset(s.Context(), "api", "")))
	must(errOf(s.Client(s.Limiter).Drop(s.Context(), worker.DropOptions{Policy: "api", Tenant: "acme"})))
	changes := expect.Got(controls.Changes(s.Context(), 10))(s)
	expect.That(s, len(changes) == 3, "the log:", changes)
}

// inspectorAs is an inspector by the site's user.
func inspectorAs(s *sitetest.Site) *asynq.Inspector {
	i := asynq.NewInspector(s.Asynq)
	s.Cleanup(func() { i.Close() })
	return i
}

package faulttest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	limits "github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/batch"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// usersOfDocs returns the users that the docs create, by their names: the words of ACL SETUSER.
func usersOfDocs(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/howto/lock-down-redis.md")
	if err != nil {
		t.Fatal(err)
	}
	users := map[string][]string{}
	for _, user := range regexp.MustCompile(`(?m)^ACL SETUSER (.*\\\n)*.*$`).FindAllString(string(text), -1) {
		words := strings.Fields(strings.ReplaceAll(user, "\\\n", " "))
		users[words[2]] = words
	}
	return users
}

// commandsOfScripts returns the commands that our scripts call.
func commandsOfScripts(t *testing.T, dirs ...string) map[string]bool {
	t.Helper()
	commands := map[string]bool{}
	for _, dir := range dirs {
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(dir + "/" + file.Name())
			if err != nil {
				t.Fatal(err)
			}
			for _, call := range regexp.MustCompile(`(?:redis\.p?call|call_in_parts)\('(\w+)'`).FindAllStringSubmatch(string(text), -1) {
				commands[strings.ToLower(call[1])] = true
			}
		}
	}
	return commands
}

// Each role does its work by the user that the docs give it, and Redis refuses nothing. What the
// user may call is called by the role, or by one of our scripts.
func TestARoleNeedsNoMoreThanItsUser(t *testing.T) {
	t.Parallel()
	users := usersOfDocs(t)
	limiter := commandsOfScripts(t, "../../../throttle/internal/script/lua")
	both := commandsOfScripts(t, "../../../throttle/internal/script/lua", "../asynqredis/lua")
	for _, role := range []struct {
		user    string
		scripts map[string]bool
		without string // a command to forbid beyond the docs
		work    func(s *sitetest.Site)
	}{
		{"sluice-limiter", limiter, "", workOfLimiter},
		{"sluice-client", both, "", workOfClient},
		{"sluice-worker", both, "", workOfWorker},
		{"sluice-worker", both, "blpop", workOfWorker},
		{"sluice-operator", limiter, "", workOfOperator},
	} {
		t.Run(role.user+" without "+role.without, func(t *testing.T) {
			t.Parallel()
			var args []string
			for _, command := range []string{"FLUSHALL", "FLUSHDB", "KEYS", "DEBUG"} {
				args = append(args, "--rename-command", command, "")
			}
			admin := throttletest.Client(t, throttletest.Redis(t, args...))
			user, ok := users[role.user]
			if !ok {
				t.Fatalf("the docs have no user %s", role.user)
			}
			setUser(t, admin, user)
			if role.without != "" {
				setUser(t, admin, []string{"ACL", "SETUSER", role.user, "-" + role.without})
			}
			if err := admin.ConfigResetStat(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			as := sitetest.SameRedis(admin)
			as.Username, as.Password = role.user, "SECRET"
			client := redis.NewClient(as)
			defer client.Close()
			s := sitetest.New(t, client, everyAlgorithm())
			s.Asynq, s.Redis = sitetest.Dialed{Options: as}, admin
			role.work(s)
			wantRefused(t, admin, role.without)
			called := commandsCalled(t, admin)
			for _, word := range user {
				command, allowed := strings.CutPrefix(word, "+")
				if allowed && command != role.without && !role.scripts[command] && !called[command] {
					t.Errorf("%s may call %s, and need not", role.user, command)
				}
			}
		})
	}
}

func setUser(t *testing.T, admin *redis.Client, words []string) {
	t.Helper()
	args := make([]any, len(words))
	for i, word := range words {
		args[i] = word
	}
	if err := admin.Do(t.Context(), args...).Err(); err != nil {
		t.Fatal(err)
	}
}

// wantRefused fails if Redis refused anything but that command. The client library ignores that it
// may not introduce itself.
func wantRefused(t *testing.T, admin *redis.Client, command string) {
	t.Helper()
	log, err := admin.ACLLog(t.Context(), 100).Result()
	if err != nil {
		t.Fatal(err)
	}
	refused := false
	for _, entry := range log {
		object := strings.ToLower(entry.Object)
		refused = refused || object == command
		if object != command && !strings.HasPrefix(object, "client|") && object != "info" {
			t.Errorf("refused: %s %s, %s", entry.Reason, entry.Object, entry.Context)
		}
	}
	if command != "" && !refused {
		t.Errorf("%s was not called", command)
	}
}

// commandsCalled returns the commands that Redis has run, also in scripts.
func commandsCalled(t *testing.T, admin *redis.Client) map[string]bool {
	t.Helper()
	text, err := admin.Info(t.Context(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	called := map[string]bool{}
	for _, stat := range regexp.MustCompile(`cmdstat_(\S+?):calls=`).FindAllStringSubmatch(text, -1) {
		called[stat[1]] = true
	}
	return called
}

// everyAlgorithm is a policy over every task type, with a window of each kind.
func everyAlgorithm() throttle.Policy {
	return throttle.Policy{
		Name: "api", Match: []string{"*"}, Upstream: throttle.UpstreamTenant,
		Windows: []throttle.Window{
			{Name: "sliding", Limit: 4, Period: 200 * time.Millisecond},
			{Name: "fixed", Algorithm: throttle.Fixed, Limit: 100, Period: time.Minute, Scope: throttle.Shared},
			{Name: "gcra", Algorithm: throttle.GCRA, Limit: 1000, Period: time.Minute, Burst: 1000, Scope: throttle.Shared},
			{Name: "slots", Algorithm: throttle.Concurrency, Limit: 3, Scope: throttle.Shared},
			{Name: "calendar", Algorithm: throttle.Calendar, Limit: 1000, Resets: "@daily", Scope: throttle.Shared},
		},
	}
}

// store is that of the site, by its user.
func store(s *sitetest.Site) *limits.Store {
	s.Helper()
	client := s.Asynq.MakeRedisClient().(redis.UniversalClient)
	s.Cleanup(func() { client.Close() })
	store, err := limits.NewStore(client, "")
	if err != nil {
		s.Fatal(err)
	}
	return store
}

// follows has the limiter follow what is published.
func follows(s *sitetest.Site) {
	s.Helper()
	f, err := limits.Follow(s.Context(), limits.FollowConfig{Limiter: s.Limiter, Store: store(s)})
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { f.Close() })
}

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
	_, err = s.Limiter.Pause(ctx, r, time.Millisecond, "")
	must(err)
	must(s.Limiter.Resume(ctx, r))
	line := s.Limiter.Line("api")
	var requests []throttle.Request
	for i := range 8 {
		requests = append(requests, throttle.Request{Tenant: fmt.Sprint("tenant", i%2), Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}})
	}
	_, err = line.Join(ctx, requests)
	must(err)
	taken, err := line.Take(ctx, throttle.TakeOptions{Queues: []string{"q"}, Max: 2})
	must(err)
	must(line.PutBack(ctx, taken.Tickets))
	_, err = line.Len(ctx)
	must(err)
	_, err = line.Plan(ctx, []throttle.Demand{{Count: 2, Request: throttle.Request{Tenant: "acme"}}}, throttle.PlanOptions{})
	must(err)
	must(s.Limiter.SetPolicies(s.Limiter.Policies()))
	_, err = line.Take(ctx, throttle.TakeOptions{Queues: []string{"q"}, Max: 2})
	must(err)
	must(s.Limiter.SetPolicies(nil)) // those that wait are looked for
	for _, r := range requests {
		must(line.Leave(ctx, r.Ticket))
	}
	_, err = line.Take(ctx, throttle.TakeOptions{Queues: []string{"q"}, Max: 2})
	must(err)
}

func workOfClient(s *sitetest.Site) {
	s.Helper()
	follows(s)
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
	if err := scheduler.Start(); err != nil {
		s.Fatal(err)
	}
	scheduler.Shutdown()
}

// firesABatch has a scheduler of batches enqueue some tasks, pause and resume their
// firing, and tell how far it is. It returns how many tasks there are.
func firesABatch(s *sitetest.Site) (n int) {
	s.Helper()
	of, err := batch.Template{Type: "x", Count: 3}.Tasks()
	if err != nil {
		s.Fatal(err)
	}
	scheduler, err := batch.NewScheduler(s.Asynq, batch.Config{
		Batches: []batch.Batch{{Name: "b", Tasks: of, Tenants: batch.List("acme", "")}}, Client: worker.ClientConfig{Limiter: s.Limiter},
	})
	if err != nil {
		s.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = scheduler.Run(ctx) })
	defer func() { cancel(); running.Wait(); scheduler.Close() }()
	f, err := scheduler.Fire(ctx, "b")
	if err != nil {
		s.Fatal(err)
	}
	is := func(state batch.State) func() bool {
		return func() bool {
			status, err := scheduler.Status(ctx, f)
			return err != nil || status.State == state || status.HasEnded()
		}
	}
	s.Wait("all are enqueued", is(batch.Running))
	_ = scheduler.Pause(ctx, f) // unless they have run
	s.Wait("it is paused", is(batch.Paused))
	_ = scheduler.Resume(ctx, f)
	s.Wait("it goes on", is(batch.Running))
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
	var done sitetest.Counted
	failed := errors.New("fails")
	server := s.Serve(func(ctx context.Context, task *asynq.Task) error {
		if _, err := task.ResultWriter().Write([]byte("result")); err != nil && task.Type() != "group" {
			s.Error(err)
		}
		if n := asynqRetried(ctx); task.Type() == "fails" && n == 0 {
			return failed
		}
		return done.Handle(ctx, task)
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
	s.Wait("all but the one without retries have run", func() bool { return done.Done() >= n-1 })
	s.Wait("none is active", func() bool { c := s.Counters(); return c.Active == 0 && c.Archived == 1 })
	if n, err := s.Limiter.Line("api").Len(s.Context()); err != nil || n != 0 { // for metrics
		s.Errorf("%d wait, %v", n, err)
	}
}

func asynqRetried(ctx context.Context) int {
	n, _ := asynq.GetRetryCount(ctx)
	return n
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
	other := asynq.NewServer(sitetest.Dialed{Options: sitetest.SameRedis(s.Redis)}, asynq.Config{Queues: map[string]int{"other": 1}, LogLevel: asynq.FatalLevel})
	must(other.Start(asynq.HandlerFunc(s.Ok)))
	defer other.Shutdown()
	i := inspectorAs(s)
	s.Wait("a server is shown", func() bool { servers, err := i.Servers(); return err != nil || len(servers) > 0 })
	_, err := i.Queues()
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
	_, err = s.Limiter.Pause(s.Context(), throttle.Request{Policy: "api", Tenant: "acme"}, time.Minute, "")
	must(err)
	must(s.Limiter.Resume(s.Context(), throttle.Request{Policy: "api", Tenant: "acme"}))
	_, err = s.Limiter.State(s.Context(), throttle.StateRequest{Policy: "api"})
	must(err)
	_, err = s.Limiter.Explain(s.Context(), "api", throttle.Ticket{Queue: "default", ID: "none"})
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

package worker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A fault makes some calls fail.
type fault struct {
	is   func(args []any) bool
	hits func(n int) bool // by the number of such calls, from 1
	lost bool             // the call arrives, and its reply does not
	err  error

	mu    sync.Mutex
	calls int
	hit   int
}

func with(value string) func([]any) bool {
	return func(args []any) bool { return slices.Contains(args, any(value)) }
}

// isRequeue recognises the requeue of a task that was denied.
func isRequeue(args []any) bool {
	return with("asynq:{default}:scheduled")(args) && args[2] == 4 && args[3] == "asynq:{default}:active" && args[6] != "asynq:{default}:pending"
}

func only(n int) func(int) bool { return func(call int) bool { return call == n } }

func (f *fault) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if !f.is(cmd.Args()) {
		return next(ctx, cmd)
	}
	if f.lost {
		if err := next(ctx, cmd); err != nil {
			return err // that Redis does not know the script yet
		}
	}
	f.mu.Lock()
	f.calls++
	hit := f.hits(f.calls)
	if hit {
		f.hit++
	}
	f.mu.Unlock()
	switch {
	case hit:
		cmd.SetErr(f.err)
		return f.err
	case f.lost:
		return nil
	}
	return next(ctx, cmd)
}

func (f *fault) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hit
}

// isForward recognises the move of tasks to retry that are due.
func isForward(args []any) bool {
	return len(args) > 5 && args[2] == 3 && args[3] == "asynq:{default}:retry" && args[4] == "asynq:{default}:scheduled"
}

// Waiting costs nothing on a first attempt without retries, and before the last attempt of a task
// that has failed, even if calls fail in the meantime. Real failures are counted as they are
// without throttling.
func TestFaultsCostNothing(t *testing.T) {
	for name, row := range map[string]struct {
		limiter bool // it is a call of the limiter
		lost    bool
		err     error
	}{
		"asynq's is not sent":   {false, false, io.ErrUnexpectedEOF},
		"asynq's reply lost":    {false, true, io.EOF},
		"asynq's is refused":    {false, false, errors.New("READONLY You can't write against a read only replica.")},
		"limiter's is not sent": {true, false, io.ErrClosedPipe},
		"limiter's reply lost":  {true, true, io.EOF},
		"limiter's is refused":  {true, false, errors.New("OOM command not allowed when used memory > 'maxmemory'.")},
		"limiter's reply wrong": {true, false, redis.Nil},
	} {
		// Before it waits, and all the retries there are: the task is denied, and requeued, or due,
		// and joins.
		for _, failures := range []int{0, 1} {
			t.Run(fmt.Sprintf("%s after %d failures", name, failures), func(t *testing.T) {
				each(t, []throttle.Policy{policy(1, time.Hour)}, func(t *testing.T, s *site) {
					f := &fault{is: []func([]any) bool{isRequeue, isForward}[failures], lost: row.lost, err: row.err, hits: only(1)}
					if row.limiter {
						f.is = with([]string{"reserve", "join"}[failures])
						client := connect(like(s.redis))
						defer client.Close()
						client.AddHook(hooktest.Hook(f.see))
						s.limiter = s.limiterOn(client)
					} else {
						s.asynq = hooktest.With(s.asynq, hooktest.Hook(f.see))
					}
					if failures == 0 {
						if d, err := s.limiterOn(s.redis).Reserve(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"}); err != nil || !d.Granted {
							t.Fatal(d, err)
						}
					}
					s.enqueue(acmeTask(), asynq.TaskID("a"), asynq.MaxRetry(failures))
					server := s.serve(func(ctx context.Context, task *asynq.Task) error {
						s.ok(ctx, task)
						if failures > 0 {
							return errors.New("boom")
						}
						return nil
					})
					s.wait("it waits in line", func() bool {
						return f.count() == 1 && s.task("a").State == asynq.TaskStateScheduled && len(s.inLine()) == 1
					})
					last := []string{"throttled: api", "boom"}[failures]
					if task := s.task("a"); task.Retried != failures || !strings.HasPrefix(task.LastErr, last) || len(s.runs()) != failures {
						t.Errorf("%d retries, last error %q, ran %d times", task.Retried, task.LastErr, len(s.runs()))
					}
					s.wantCounters(counters{Processed: int64(failures), Failed: int64(failures), Scheduled: 1})
					s.open("a")
					if failures == 0 {
						s.waitGone("a")
						s.wantCounters(counters{Processed: 1})
						s.wantReported(nil, nil)
					} else {
						s.waitState(asynq.TaskStateArchived, "a")
						s.wantCounters(counters{Processed: 2, Failed: 2, Archived: 1})
						s.wantReported([]string{"boom", "boom"}, []string{"boom"})
						if task := s.task("a"); task.Retried != 1 || task.LastErr != "boom" {
							t.Errorf("archived after %d retries by %q", task.Retried, task.LastErr)
						}
					}
					if n := len(s.runs()); n != failures+1 || s.used() != 2 {
						t.Errorf("ran %d times, %d used", n, s.used())
					}
					s.wait("no attempt is remembered", func() bool { return server.Adapter().Attempts() == 0 })
					s.wantNobodyInLine()
				})
			})
		}
	}
}

// However an attempt ends that was granted, what it was granted stays granted, once, the task fails
// as it does without throttling, and nothing is remembered of it.
func TestAttemptsThatEndBadly(t *testing.T) {
	each(t, []throttle.Policy{policy(100, time.Hour)}, func(t *testing.T, s *site) {
		end := make(chan struct{})
		t.Cleanup(func() { close(end) })
		server := s.serve(func(ctx context.Context, task *asynq.Task) error {
			s.ok(ctx, task)
			switch id, _ := asynq.GetTaskID(ctx); id {
			case "panics":
				panic("oh")
			case "cancelled":
				<-ctx.Done()
				return ctx.Err()
			}
			<-end // it does not look at its context
			return nil
		})
		ids := []string{"cancelled", "ignores", "outlives", "panics"}
		for _, id := range ids {
			opts := []asynq.Option{asynq.TaskID(id), asynq.MaxRetry(0)}
			if id == "outlives" {
				opts = append(opts, asynq.Timeout(time.Second))
			}
			s.enqueue(acmeTask(), opts...)
		}
		s.wait("all run", func() bool { return len(s.runs()) == 4 })
		s.wait("they are cancelled", func() bool { // asynq may not listen yet
			s.inspector.CancelProcessing("cancelled")
			s.inspector.CancelProcessing("ignores")
			return s.task("cancelled").State == asynq.TaskStateArchived && s.task("ignores").State == asynq.TaskStateArchived
		})
		s.waitState(asynq.TaskStateArchived, ids...)
		s.wantCounters(counters{Processed: 4, Failed: 4, Archived: 4})
		if n := len(s.runs()); n != 4 || s.used() != 4 || server.Adapter().Attempts() != 0 {
			t.Errorf("ran %d times, %d used, %d attempts are remembered", n, s.used(), server.Adapter().Attempts())
		}
	})
}

// What the middleware says of an attempt whose lease was lost says nothing of the one in which the
// task runs now.
func TestAttemptsAreKeptApart(t *testing.T) {
	s := newSite(t, redis.NewClient(&redis.Options{}), policy(1, time.Hour))
	_, ours := s.configs()
	ad, err := worker.NewAdapter(ours)
	if err != nil {
		t.Fatal(err)
	}
	denyOld := ad.Enter("a")
	denyNew := ad.Enter("a")
	if denyOld(); ad.Denied("a") {
		t.Error("the new attempt is denied by the old one")
	}
	if denyNew(); !ad.Denied("a") {
		t.Error("the new attempt is not denied")
	}
}

// A shutdown does not wait until the leases of denied tasks run out that cannot be put back.
func TestShutdownWithoutRedis(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, policy(1, time.Hour))
		var c cable
		s.asynq = dialed{c.options(like(s.redis))}
		s.fill("acme")
		s.enqueue(acmeTask(), asynq.TaskID("a"), asynq.MaxRetry(1))
		server := s.serve(s.ok, calm, func(theirs *asynq.Config, ours *worker.Config) {
			theirs.ShutdownTimeout = 3 * time.Second
			ours.OnDecision = func(context.Context, *asynq.Task, throttle.Decision) { c.cut() }
		})
		time.Sleep(2 * time.Second)
		begun := time.Now()
		server.Shutdown()
		if took := time.Since(begun); took < 3*time.Second || took > 10*time.Second {
			t.Errorf("shut down in %v, want 3 s and a bit", took)
		}
		c.mend()
		s.wantCounters(counters{Active: 1, Leases: 1}) // as after the death of a worker
		time.Sleep(2 * time.Second)                    // go-redis tries to connect in the background
	})
}

// Calls of tasks that never arrive, or whose reply is lost, delay tasks and do nothing else: each
// runs once, completed ones too, and no place is left behind.
func TestCallsAreLost(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprint("only the reply: ", lost), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, shared(4, 5*time.Second))
				l := newLedger()
				random := rand.New(rand.NewPCG(3, 4))
				f := &fault{is: isPickCall, lost: lost, err: io.EOF, hits: func(int) bool { return random.IntN(3) == 0 }}
				whole := s.asynq
				s.asynq = hooktest.With(whole, hooktest.Hook(f.see))
				s.enqueueMany("acme", 0, 15, asynq.Retention(time.Hour), asynq.MaxRetry(0))
				s.joinMany(s.client(s.anotherLimiter(s.redis)), "acme", 15, 15, asynq.Retention(time.Hour), asynq.MaxRetry(0))
				for range 2 {
					s.serve(s.ok, l.watch, calm, s.apart)
				}
				s.sleepUntil(l, 30, 8*time.Minute)
				time.Sleep(3 * time.Minute) // for what may come after
				if runs := s.runs(); len(runs) != 30 || len(slices.Compact(runs)) != 30 {
					t.Errorf("ran %q, want each once", runs)
				}
				if f.count() == 0 || l.excess(4, 5*time.Second) != 0 {
					t.Errorf("%d calls were lost; %d more than the limit", f.count(), l.excess(4, 5*time.Second))
				}
				s.wantCounters(counters{Processed: 30})
				if n := s.redis.ZCard(t.Context(), "asynq:{default}:completed").Val(); n != 30 {
					t.Errorf("%d tasks are completed", n)
				}
				if keys := s.redis.Keys(t.Context(), "sluice:{*}:*").Val(); len(keys) > 0 {
					t.Errorf("left behind: %q", keys)
				}
				mean, most := l.wakesPerTask()
				t.Logf("%d of %d calls were lost, %.2f wakes a task, at most %d", f.count(), f.calls, mean, most)
			})
		})
	}
}

// A task that has ended is put down as its handler left it, however long asynq's Redis is out then.
// Plain asynq leaves it active, and recovers it minutes later: it runs again, or is archived.
func TestTasksEndInSpiteOfAnOutage(t *testing.T) {
	refused := errors.New("READONLY You can't write against a read only replica.")
	retention := asynq.Retention(time.Hour)
	for _, row := range []struct {
		verb  string
		err   error // of the handler
		plain bool
		lost  bool
		fault error
		fails int
		want  counters
	}{
		{asynqredis.Done, nil, false, false, io.ErrUnexpectedEOF, 4, counters{Processed: 1}},
		{asynqredis.Done, nil, false, true, io.EOF, 1, counters{Processed: 1}}, // the next one finds the task gone
		{asynqredis.Done, nil, true, false, io.ErrUnexpectedEOF, 4, counters{Active: 1, Leases: 1}},
		{asynqredis.Complete, nil, false, false, refused, 4, counters{Processed: 1}},
		{asynqredis.Retry, errors.New("no"), false, false, refused, 4, counters{Processed: 1, Failed: 1, Retry: 1}},
		{asynqredis.Archive, asynq.SkipRetry, false, false, io.ErrUnexpectedEOF, 4, counters{Processed: 1, Failed: 1, Archived: 1}},
	} {
		t.Run(fmt.Sprintf("%s, plain %v, arrives %v", row.verb, row.plain, row.lost), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, policy(10, time.Hour))
				f := &fault{
					is:   func(args []any) bool { return asynqredis.CallOf(args).Verb == row.verb },
					hits: func(n int) bool { return n <= 4 }, lost: row.lost, err: row.fault,
				}
				opts := []asynq.Option{asynq.TaskID("a"), asynq.MaxRetry(1)}
				if row.verb == asynqredis.Complete {
					opts = append(opts, retention)
				}
				s.enqueue(acmeTask(), opts...)
				theirs, ours := s.configs()
				calm(&theirs, &ours)
				theirs.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
				said := &journal{}
				theirs.Logger, theirs.LogLevel = asynqLog{said}, asynq.WarnLevel
				inside := &kept{RedisConnOpt: s.asynq}
				var server interface {
					Start(asynq.Handler) error
					Shutdown()
				}
				if row.plain {
					server = asynq.NewServer(inside, theirs)
				} else {
					var err error
					if server, err = worker.NewServer(inside, theirs, ours); err != nil {
						t.Fatal(err)
					}
				}
				inside.made.AddHook(hooktest.Hook(f.see))
				err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
					s.ok(ctx, task)
					return row.err
				}))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(server.Shutdown)
				time.Sleep(20 * time.Second)
				s.wantCounters(row.want)
				if !row.plain && f.count() != row.fails || f.count() == 0 || len(s.runs()) != 1 || said.count("retry syncing") > 0 != row.plain {
					t.Errorf("%d calls have failed, want %d; ran %q; asynq says %q", f.count(), row.fails, s.runs(), said)
				}
			})
		})
	}
}

// kept keeps the client that it makes: hooks that are added later are nearer to Redis.
type kept struct {
	asynq.RedisConnOpt
	made redis.UniversalClient
}

func (k *kept) MakeRedisClient() any {
	made := k.RedisConnOpt.MakeRedisClient()
	k.made = made.(redis.UniversalClient)
	return made
}

// A queue is paused for so long that all its denied tasks reach their fallback. They wake at most
// once in vain afterwards.
func TestPausedForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := synctestSite(t, shared(8, 30*time.Second))
		l := newLedger()
		s.serve(s.ok, l.watch, calm)
		s.enqueueMany("acme", 0, 40, asynq.MaxRetry(0))
		time.Sleep(10 * time.Second)
		if err := s.inspector.PauseQueue("default"); err != nil {
			t.Fatal(err)
		}
		before := l.count()
		time.Sleep(6 * time.Minute)
		s.wantStates("default", 0, 40-before)
		if err := s.inspector.UnpauseQueue("default"); err != nil {
			t.Fatal(err)
		}
		s.sleepUntil(l, 40, 20*time.Minute)
		if _, most := l.wakesPerTask(); most > 3 || l.excess(8, 30*time.Second) != 0 {
			t.Errorf("a task woke %d times; %d more than the limit", most, l.excess(8, 30*time.Second))
		}
		s.wantCounters(counters{Processed: 40})
		s.wantNobodyInLine()
	})
}

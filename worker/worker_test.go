package worker_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Read this test first. Three tasks come together, and one fits a window: the others wait and run
// in turn. None has retries to lose, so asynq alone would archive each task that is denied.
func TestATaskThatDoesNotFitWaitsAndLosesNothing(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1, 600*time.Millisecond))
	ours := s.Client(s.Limiter)
	ids := []string{"ours", "plain-1", "plain-2"}
	for _, id := range ids {
		var err error
		opts := []asynq.Option{asynq.TaskID(id), asynq.MaxRetry(0)}
		if id == "ours" {
			_, err = ours.EnqueueContext(t.Context(), worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), opts...)
		} else {
			_, err = s.Plain.Enqueue(asynq.NewTask("x", []byte("acme")), opts...)
		}
		expect.Must(t, err)
	}
	s.Serve(s.Ok, func(_ *asynq.Config, c *worker.Config) {
		c.Identify = func(task *asynq.Task) (worker.Identity, error) {
			id, err := worker.IdentityOf(task)
			id.Tenant = cmp.Or(id.Tenant, string(task.Payload()))
			return id, err
		}
	})
	s.WaitGone(ids...)
	expect.Equal(t, fmt.Sprint(s.Runs()), fmt.Sprint(ids), "ran", "want each of", ids, "once")
	expect.That(t, len(s.Denials()) != 0, "no denial: three tasks that come together do not fit a window of one")
	s.WantCounters(sitetest.Counters{Processed: 3})
	s.WantReported(nil, nil)
}

// Real failures use up the retries, and nothing else does.
func TestOnlyRealFailuresUseUpRetries(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1, 600*time.Millisecond))
	s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("a"), asynq.MaxRetry(2))
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		s.Ok(ctx, task)
		return errors.New("boom")
	})
	s.WaitState(asynq.TaskStateArchived, "a")
	task := s.Task("a")
	expect.That(t, task.Retried == 2 && task.LastErr == "boom", task.Retried, task.LastErr)
	if len(s.Runs()) != 3 || len(s.Denials()) > 1 { // one may be of a grant that was too old, on a busy machine
		t.Errorf("%d runs, %d denials; want 3, and a place in line before each retry", len(s.Runs()), len(s.Denials()))
	}
	s.WantCounters(sitetest.Counters{Processed: 3, Failed: 3, Archived: 1})
	s.WantReported([]string{"boom", "boom", "boom"}, []string{"boom", "boom"})
}

// Without functions of the user's own, asynq's defaults hold for real failures.
func TestAsynqsDefaultsHoldForRealFailures(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Policy(1, time.Hour))
	s.Fill("denied")
	s.Enqueue(worker.NewTask(worker.Identity{Tenant: "denied"}, "x", nil), asynq.TaskID("denied"), asynq.MaxRetry(0))
	s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil), asynq.TaskID("a"), asynq.MaxRetry(2))
	s.Serve(func(context.Context, *asynq.Task) error { return errors.New("boom") }, func(c *asynq.Config, _ *worker.Config) {
		*c = asynq.Config{LogLevel: asynq.FatalLevel}
	})
	s.WaitState(asynq.TaskStateRetry, "a")
	s.WaitState(asynq.TaskStateScheduled, "denied")
	if task := s.Task("a"); task.Retried != 1 || task.LastErr != "boom" || task.NextProcessAt.Sub(task.LastFailedAt) < 14*time.Second {
		t.Errorf("retried %d, last error %q, next in %v; want asynq's 1, boom and 15 whole seconds or more", task.Retried, task.LastErr, time.Until(task.NextProcessAt))
	}
	s.WantCounters(sitetest.Counters{Processed: 1, Failed: 1, Scheduled: 1, Retry: 1})

	server := s.Idle()
	for set, want := range map[time.Duration][2]time.Duration{
		-1:          {0, time.Millisecond}, // 0 is asynq's own
		0:           {0, time.Millisecond},
		time.Minute: {time.Minute, time.Millisecond}, // the waiting is ours
	} {
		c := server.AsynqConfig(asynq.Config{DelayedTaskCheckInterval: set, TaskCheckInterval: set})
		expect.Equal(t, [2]time.Duration{c.DelayedTaskCheckInterval, c.TaskCheckInterval}, want,
			"check intervals of", set, "become")
	}
}

// What can never be granted is a failure like any other: waiting would not help.
func TestATaskThatCanNeverBeGrantedFails(t *testing.T) {
	p := sitetest.Policy(5, time.Hour)
	p.Match = []string{"x", "by-user"}
	byUser := sitetest.Policy(5, time.Hour)
	byUser.Name, byUser.Match, byUser.Windows[0].Per = "by-user", []string{"by-user"}, []string{"user"}
	p.Match = []string{"x"}
	header := func(text string) *asynq.Task {
		return asynq.NewTaskWithHeaders("x", nil, map[string]string{"sluice-identity": text})
	}
	tasks := map[string]struct {
		task *asynq.Task
		want string
	}{
		"no tenant":    {asynq.NewTask("x", nil), `worker: task type "x": no tenant, and policy "api" matches it: make the task with worker.NewTask, or set Config.Identify`},
		"never fits":   {worker.NewTask(worker.Identity{Tenant: "acme", Cost: map[string]int64{"requests": 6}}, "x", nil), `worker: task type "x": throttle: policy "api", window "window": cost requests 6: never fits: the window grants 5 at most`},
		"no attribute": {worker.NewTask(worker.Identity{Tenant: "acme"}, "by-user", nil), `worker: task type "by-user": throttle: policy "by-user": attribute user "": must be 1 to 512 bytes: a window is counted by it`},
		"unmatched":    {worker.NewTask(worker.Identity{Tenant: "acme"}, "y", nil), `worker: task type "y": no policy matches it: name it in a policy's Match`},
		"bad tenant":   {header("tenant=%zz"), `worker: task type "x": header sluice-identity "tenant=%zz": invalid URL escape "%zz"`},
		"bad cost":     {header("cost.requests=many&tenant=acme"), `worker: task type "x": header sluice-identity "cost.requests=many&tenant=acme": a cost must be a whole number, such as cost.tokens=1500`},
	}
	s := sitetest.OnRedis(t, p, byUser)
	for id, c := range tasks {
		s.Enqueue(c.task, asynq.TaskID(id), asynq.MaxRetry(0))
	}
	s.Serve(s.Ok, func(_ *asynq.Config, c *worker.Config) { c.RejectUnmatched = true })
	for id, c := range tasks {
		s.WaitState(asynq.TaskStateArchived, id)
		expect.Equal(t, s.Task(id).LastErr, c.want, id, "\n")
	}
	expect.That(t, len(s.Runs()) == 0, "ran", s.Runs())
	s.Mu.Lock()
	defer s.Mu.Unlock()
	expect.That(t, len(s.Reported) == len(tasks),
		"the user's ErrorHandler was told", s.Reported, ", want all", len(tasks))
}

func TestConstructorsNameWhatIsWrong(t *testing.T) {
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	limiter := expect.Got(throttle.New(throttle.Config{Client: client}))(t)
	ok := worker.Config{Limiter: limiter}
	server := func(opt asynq.RedisConnOpt, theirs asynq.Config, ours worker.Config) error {
		_, err := worker.NewServer(opt, theirs, ours)
		return err
	}
	_, noLimiter := worker.NewClient(asynq.RedisClientOpt{}, worker.ClientConfig{})
	_, noRedis := worker.NewClient(nil, worker.ClientConfig{Limiter: limiter})
	for want, err := range map[string]error{
		"worker: Config.Limiter is nil: must be what throttle.New returns":                            server(asynq.RedisClientOpt{}, asynq.Config{}, worker.Config{}),
		"worker: asynq.Config.GroupGracePeriod 1ms: must be at least 1s":                              server(asynq.RedisClientOpt{}, asynq.Config{GroupGracePeriod: time.Millisecond}, ok),
		"worker: the asynq.RedisConnOpt is nil: must be such as asynq.RedisClientOpt{Addr: ...}":      noRedis,
		"worker: worker_test.noClient makes no redis.UniversalClient: use one of asynq's own options": server(noClient{http.DefaultClient}, asynq.Config{}, ok),
		"worker: ClientConfig.Limiter is nil: must be what throttle.New returns":                      noLimiter,
	} {
		expect.That(t, err != nil && err.Error() == want, "got", err, "want", want)
	}
}

type noClient struct{ client any }

func (n noClient) MakeRedisClient() any { return n.client }

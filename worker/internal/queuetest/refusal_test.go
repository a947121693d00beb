package queuetest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// fetch makes a call and fails on any status but 200.
func fetch(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// The handler knows nothing of refusals: it fails by the status. The task has no retry to lose.
func TestARefusalOfTheUpstreamTakesNoRetry(t *testing.T) {
	tasks, calls := sitetest.Policy(1000, time.Minute), sitetest.Policy(1000, time.Minute)
	calls.Name, calls.Match = "calls", nil
	reserved := httpthrottle.TransportConfig{LearnOnly: true} // by the task
	reserves := httpthrottle.TransportConfig{Policy: "calls"}
	for name, row := range map[string]struct {
		match      []string
		config     httpthrottle.TransportConfig
		status     int
		retryAfter string
		fails      bool
	}{
		"429 with a time":                                {[]string{"*"}, reserved, http.StatusTooManyRequests, "1", false},
		"429 without a time":                             {[]string{"*"}, reserved, http.StatusTooManyRequests, "", false},
		"503 with a time":                                {[]string{"*"}, reserved, http.StatusServiceUnavailable, "1", false},
		"503 without a time":                             {[]string{"*"}, reserved, http.StatusServiceUnavailable, "", true},
		"429, the call has a policy of its own":          {[]string{"*"}, reserves, http.StatusTooManyRequests, "", false},
		"503, only the call has a policy":                {nil, reserves, http.StatusServiceUnavailable, "1", false},
		"503 without a time, only the call has a policy": {nil, reserves, http.StatusServiceUnavailable, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			tasks := tasks
			tasks.Match = row.match
			s := sitetest.OnRedis(t, tasks, calls)
			var asked atomic.Int64
			upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if asked.Add(1) == 1 {
					if row.retryAfter != "" {
						w.Header().Set("Retry-After", row.retryAfter)
					}
					w.WriteHeader(row.status)
				}
			}))
			t.Cleanup(upstream.Close)
			config := row.config
			config.Base, config.Limiter, config.Logger = upstream.Client().Transport, s.Limiter, slog.New(slog.DiscardHandler)
			transport := expect.Got(httpthrottle.NewTransport(config))(t)
			client := &http.Client{Transport: transport}
			s.Serve(func(ctx context.Context, task *asynq.Task) error {
				if err := fetch(ctx, client, upstream.URL); err != nil {
					return err
				}
				return s.Ok(ctx, task)
			})
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
			if row.fails {
				s.WaitState(asynq.TaskStateArchived, "t")
				return
			}
			s.Wait("the task has ended", func() bool {
				return s.Task("t").ID == "" || s.Task("t").State == asynq.TaskStateArchived
			})
			s.WantCounters(sitetest.Counters{Processed: 1})
			s.WantReported(nil, nil)
			expect.Equal(t, asked.Load(), 2, "the upstream saw", "calls, want 2")
		})
	}
}

// Of calls under way together, one that is answered says nothing about one that is refused.
func TestARefusalAmongOtherCallsTakesNoRetry(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1000, time.Minute))
	var runs atomic.Int64
	slow, refused := make(chan struct{}), make(chan struct{})
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case runs.Load() > 1:
		case r.URL.Path == "/refused":
			w.WriteHeader(http.StatusTooManyRequests)
		default:
			close(slow)
			<-refused
		}
	}))
	t.Cleanup(upstream.Close)
	transport, err := httpthrottle.NewTransport(httpthrottle.TransportConfig{
		Base: upstream.Client().Transport, Limiter: s.Limiter, LearnOnly: true, Logger: slog.New(slog.DiscardHandler),
	})
	expect.Must(t, err)
	client := &http.Client{Transport: transport}
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		if runs.Add(1) > 1 {
			return s.Ok(ctx, task)
		}
		answered := make(chan error)
		go func() { answered <- fetch(ctx, client, upstream.URL+"/answered") }()
		<-slow
		err := fetch(ctx, client, upstream.URL+"/refused")
		close(refused)
		other := <-answered
		expect.That(t, other == nil, other)
		return err
	})
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
	s.Wait("the task has ended", func() bool {
		return s.Task("t").ID == "" || s.Task("t").State == asynq.TaskStateArchived
	})
	s.WantCounters(sitetest.Counters{Processed: 1})
}

// A handler that wants a refusal to cost a retry says so. (With a pause: TestAJobMayPauseItsPolicyAndFail.)
func TestARefusalMayTakeARetry(t *testing.T) {
	s := sitetest.OnRedis(t, sitetest.Policy(1000, time.Minute))
	s.Serve(func(ctx context.Context, _ *asynq.Task) error {
		throttle.CallerFrom(ctx).Refused("api", 100*time.Millisecond)
		return asynq.SkipRetry
	})
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
	s.WaitState(asynq.TaskStateArchived, "t")
}

// A task that is refused again and again, until a time that is over, never spins, whatever becomes of the pause.
func TestARefusedTaskDoesNotSpin(t *testing.T) {
	plain := sitetest.Policy(1000, time.Minute)
	observes, exempts, slots, fixed, resets := plain, plain, plain, plain, plain
	observes.Observe = true
	exempts.Tenants = map[string]throttle.Tenant{"acme": {Exempt: true}}
	slots.Windows = []throttle.Window{{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 100, Lease: time.Minute}}
	fixed.KeepRate = true
	resets.EarliestReset = true
	noPause := func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if hooktest.IsScript(cmd) && strings.Contains(fmt.Sprint(cmd.Args()[2:]...), "pause") {
			cmd.SetErr(errors.New("it is not stored"))
			return cmd.Err()
		}
		return next(ctx, cmd)
	}
	for name, row := range map[string]struct {
		policy throttle.Policy
		hook   hooktest.Hook
	}{
		"adapts":             {policy: plain},
		"does not adapt":     {policy: fixed},
		"has slots":          {policy: slots},
		"requeues by resets": {policy: resets},
		"observes":           {policy: observes},
		"exempts the tenant": {policy: exempts},
		"cannot be paused":   {policy: plain, hook: noPause},
	} {
		t.Run(name, func(t *testing.T) {
			sitetest.Bubble(t, row.policy, func(t *testing.T, s *sitetest.Site) {
				if row.hook != nil {
					s.Redis.AddHook(row.hook)
				}
				var runs atomic.Int64
				s.Serve(func(context.Context, *asynq.Task) error {
					if runs.Add(1) > 11 {
						return nil
					}
					return worker.RetryAfter(-time.Minute)
				})
				s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(0))
				time.Sleep(10 * time.Second)
				n := runs.Load()
				expect.That(t, n >= 2 && n <= 11, n, "runs in 10 s", s.Task("t").LastErr)
			})
		})
	}
}

// A task that is refused again and again ends where its policy says so, with the reason.
func TestATaskThatIsRefusedForEverIsGivenUp(t *testing.T) {
	fails := errors.New("something else")
	type row struct {
		wait  time.Duration
		errs  []error // of the runs, in turn; the last one goes on
		runs  int
		fails bool
	}
	sitetest.EachBubble(t, map[string]row{
		"a total wait":              {150 * time.Second, []error{worker.RetryAfter(time.Minute)}, 3, true},
		"a wait that is too long":   {time.Minute, []error{worker.RetryAfter(time.Hour)}, 1, true},
		"max_pause bounds a wait":   {5 * time.Minute, []error{worker.RetryAfter(time.Hour), nil}, 2, false},
		"a failure begins the wait": {90 * time.Second, []error{worker.RetryAfter(time.Minute), fails, worker.RetryAfter(time.Minute), nil}, 4, false},
		"no limit":                  {0, append(slices.Repeat([]error{worker.RetryAfter(time.Second)}, 30), nil), 31, false},
	}, func(t *testing.T, row row) {
		p := sitetest.Policy(1000, time.Minute)
		p.MaxPause, p.MaxRefusedWait = 2*time.Minute, row.wait
		s := sitetest.NewInBubble(t, p)
		runs := 0
		s.Serve(func(ctx context.Context, task *asynq.Task) error {
			runs++
			return row.errs[min(runs, len(row.errs))-1]
		})
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(1))
		for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(5 * time.Second) {
			if state := s.Task("t").State; state == 0 || state == asynq.TaskStateArchived {
				break
			}
		}
		time.Sleep(time.Minute) // time for another run
		info := s.Task("t")
		gone := info.ID == ""
		expect.Require(t, runs == row.runs && gone != row.fails, runs, "runs, want", row.runs, info.State, info.LastErr)
		if !row.fails {
			return
		}
		var given *worker.GivenUpError
		expect.Require(t, len(s.Reported) == 1 && errors.As(s.Reported[0], &given) &&
			info.State == asynq.TaskStateArchived && info.LastErr == given.Error(), info.State, info.LastErr,
			"reported", s.Reported)
		expect.That(t, given.Policy == "api" && given.Tenant == "acme" && given.Limit == row.wait && given.Cause != nil, given)
	})
}

// The policy that refuses a call says for how long it may, also if the task has another.
func TestATaskIsGivenUpByThePolicyOfItsCalls(t *testing.T) {
	tasks, calls := sitetest.Policy(1000, time.Minute), sitetest.Policy(1000, time.Minute)
	calls.Name, calls.Match, calls.MaxRefusedWait = "calls", nil, 2*time.Millisecond
	s := sitetest.OnRedis(t, tasks, calls)
	s.Serve(func(ctx context.Context, _ *asynq.Task) error {
		throttle.CallerFrom(ctx).Refused("calls", time.Second)
		return errors.New("429")
	})
	s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("t"), asynq.MaxRetry(9))
	s.WaitState(asynq.TaskStateArchived, "t")
	want := `worker: policy "calls", tenant "acme": given up by max_refused_wait 2ms: refused since 20`
	got := s.Task("t").LastErr
	expect.That(t, strings.HasPrefix(got, want) && strings.HasSuffix(got, "Z: 429"), got, "want", want, "...: 429")
}

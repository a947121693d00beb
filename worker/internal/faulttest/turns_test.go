package faulttest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A task that had its turn, or whose payload was edited, keeps its place whatever happens to the limiter.
func TestATaskKeepsItsPlace(t *testing.T) {
	type scene struct {
		out  atomic.Bool // the limiter is
		ran  atomic.Int64
		site *sitetest.Site
	}
	for name, c := range map[string]struct {
		lasts  time.Duration // the outage, or more
		change func(*throttle.Policy)
		taken  func(*scene)                              // between a task's take and its start
		run    func(s *scene, ctx context.Context) error // what the handler does
		then   func(*scene)                              // after that
		want   string
	}{
		"its grant is too old, and the limiter is out": {
			lasts: 800 * time.Millisecond,
			taken: func(s *scene) { s.out.Store(true); time.Sleep(150 * time.Millisecond) },
			want:  "bac", // it was away for a moment
		},
		"the upstream refuses it, and the limiter is out": {
			lasts: 20 * time.Second,
			run: func(s *scene, ctx context.Context) error {
				if s.ran.Add(1) == 1 {
					s.out.Store(true)
					return worker.RetryAfter(5 * time.Second)
				}
				return nil
			},
			want: "aabc",
		},
		"its payload is edited": {
			lasts:  10 * time.Second,
			change: func(p *throttle.Policy) { p.FailOpen, p.Windows[0].Period = true, 150*time.Second },
			then: func(s *scene) {
				expect.Must(s.site, s.site.Inspector.UpdateTaskPayload("default", "b", []byte("edited")))
			},
			want: "abc",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := sitetest.Policy(1, 10*time.Second)
			if c.change != nil {
				c.change(&p)
			}
			sitetest.Bubble(t, p, func(t *testing.T, s *sitetest.Site) {
				now := &scene{site: s}
				limiter := s.AnotherLimiter(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
					if now.out.Load() {
						cmd.SetErr(errRefused)
						return errRefused
					}
					return next(ctx, cmd)
				}))
				pick := &sitetest.Fault{Is: sitetest.IsPick, Hits: sitetest.Only(1), Meanwhile: func() {
					if c.taken != nil {
						c.taken(now)
					}
				}}
				for _, id := range []string{"a", "b", "c"} {
					expect.Must(t, expect.ErrOf(s.Client(s.Limiter).Enqueue(sitetest.AcmeTask(), asynq.TaskID(id))))
				}
				s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(pick.See))
				s.Serve(func(ctx context.Context, task *asynq.Task) error {
					err := s.Ok(ctx, task)
					if c.run != nil {
						err = c.run(now, ctx)
					}
					return err
				}, sitetest.By(limiter))
				time.Sleep(c.lasts)
				if now.out.Store(false); c.then != nil {
					c.then(now)
				}
				time.Sleep(time.Minute + 2*p.Windows[0].Period)
				expect.Equal(t, strings.Join(s.Starts(), ""), c.want, "started")
				s.WantNobodyInLine()
			})
		})
	}
}

var errRefused = errors.New("dial tcp: connection refused")

// asynq's shutdown waits for its forwarder, before it stops to take tasks: not for each line in turn.
func TestAShutdownWaitsForNoLimiterThatHangs(t *testing.T) {
	var policies []throttle.Policy
	for i := range 20 {
		p := sitetest.Policy(100, time.Second)
		p.Name, p.Match = fmt.Sprint("p", i), []string{fmt.Sprint("t", i)}
		policies = append(policies, p)
	}
	sitetest.EachBubble(t, sitetest.Values(true), func(t *testing.T, _ bool) {
		s := sitetest.NewInBubble(t, policies...)
		var proxy sitetest.BreakableProxy
		s.Limiter = s.LimiterThrough(&proxy)
		server := s.Serve(s.Ok)
		for _, p := range policies {
			s.Enqueue(worker.NewTask(worker.Identity{Tenant: "acme"}, p.Match[0], nil), asynq.ProcessIn(10*time.Second))
		}
		time.Sleep(5 * time.Second)
		over := proxy.Hang(3 * time.Minute)
		time.Sleep(12 * time.Second)
		begun := time.Now()
		server.Shutdown()
		expect.That(t, time.Since(begun) <= 20*time.Second, "Shutdown took", time.Since(begun))
		<-over
	})
}

// asynq fails tasks before they get to the handler once its base context has ended: what they were granted is free.
func TestWhatNeverStartsTakesNothing(t *testing.T) {
	p := sitetest.Policy(10, time.Hour)
	p.Windows = append(p.Windows, throttle.Window{Name: "slots", Limit: 2, Algorithm: throttle.AlgorithmConcurrency, Lease: 10 * time.Minute})
	sitetest.Bubble(t, p, func(t *testing.T, s *sitetest.Site) {
		ended, end := context.WithCancel(t.Context())
		end()
		s.JoinMany(s.Client(s.Limiter), "acme", 0, 5)
		server := s.Serve(s.Ok, func(c *asynq.Config, _ *worker.Config) {
			c.BaseContext = func() context.Context { return ended }
			c.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Hour }
		})
		time.Sleep(time.Second)
		server.Shutdown()
		time.Sleep(time.Second)
		d, err := s.Limiter.Peek(t.Context(), throttle.Request{Policy: "api", Tenant: "acme"})
		expect.That(t, err == nil && d.Windows[0].Used == 0 && d.Windows[1].Used == 0, "used", d.Windows, err)
	})
}

// No server could read a task with such a header, and asynq's recovery ends at the first one.
func TestHeadersAreText(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, time.Hour), func(t *testing.T, s *sitetest.Site) {
		bad := func(context.Context, *asynq.Task) map[string]string {
			return map[string]string{"x": "a\xff", "\xfe": ""}
		}
		client := expect.Got(worker.NewClient(s.Asynq, worker.ClientConfig{Headers: bad, Limiter: s.Limiter}))(t)
		defer client.Close()
		expect.Must(t, expect.ErrOf(client.Enqueue(sitetest.AcmeTask(asynq.TaskID("a")))))
		expect.That(t, s.Task("a").Headers["x"] == "a\uFFFD", s.Task("a").Headers)
	})
}

// A user's functions may revoke a task, as handlers do.
func TestIdentifyMayRevoke(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(10, time.Second), func(t *testing.T, s *sitetest.Site) {
		s.Serve(s.Ok, func(_ *asynq.Config, c *worker.Config) {
			c.Identify = func(*asynq.Task) (worker.Identity, error) {
				return worker.Identity{}, fmt.Errorf("the tenant is gone: %w", asynq.RevokeTask)
			}
		})
		s.Enqueue(asynq.NewTask("x", nil), asynq.TaskID("a"), asynq.MaxRetry(3))
		time.Sleep(time.Minute)
		_, err := s.Inspector.GetTaskInfo("default", "a")
		expect.Err(t, err, asynq.ErrTaskNotFound, "it is still there")
	})
}

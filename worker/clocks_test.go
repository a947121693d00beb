package worker_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// skewed makes Redis run by another clock for the limiter's scripts, as time goes on.
type skewed struct{ by time.Duration }

func (skewed) DialHook(next redis.DialHook) redis.DialHook { return next }
func (skewed) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (o skewed) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if args := cmd.Args(); strings.HasPrefix(cmd.Name(), "eval") {
			now := 3 + args[2].(int) // the first argument of each of our scripts
			args[now] = time.Now().Add(o.by).UnixMicro()
		}
		return next(ctx, cmd)
	}
}

// limitByClock gives the site a limiter whose Redis has another clock.
func (s *site) limitByClock(by time.Duration) {
	s.Helper()
	client := redis.NewClient(like(s.redis))
	client.AddHook(skewed{by})
	s.Cleanup(func() { client.Close() })
	limiter, err := throttle.New(throttle.Config{Client: client, Policies: s.limiter.Policies()})
	if err != nil {
		s.Fatal(err)
	}
	s.limiter = limiter
}

// The clocks of all workers are off from that of Redis: nobody notices.
func TestWorkersClocksAreOff(t *testing.T) {
	for _, by := range []time.Duration{-5 * time.Minute, 5 * time.Minute} {
		for _, requeue := range []throttle.Requeue{throttle.RequeueWhenFits, throttle.RequeueEarliestReset} {
			t.Run(fmt.Sprint(by, " ", requeue), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := policy(4, 10*time.Second)
					p.Requeue = requeue
					s := synctestSite(t, p)
					s.limitByClock(by)
					var c counted
					l := newLedger()
					s.serve(c.handle, brisk, l.watch)
					s.enqueueMany("acme", 0, 16, asynq.MaxRetry(0))
					s.sleepUntil(l, 16, 2*time.Minute)
					c.onceEach(t, 16)
					s.wantCounters(counters{Processed: 16})
					if over := l.excess(4, 10*time.Second); over > 0 {
						t.Errorf("%d were granted above the limit", over)
					}
					if mean, _ := l.wakesPerTask(); requeue == throttle.RequeueWhenFits && mean > 2 {
						t.Errorf("%v wakes a task", mean)
					}
					if got := s.log.String(); got != "" {
						t.Errorf("nothing was to be noticed:\n%s", got)
					}
				})
			})
		}
	}
}

// ahead is the clock of one worker, by what it hands to Redis of asynq's: when a task comes back,
// and until when those are that it forwards.
type ahead struct{ by time.Duration }

func (ahead) DialHook(next redis.DialHook) redis.DialHook { return next }
func (ahead) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (a ahead) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		args := cmd.Args()
		if !strings.HasPrefix(cmd.Name(), "eval") {
			return next(ctx, cmd)
		}
		seconds := 0
		switch last := fmt.Sprint(args[2+args[2].(int)]); {
		case args[2] == 4 && fmt.Sprint(args[5]) == "asynq:{default}:retry": // ours
			seconds = 9
		case args[2] == 2 && last == "asynq:{default}:pending" && (args[3] == "asynq:{default}:retry" || args[3] == "asynq:{default}:scheduled"):
			seconds = 5
		}
		if seconds > 0 {
			at, ok := args[seconds].(int64)
			if !ok {
				panic(fmt.Sprintf("no time in %v", args))
			}
			args[seconds] = at + int64(a.by/time.Second)
		}
		return next(ctx, cmd)
	}
}

// Workers differ about what time it is. By less than the fallback is late, that costs nothing; by
// more, those whose fallback seems to have come ask in vain, and nothing else.
func TestWorkersClocksDiffer(t *testing.T) {
	for _, by := range []time.Duration{-5 * time.Minute, 90 * time.Second, 5 * time.Minute} {
		t.Run(fmt.Sprint(by), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := synctestSite(t, policy(4, 10*time.Second))
				var c counted
				l := newLedger()
				s.serve(c.handle, brisk, l.watch)
				right := s.asynq
				s.asynq = withHook{right, ahead{by}}
				s.serve(c.handle, brisk, l.watch, s.apart)
				s.asynq = right
				s.enqueueMany("acme", 0, 16, asynq.MaxRetry(0))
				s.sleepUntil(l, 16, 2*time.Minute)
				c.onceEach(t, 16)
				s.wantCounters(counters{Processed: 16})
				if over := l.excess(4, 10*time.Second); over > 0 {
					t.Errorf("%d were granted above the limit", over)
				}
				mean, _ := l.wakesPerTask()
				if by.Abs() < 2*time.Minute && mean > 2 {
					t.Errorf("%v wakes a task", mean)
				}
			})
		})
	}
}

// The clock of Redis is 61 s ahead for a while, and then corrected: the windows stand still until
// it has caught up, which is told once, and everybody runs then.
func TestClockOfRedisIsSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		t.Cleanup(m.Close)
		client := redis.NewClient(pipe(m))
		t.Cleanup(func() { client.Close() })
		p := policy(4, 10*time.Second)
		// Miniredis counts how long keys live down, and does not see that its clock was set back.
		p.Windows = append(p.Windows, throttle.Window{Name: "hour", Limit: 1000, Period: time.Hour})
		s := newSite(t, client, p)
		var ahead atomic.Int64
		ahead.Store(int64(61 * time.Second))
		ended := make(chan struct{})
		defer close(ended)
		go func() {
			for {
				m.SetTime(time.Now().Add(time.Duration(ahead.Load())))
				select {
				case <-time.After(20 * time.Millisecond):
				case <-ended:
					return
				}
			}
		}()
		synctest.Wait()
		var c counted
		l := newLedger()
		s.serve(c.handle, brisk, l.watch)
		s.enqueueMany("acme", 0, 20, asynq.MaxRetry(0))
		s.enqueueMany("initech", 0, 1)
		time.Sleep(25 * time.Second)
		ahead.Store(0)
		time.Sleep(5 * time.Second)
		if n := l.of("acme").count(); n != 12 {
			t.Errorf("%d ran before the clock was set back, want 12", n)
		}
		for i := range 30 { // the others do not stand still, and do not say that it is over
			s.enqueue(acmeTask(asynq.TaskID(fmt.Sprint("ask", i))))
			time.Sleep(time.Second)
		}
		if n := l.of("acme").count(); n != 12 {
			t.Errorf("%d ran, want none before the clock has caught up", n)
		}
		s.sleepUntil(l, 51, 10*time.Minute)
		c.onceEach(t, 51)
		s.wantCounters(counters{Processed: 51})
		if over := l.of("acme").excess(4, 10*time.Second); over > 0 {
			t.Errorf("%d were granted above the limit", over)
		}
		if s.log.count("the clock of Redis was set back") != 1 || s.log.count("\n") != 1 {
			t.Errorf("want it told once:\n%s", s.log)
		}
	})
}

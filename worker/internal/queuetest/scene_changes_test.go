package queuetest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// wantEveryKeyToExpire checks until stop, or the end of the test, that all keys of ours have a TTL,
// in the limiter's Redis and in asynq's.
func wantEveryKeyToExpire(s *sitetest.Site) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	ctx := context.Background()
	go func() {
		defer close(ended)
		for seen := map[string]bool{}; ; {
			for _, key := range s.Redis.Keys(ctx, "*sluice*").Val() {
				if ttl := s.Redis.PTTL(ctx, key).Val(); ttl == -1 && !seen[key] { // in nanoseconds: -1 is no TTL
					seen[key] = true
					s.Errorf("%s does not expire", key)
				}
			}
			select {
			case <-done:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	return sync.OnceFunc(func() { close(done); <-ended })
}

// Policies change their shape while 60 tasks wait, half of them by a plain client. All tasks run,
// at the pace of the new policies. No key is left without an expiry.
func TestScenePoliciesChangeWhileTasksWait(t *testing.T) {
	own := throttle.Window{Name: "own", Limit: 10, Period: time.Second}
	all := throttle.Window{Name: "all", Limit: 20, Period: time.Second, Scope: throttle.ScopeShared}
	api := func(windows ...throttle.Window) throttle.Policy {
		return throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows}
	}
	renamed := api(own, all)
	renamed.Name = "renamed"
	for name, row := range map[string]struct {
		before throttle.Policy
		after  []throttle.Policy
	}{
		"the first shared window comes": {api(own), []throttle.Policy{api(own, all)}},
		"the last shared window goes":   {api(own, all), []throttle.Policy{api(own)}},
		"renamed":                       {api(own, all), []throttle.Policy{renamed}},
		"removed":                       {api(own, all), nil},
		"a window is renamed": {api(own, all), []throttle.Policy{api(own,
			throttle.Window{Name: "whole", Limit: 20, Period: time.Second, Scope: throttle.ScopeShared})}},
	} {
		t.Run(name, func(t *testing.T) {
			sitetest.OnRedis(t, append(idle(20), row.before), func(t *testing.T, s *sitetest.Site) {
				stop := wantEveryKeyToExpire(s)
				defer stop()
				d := newDiary()
				limiters := []*throttle.Limiter{s.AnotherLimiter(), s.AnotherLimiter()}
				for _, limiter := range limiters {
					s.Serve(d.handle, d.watch, sitetest.By(limiter))
				}
				client := s.Client(s.AnotherLimiter())
				for i := range 60 {
					task := taskOf(s, []string{"acme", "beta", "chip"}[i%3], i)
					var err error
					if i%2 == 0 {
						err = d.plan(client, task)
					} else {
						err = d.enqueue(s.Plain, task)
					}
					sitetest.Must(t, err)
				}
				time.Sleep(200 * time.Millisecond)
				changed := time.Now()
				for _, limiter := range limiters {
					sitetest.Must(t, limiter.SetPolicies(append(idle(20), row.after...)))
					time.Sleep(50 * time.Millisecond)
				}
				// At 20 a second all run within three seconds. A task that is stranded waits for two minutes.
				s.Wait("all have run", func() bool { return d.ran() >= 60 })
				t.Logf("all ran within %v", time.Since(changed))
				s.Wait("nobody is in line", func() bool { return len(s.InLine()) == 0 })
				d.awaitAll(t, notStranded) // each once
				stop()
			})
		})
	}
}

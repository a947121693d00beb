package control_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestAFollowerKeepsWhatItHasIfItCannotUseWhatIsPublished(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		s := newStore(t, client)
		type told struct {
			version int64
			err     error
		}
		var followed atomic.Pointer[told]
		l := newLimiter(t, throttle.Config{Client: client, Observer: throttle.Observer{
			Followed: func(version int64, err error) { followed.Store(&told{version, err}) },
		}})
		_, err := s.Publish(t.Context(), []throttle.Policy{policy("p", 3)}, 0, anna)
		must(t, err)
		follow(t, l, false)
		if f := followed.Load(); f == nil || f.err != nil || f.version == 0 {
			t.Fatalf("the observer was told %+v", f)
		}
		const windows = `"Windows":[{"Name":"hour","Limit":9,"Period":3600000000000}]`
		for _, document := range []string{
			`{"Format":1,"Policies":[{"Name":"p","Invented":1,` + windows + `}]}`, `{"Format":2,"Policies":[{"Name":"p",` + windows + `}]}`, `{"Format":1,"Policies":[{"Name":"p"}]}`, `{`,
		} {
			state, err := s.State(t.Context())
			must(t, err)
			must(t, client.HSet(t.Context(), "sluice:{!control}:state", "policies", document, "policies_version", state.Version+1000, "version", state.Version+1000).Err())
			must(t, client.Publish(t.Context(), "sluice:{!control}:changed", "").Err())
			limitertest.Until(t, "the observer is told that "+document+" cannot be used", func() bool {
				f := followed.Load()
				return f.version == state.Version+1000 && f.err != nil
			})
			if got := l.Policies(); len(got) != 1 || got[0].Windows[0].Limit != 3 {
				t.Fatalf("after %s the policies are %+v", document, got)
			}
		}
		// A good version mends it.
		state, err := s.State(t.Context())
		must(t, err)
		_, err = s.Publish(t.Context(), []throttle.Policy{policy("p", 4)}, state.Version, anna)
		must(t, err)
		limitertest.Until(t, "the next version is in force", func() bool { return l.Policies()[0].Windows[0].Limit == 4 })

		// What Redis forgets stays in force, but for overrides and pauses.
		must(t, s.Pause(t.Context(), "p", "", time.Hour, anna))
		limitertest.Until(t, "the pause is in force", func() bool { return len(l.Interventions().Pauses) == 1 })
		must(t, client.FlushAll(t.Context()).Err())
		must(t, client.Publish(t.Context(), "sluice:{!control}:changed", "").Err())
		limitertest.Until(t, "the pause is gone", func() bool { return len(l.Interventions().Pauses) == 0 })
		if got := l.Policies(); got[0].Windows[0].Limit != 4 {
			t.Errorf("after Redis was flushed the policies are %+v", got)
		}
		_, err = s.Publish(t.Context(), []throttle.Policy{policy("p", 5)}, 0, anna)
		must(t, err)
		limitertest.Until(t, "a version of the new state is in force", func() bool { return l.Policies()[0].Windows[0].Limit == 5 })
	})
}

func TestAFollowerBeginsWhileRedisDoesNotAnswer(t *testing.T) {
	server := throttletest.Miniredis(t)
	client := throttletest.Client(t, server.Addr())
	s := newStore(t, client)
	_, err := s.Publish(t.Context(), []throttle.Policy{policy("p", 7)}, 0, anna)
	must(t, err)
	server.SetError("LOADING for a while")
	l := newLimiter(t, throttle.Config{Client: client, Policies: []throttle.Policy{policy("p", 1)}})
	follow(t, l, false)
	if got := l.Policies()[0].Windows[0].Limit; got != 1 {
		t.Errorf("without an answer the limit is %d, not the limiter's own", got)
	}
	server.SetError("")
	limitertest.Until(t, "it follows", func() bool { return l.Policies()[0].Windows[0].Limit == 7 })
}

func TestALimiterMayKeepItsPoliciesAndFollowTheRest(t *testing.T) {
	client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
	s := newStore(t, client)
	_, err := s.Publish(t.Context(), []throttle.Policy{policy("p", 7)}, 0, anna)
	must(t, err)
	must(t, s.Pause(t.Context(), "p", "", time.Hour, anna))
	l := newLimiter(t, throttle.Config{Client: client, Policies: []throttle.Policy{policy("p", 1)}})
	follow(t, l, true)
	if got := l.Policies()[0].Windows[0].Limit; got != 1 || len(l.Interventions().Pauses) != 1 {
		t.Errorf("the limit is %d, and in force are %+v", got, l.Interventions())
	}
}

// A process that follows asks Redis once in ten seconds, and hears of a change at once all the
// same.
func TestFollowingCostsLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := throttletest.InMemory(t)
		counted, other := memory.Client(t), memory.Client(t)
		var calls atomic.Int64
		counted.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			calls.Add(1)
			return next(ctx, cmd)
		}))
		l := newLimiter(t, throttle.Config{Client: counted, Policies: []throttle.Policy{policy("p", 1)}})
		follow(t, l, false)
		time.Sleep(time.Second)
		calls.Store(0)
		time.Sleep(10 * time.Minute)
		if n := calls.Load(); n > int64(10*time.Minute/(10*time.Second)) {
			t.Errorf("%d calls in 10 minutes", n)
		}
		calls.Store(0)
		begun := time.Now()
		must(t, newStore(t, other).Pause(t.Context(), "p", "", 30*time.Second, anna))
		synctest.Wait()
		if len(l.Interventions().Pauses) != 1 || time.Since(begun) > time.Second {
			t.Errorf("after %v in force are %+v", time.Since(begun), l.Interventions())
		}
		time.Sleep(time.Minute)
		if n := calls.Load(); n > int64(time.Minute/(10*time.Second))+2 {
			t.Errorf("%d calls for a change, its end and a minute", n)
		}
	})
}

// An override without a tenant changes a window that all share, until it ends.
func TestALimitOfAllHoldsForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := throttletest.InMemory(t).Client(t)
		s, l := newStore(t, client), newLimiter(t, throttle.Config{Client: client, Policies: []throttle.Policy{policy("p", 1)}})
		shared := throttle.Policy{Name: "p", Windows: []throttle.Window{
			{Name: "all", Limit: 10, Period: time.Hour, Scope: throttle.ScopeShared}, {Name: "hour", Limit: 5, Period: time.Hour},
		}}
		version, err := s.Publish(t.Context(), []throttle.Policy{shared}, 0, anna)
		must(t, err)
		follow(t, l, false)
		limits := func(want string) {
			t.Helper()
			synctest.Wait()
			p := l.Policies()[0]
			if got := fmt.Sprint(p.Windows[0].Limit, p.Windows[1].Limit, len(l.Interventions().Overrides)); got != want {
				t.Errorf("in force is %s, want %s", got, want)
			}
		}
		cut := throttle.TenantOverride{Policy: "p", Windows: map[string]throttle.Override{"all": {Limit: 2}}}
		must(t, s.SetOverride(t.Context(), cut, 2*time.Hour, anna))
		limits("2 5 0")
		follow(t, newLimiter(t, throttle.Config{Client: client}), false) // a process that begins meanwhile
		shared.Windows[1].Limit = 6
		_, err = s.Publish(t.Context(), []throttle.Policy{shared}, version, anna)
		must(t, err)
		limits("2 6 0")
		time.Sleep(2*time.Hour + time.Second)
		limits("10 6 0")
		must(t, s.SetOverride(t.Context(), cut, 2*time.Hour, anna))
		limits("2 6 0")
		changes, err := s.Changes(t.Context(), "", 10)
		must(t, err)
		if text := changes[2].Text; text != "all 2 for 2h" {
			t.Errorf("the log says %q", text)
		}
		for _, wrong := range []throttle.TenantOverride{
			{Policy: "q", Windows: cut.Windows}, {Policy: "p", Weight: 2},
			{Policy: "p", Windows: map[string]throttle.Override{"none": {Limit: 2}}},
		} {
			if err := s.SetOverride(t.Context(), wrong, time.Hour, anna); err == nil {
				t.Errorf("%+v was taken", wrong)
			}
		}
		must(t, client.FlushAll(t.Context()).Err()) // what was published stays, without the override
		time.Sleep(11 * time.Second)
		limits("10 6 0")
	})
}

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
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestAFollowerKeepsWhatItHasIfItCannotUseWhatIsPublished(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		s := newStore(t, client)
		var followed atomic.Pointer[throttle.Publication]
		l := limitertest.NewFrom(t, throttle.Config{
			Client: client, Observer: expect.On(func(p throttle.Publication) { followed.Store(&p) }),
		})
		publish(t, s, 0, hourly("p", 4))
		cut := throttle.TenantOverride{Policy: "p", Windows: map[string]throttle.Override{"hour": {Limit: 3}}}
		expect.Must(t, s.SetOverride(t.Context(), cut, time.Hour, anna))
		follow(t, l, false)
		f := followed.Load()
		expect.Require(t, f != nil && f.Err == nil && f.Version != 0, "the observer was told", f)
		const windows = `"Windows":[{"Name":"hour","Limit":9,"Period":3600000000000}]`
		for _, document := range []string{
			`{"Format":1,"Policies":[{"Name":"p","Invented":1,` + windows + `}]}`, `{"Format":2,"Policies":[{"Name":"p",` + windows + `}]}`, `{"Format":1,"Policies":[{"Name":"p"}]}`, `{`,
		} {
			state := state(t, s)
			expect.Must(t, client.HSet(t.Context(), "sluice:{!control}:state", "policies", fmt.Sprint(state.Version+1000, " ", document), "mark", document).Err())
			limitertest.Until(t, "the observer is told that "+document+" cannot be used", func() bool {
				f := followed.Load()
				return f.Version == state.Version+1000 && f.Err != nil
			})
			got := l.Policies()
			expect.Require(t, len(got) == 1 && got[0].Windows[0].Limit == 3, "after", document, "the policies are", got)
		}
		limit := func(want int64) {
			t.Helper()
			limitertest.Until(t, fmt.Sprint("the limit is ", want), func() bool { return l.Policies()[0].Windows[0].Limit == want })
		}
		expect.Must(t, expect.ErrOf(s.End(t.Context(), control.Cleared, "p", "", anna)))
		limit(4)
		// A good version mends it.
		publish(t, s, state(t, s).Version, hourly("p", 5))
		limit(5)

		// What Redis forgets stays in force, but for overrides and pauses.
		expect.Must(t, s.Pause(t.Context(), "p", "", time.Hour, anna))
		limitertest.Until(t, "the pause is in force", func() bool { return len(l.Interventions().Pauses) == 1 })
		expect.Must(t, client.FlushAll(t.Context()).Err())
		limitertest.Until(t, "the pause is gone", func() bool { return len(l.Interventions().Pauses) == 0 })
		expect.Equal(t, l.Policies()[0].Windows[0].Limit, 5, "after Redis was flushed")
		version := publish(t, s, 0, hourly("p", 6))
		limit(6)

		// A failover loses only the version that cannot be used. The one that mends it has the same number.
		key := "sluice:{!control}:state"
		kept := client.HGetAll(t.Context(), key).Val()
		expect.Must(t, s.Pause(t.Context(), "p", "", time.Hour, anna))
		expect.Must(t, client.HSet(t.Context(), key, "policies", fmt.Sprint(version+1, " {"), "mark", "{").Err())
		limitertest.Until(t, "it cannot be used", func() bool { return followed.Load().Version == version+1 })
		time.Sleep(1100 * time.Millisecond) // another look, and one more
		expect.Equal(t, len(l.Interventions().Pauses), 1)
		expect.Must(t, client.HSet(t.Context(), key, kept).Err())
		limitertest.Until(t, "it is forgotten", func() bool { return followed.Load().Version == version })
		expect.Equal(t, publish(t, s, version, hourly("p", 9)), version+1)
		limit(9)

		// The first version cannot be used by a limiter of its own policies, and the next one has its number.
		expect.Must(t, client.FlushAll(t.Context()).Err())
		expect.Must(t, client.HSet(t.Context(), key, "policies", "1 {", "mark", "{").Err())
		l = limitertest.New(t, client, hourly("p", 1))
		follow(t, l, false)
		expect.Must(t, client.FlushAll(t.Context()).Err())
		time.Sleep(1100 * time.Millisecond) // a look, or two
		publish(t, s, 0, hourly("p", 10))
		limit(10)
	})
}

func TestAFollowerBeginsWhileRedisDoesNotAnswer(t *testing.T) {
	server := throttletest.Miniredis(t)
	client := throttletest.Client(t, server.Addr())
	s := newStore(t, client)
	publish(t, s, 0, hourly("p", 7))
	server.SetError("LOADING for a while")
	l := limitertest.New(t, client, hourly("p", 1))
	follow(t, l, false)
	expect.Equal(t, l.Policies()[0].Windows[0].Limit, 1, "without an answer the limit is", "not the limiter's own")
	server.SetError("")
	limitertest.Until(t, "it follows", func() bool { return l.Policies()[0].Windows[0].Limit == 7 })
}

func TestALimiterMayKeepItsPoliciesAndFollowTheRest(t *testing.T) {
	server := throttletest.Miniredis(t)
	client := throttletest.Client(t, server.Addr())
	s := newStore(t, client)
	publish(t, s, 0, hourly("p", 7))
	expect.Must(t, s.Pause(t.Context(), "p", "", time.Hour, anna))
	l := limitertest.New(t, client, hourly("p", 1))
	follow(t, l, true)
	expect.Equal(t, l.Policies()[0].Windows[0].Limit, 1)
	expect.Equal(t, len(l.Interventions().Pauses), 1, "pauses in force")
	server.SetTime(time.Now().Add(time.Hour - 10*time.Second)) // where it stands
	limitertest.Until(t, "the pause ends as the clock of Redis was set", func() bool { return len(l.Interventions().Pauses) == 0 })
}

// A process that follows asks Redis twice a second, and is told only what has changed.
func TestFollowingCostsLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := throttletest.InMemory(t)
		counted, other := memory.Client(t), memory.Client(t)
		var calls, values atomic.Int64
		counted.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if script, ok := cmd.(*redis.Cmd); ok && err == nil {
				reply, _ := script.Slice()
				calls.Add(1)
				values.Add(int64(len(reply)))
			}
			return err
		}))
		l := limitertest.New(t, counted, hourly("p", 1))
		store := newStore(t, other)
		publish(t, store, 0, hourly("p", 2))
		follow(t, l, false)
		calls.Store(0)
		values.Store(0)
		time.Sleep(time.Minute)
		n := calls.Load()
		expect.That(t, n >= 119 && n <= 121 && values.Load() == n, n, "calls in a minute, with", values.Load(), "values")
		expect.Must(t, store.Pause(t.Context(), "p", "", 30*time.Second, anna))
		time.Sleep(time.Second)
		expect.Equal(t, len(l.Interventions().Pauses), 1, "pauses in force")
		time.Sleep(30 * time.Second)
		expect.Equal(t, len(l.Interventions().Pauses), 0, "pauses in force after its end")
	})
}

// An override without a tenant changes a window that all share, until it ends.
func TestALimitOfAllHoldsForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := throttletest.InMemory(t).Client(t)
		s, l := newStore(t, client), limitertest.New(t, client, hourly("p", 1))
		shared := throttle.Policy{Name: "p", Windows: []throttle.Window{
			{Name: "all", Limit: 10, Period: time.Hour, Shared: true}, {Name: "hour", Limit: 5, Period: time.Hour},
		}}
		version := publish(t, s, 0, shared)
		follow(t, l, false)
		limits := func(want string) {
			t.Helper()
			time.Sleep(time.Second)
			p := l.Policies()[0]
			expect.Equal(t, fmt.Sprint(p.Windows[0].Limit, p.Windows[1].Limit, len(l.Interventions().Overrides)), want, "in force")
		}
		cut := throttle.TenantOverride{Policy: "p", Windows: map[string]throttle.Override{"all": {Limit: 2}}}
		expect.Must(t, s.SetOverride(t.Context(), cut, 2*time.Minute, anna))
		limits("2 5 0")
		follow(t, limitertest.New(t, client), false) // a process that begins meanwhile
		shared.Windows[1].Limit, shared.Windows[1].Algorithm = 6, throttle.AlgorithmGCRA
		version = publish(t, s, version, shared)
		limits("2 6 0")
		time.Sleep(2*time.Minute + time.Second)
		limits("10 6 0")
		expect.Must(t, s.SetOverride(t.Context(), cut, 2*time.Minute, anna))
		limits("2 6 0")
		expect.Equal(t, changes(t, s, 10)[2].Text, "all 2 for 2m", "the log says")
		for _, wrong := range []throttle.TenantOverride{
			{Policy: "q", Windows: cut.Windows}, {Policy: "p", Weight: 2},
			{Policy: "p", Windows: map[string]throttle.Override{"none": {Limit: 2}}},
		} {
			expect.That(t, s.SetOverride(t.Context(), wrong, time.Hour, anna) != nil, wrong, "was taken")
		}
		cut.Windows = map[string]throttle.Override{"hour": {Burst: 2}}
		expect.Must(t, s.SetOverride(t.Context(), cut, time.Hour, anna))
		shared.Windows[1].Limit, shared.Windows[1].Algorithm = 7, throttle.AlgorithmSliding // which has no bursts
		publish(t, s, version, shared)
		limits("10 7 0")
		expect.Must(t, client.FlushAll(t.Context()).Err()) // what was published stays, without the override
		time.Sleep(11 * time.Second)
		limits("10 7 0")
	})
}

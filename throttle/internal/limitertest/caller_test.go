package limitertest

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestACallerRecordsRefusals(t *testing.T) {
	none := throttle.CallerFrom(t.Context())
	if none != nil {
		t.Error("a context without a caller has one")
	}
	none.SetCounted(true)
	none.Refused("api", time.Minute)
	none.Answered(time.Now())
	if _, _, refused := none.Refusal(); refused || none.Counted("") {
		t.Error("no job was refused, or is counted")
	}
	synctest.Test(t, func(t *testing.T) {
		caller := &throttle.Caller{}
		inner, cancel := context.WithCancel(throttle.WithCaller(t.Context(), caller))
		defer cancel()
		if throttle.CallerFrom(inner) != caller {
			t.Error("the caller is gone")
		}
		want := func(what string, retryIn time.Duration, policy string, ok bool) {
			t.Helper()
			if r, p, o := caller.Refusal(); r != retryIn || p != policy || o != ok {
				t.Errorf("%s: %v, %q, %v; want %v, %q, %v", what, r, p, o, retryIn, policy, ok)
			}
		}
		want("nothing happened", 0, "", false)
		caller.Refused("api", time.Minute)
		want("refused", time.Minute, "api", true)
		time.Sleep(20 * time.Second)
		want("20 s later", 40*time.Second, "api", true)
		caller.Refused("other", 10*time.Second)
		want("refused for less", 40*time.Second, "api", true)
		caller.Refused("other", time.Hour)
		want("refused for longer", time.Hour, "other", true)
		time.Sleep(2 * time.Hour)
		want("when it has passed", 0, "other", true)
		caller.Answered(time.Now().Add(-3 * time.Hour))
		want("a call before the refusals is answered", 0, "other", true)
		caller.Answered(time.Now())
		want("answered", 0, "", false)
	})
}

func TestExemptRequestsAreCountedAndNeverDenied(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		l := New(t, client, Policy(throttle.Window{Name: "w", Limit: 2, Period: h}))
		exempt := Acme(3)
		exempt.Exempt = true
		var never *throttle.NeverFitsError
		if _, err := l.Reserve(t.Context(), Acme(3)); !errors.As(err, &never) {
			t.Errorf("3 of 2: %v", err)
		}
		for range 2 {
			if d := Reserve(t, l, exempt); !d.Granted || !d.Exempt {
				t.Errorf("granted %v, exempt %v", d.Granted, d.Exempt)
			}
		}
		if d := Reserve(t, l, Acme(1)); d.Granted || d.Exempt || d.Windows[0].Used != 6 {
			t.Errorf("the next of the same tenant: granted %v, exempt %v, %d used", d.Granted, d.Exempt, d.Windows[0].Used)
		}
	})
}

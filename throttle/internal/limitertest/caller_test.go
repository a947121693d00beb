package limitertest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

func TestACallerRecordsRefusals(t *testing.T) {
	throttle.CallerFrom(t.Context()).Refused("api", time.Minute)
	none := throttle.CallerFrom(t.Context())
	_, _, refused := none.Refusal()
	expect.That(t, !refused && !none.Counted(""), "no job was refused, or is counted")
	synctest.Test(t, func(t *testing.T) {
		caller := &throttle.Caller{}
		inner, cancel := context.WithCancel(throttle.WithCaller(t.Context(), caller))
		defer cancel()
		expect.Equal(t, throttle.CallerFrom(inner), caller, "the caller is gone")
		want := func(what string, retryIn time.Duration, policy string, ok bool) {
			t.Helper()
			r, p, o := caller.Refusal()
			expect.That(t, r == retryIn && p == policy && o == ok, what, r, p, o, "want", retryIn, policy, ok)
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
		caller.Answered("other", time.Now().Add(-3*time.Hour))
		want("a call before the refusals is answered", 0, "other", true)
		caller.Answered("other", time.Now())
		want("answered by one", 0, "api", true)
		caller.Answered("api", time.Now())
		want("answered by both", 0, "", false)
	})
}

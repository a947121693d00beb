package linetest

import (
	"testing"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A reset empties what it is asked for, and what waits behind it starts.
func TestAResetLetsGoWhatWaits(t *testing.T) {
	st := newStory(t, limitertest.Redis(t), limitertest.Policy(
		throttle.Window{Name: "own", Limit: 1, Period: h},
		throttle.Window{Name: "users", Limit: 2, Period: h, Scope: throttle.Per("tenant", "user")},
		throttle.Window{Name: "all", Limit: 4, Period: h, Scope: throttle.ScopeShared},
	))
	reset := func(tenant string, want int) {
		t.Helper()
		n, err := st.l.Reset(t.Context(), "p", tenant)
		limitertest.That(t, err == nil && n == want, "emptied", n, "counts, want", want, err)
	}
	used := func(tenant string, want ...int64) {
		t.Helper()
		for i, w := range limitertest.Peek(t, st.l, st.without(tenant)).Windows {
			limitertest.Equal(t, w.Used, want[i], tenant, w.Name)
		}
	}
	st.with = map[string]string{"user": "u,:%"}
	st.granted("a1", "b1", "c1")
	st.waits("a2", "b2")
	st.at(s).takes()
	reset("a", 2)
	used("a", 0, 0, 3)
	used("b", 1, 1, 3)
	st.at(3 * s).takes("a2")
	st.at(4 * s).waits("a3")
	st.takes()
	reset("", 7)
	used("a", 0, 0, 0)
	st.at(6*s).takes("b2", "a3").asks(-1)
	limitertest.WantErr(t, limitertest.Err(st.l.Reset(t.Context(), "q", "")), throttle.ErrUnknownPolicy)
	limitertest.WantErr(t, limitertest.Err(st.l.Reset(t.Context(), "q", "a")), throttle.ErrUnknownPolicy)
}

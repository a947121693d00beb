package linetest

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestReportsOfTheUpstream(t *testing.T) {
	t.Parallel()
	tenantWindow := throttle.Window{Name: "own", Limit: 10, Period: 10 * s}
	shared := limitertest.SharedWindow(10, 10*s)
	ofTenant := limitertest.Policy(tenantWindow, shared)
	off := func(windows ...throttle.Window) throttle.Policy {
		p := limitertest.Policy(windows...)
		p.KeepRate = true
		return p
	}
	tell(t, map[string]lineCase{
		"a pause is for the tenant that was refused": {ofTenant, func(st *story) {
			st.pause(st.granted("a1").Reservation, 5*s)
			st.denied("a2", 5*s)
			st.granted("b1", "b2")
		}},
		"waiting tickets keep their order, and go as the window lets them": {off(limitertest.SharedWindow(4, 4*s)), func(st *story) {
			st.granted("a1", "a2", "a3", "a4")
			st.waits("a5", "a6", "a7", "a8", "a9")
			st.at(2*s).pauseOf("a", 8*s)
			st.at(10*s - us).takes()
			st.at(10*s).takes("a5", "a6", "a7", "a8")
			st.at(14*s - us).takes()
			st.at(14 * s).takes("a9")
		}},
		"what was taken comes back to its place in a pause": {limitertest.Policy(limitertest.SharedWindow(1, 2*s)), func(st *story) {
			d := st.granted("a1")
			st.waits("a2", "a3")
			st.at(2 * s).takes("a2")
			st.pause(d.Reservation, 10*s).putBack("a2")
			st.at(12*s - us).takes()
			st.at(12 * s).takes("a2")
		}},
		"an upstream that has fewer left is believed": {limitertest.Policy(shared), func(st *story) {
			st.remaining(st.granted("a1").Reservation, 2, 30*s)
			st.granted("a2", "b1")
			st.denied("a3", 30*s)
			st.at(30*s - us).takes()
			st.at(30 * s).takes("a3")
		}},
		"what is under way is taken off": {limitertest.Policy(shared), func(st *story) {
			first := st.granted("a1")
			st.remaining(first.Reservation, 9, 30*s)
			st.at(1 * ms)
			second := st.granted("a2")
			st.at(2*ms).granted("a3", "a4") // not yet there when the upstream answered the second
			st.at(3*ms).remaining(second.Reservation, 4, 30*s)
			st.remaining(first.Reservation, 10, 30*s) // an older answer says nothing
			st.granted("b1", "b2")
			st.denied("b3", 30*s)
		}},
		"the window that remembers longest knows what is under way": {limitertest.Policy(shared,
			throttle.Window{Name: "short", Limit: 9, Period: s, Shared: true}), func(st *story) {
			first := st.granted("a1")
			st.at(ms).granted("a2")
			st.at(2*s).remaining(first.Reservation, 1, 30*s)
			st.denied("a3", 30*s)
		}},
		"an upstream that has more left is not": {limitertest.Policy(shared), func(st *story) {
			st.cost = 9
			d := st.granted("a1")
			st.costs(1).remaining(d.Reservation, 500, 30*s)
			st.granted("a2")
			st.denied("a3", 10*s)
		}},
		"what was given back is left, unless an answer came since": {limitertest.Policy(shared), func(st *story) {
			st.remaining(st.granted("a1").Reservation, 1, 30*s)
			for i := range steps(2) {
				limitertest.Cancel(st, st.l, st.at((i+1)*ms).granted("a2").Reservation)
			}
			d := st.at(3 * ms).granted("a3")
			st.remaining(d.Reservation, 0, 30*s)
			limitertest.Cancel(st, st.l, d.Reservation)
			st.denied("a4", 30*s)
		}},
		"what a correction adds is not": {limitertest.Policy(shared, tokens(1000, m)), func(st *story) {
			st.tokens = 10
			expect.Must(st, st.granted("a1").Reservation.ReportRemaining(st.Context(), "tokens", 100, 30*s))
			r := st.settle(st.at(ms).granted("a2").Reservation, 95)
			limitertest.WantDenied(st, limitertest.Reserve(st, st.l, st.without("a")), 30*s-ms)
			st.settle(r, 90)
			st.granted("b1")
			limitertest.Cancel(st, st.l, r)
			st.tokens = 90
			st.granted("b2")
		}},
		"what waits for a reset starts one after the other": {limitertest.Policy(limitertest.SharedWindow(1, m)), func(st *story) {
			st.remaining(st.granted("a1").Reservation, 0, 90*s)
			st.joins("a2")
			decision, start := st.joins("a3"), st.starts()["a3"]
			expect.That(st, decision.RetryIn == start && decision.Latest == start, "a3 starts at", start, "and was told", decision)
		}},
		"windows fill up again after a reset": {limitertest.Policy(limitertest.SharedWindow(2, m)), func(st *story) {
			st.remaining(st.granted("a1").Reservation, 1, 90*s)
			latest, start := st.joins("a2", "a3", "a4", "a5").Latest, st.starts()["a5"]
			expect.That(st, start == 150*s && latest >= start, "a5 starts at", start, "and was told", latest, "at the latest")
		}},
		"a window with room is not full after a reset": {limitertest.Policy(throttle.Window{
			Name: "day", Algorithm: throttle.AlgorithmFixed, Limit: 10_000, Period: 24 * h, Shared: true}), func(st *story) {
			st.remaining(st.granted("a1").Reservation, 2, 30*s)
			latest := st.joins("a2", "a3", "a4").Latest
			expect.That(st, latest >= 30*s && latest < 31*s, latest)
		}},
		"slots that are held are held when a pause ends": {limitertest.Policy(limitertest.Slots(1)), func(st *story) {
			st.pause(st.granted("a1").Reservation, 2*m)
			decision := st.joins("a2")
			expect.That(st, decision.RetryIn == 2*m && decision.Latest == 0, decision)
		}},
		"what a slot and a rate count of one call is corrected once": {limitertest.Policy(limitertest.Slots(9), shared), func(st *story) {
			st.remaining(st.granted("a1").Reservation, 5, 30*s)
			r := st.at(ms).granted("a2").Reservation
			expect.Must(st, expect.ErrOf(r.Settle(st.Context(), map[string]int64{"requests": 4})))
			limitertest.Cancel(st, st.l, r)
			st.costs(5).granted("a3")
		}},
	})
}

// Nothing of a pause, or what is left, stays behind.
func TestReportsOfTheUpstreamLeaveNothing(t *testing.T) {
	client := limitertest.RedisClient(t)
	p := limitertest.Policy(limitertest.SharedWindow(10, time.Second))
	p.KeepRate = true
	d := limitertest.Reserve(t, limitertest.New(t, client, p), requestOf("a"))
	expect.Must(t, expect.ErrOf(d.Reservation.Pause(t.Context(), 50*ms, "")))
	expect.Must(t, d.Reservation.ReportRemaining(t.Context(), throttle.Requests, 3, 50*ms))
	keys, err := client.Keys(t.Context(), "*").Result()
	expect.Require(t, err == nil && len(keys) > 0, keys, err)
	for _, key := range keys {
		ttl, err := client.PTTL(t.Context(), key).Result()
		expect.That(t, err == nil && ttl > 0 &&
			(ttl <= 5*time.Second || strings.HasPrefix(key, "sluice:{p}:r:")) && ttl <= m,
			key, "lives for", ttl, err)
	}
}

func TestReportsOfTheUpstreamAreChecked(t *testing.T) {
	t.Parallel()
	p := limitertest.Policy(limitertest.SharedWindow(10, s))
	l := limitertest.New(t, limitertest.NoRedis(t), p)
	r := l.Attach(limitertest.Elsewhere(t, p, requestOf("a")))
	paused := func(r throttle.Request, d time.Duration) error {
		_, err := l.Attach(throttle.Reservation{Request: r}).Pause(t.Context(), d, "")
		return err
	}
	_, long := r.Pause(t.Context(), s, strings.Repeat("x", 129))
	for _, tc := range []struct {
		err  error
		want string
	}{
		{long, `throttle: policy "p": cause "` + strings.Repeat("x", 64) + `...": must be at most 128 bytes`},
		{r.ReportRemaining(t.Context(), "to ken", 1, s), `throttle: policy "p": unit "to ken": no window counts this unit, but requests`},
		{r.ReportRemaining(t.Context(), throttle.Requests, -1, s), `throttle: policy "p": units -1: must be 0 to 1000000000000`},
		{r.ReportRemaining(t.Context(), throttle.Requests, 1, 0), `throttle: policy "p": reset 0s: must be above 0 and at most 8784h0m0s`},
	} {
		var request *throttle.RequestError
		expect.That(t, errors.As(tc.err, &request) && tc.err.Error() == tc.want, tc.err, "want", tc.want)
	}
	expect.Err(t, paused(throttle.Request{Policy: "q"}, s), throttle.ErrUnknownPolicy)
}

// A request that a pause denies learns of it: until when, and why.
func TestAPauseIsTheReason(t *testing.T) {
	p := limitertest.Policy(throttle.Window{Name: "own", Limit: 10, Period: 10 * s}, limitertest.SharedWindow(10, 10*s))
	p.UpstreamShared, p.MaxPause, p.KeepRate = true, 10*m, true
	st := newStory(t, limitertest.RedisClient(t), p)
	pause := func(tenant string, d, want time.Duration) {
		t.Helper()
		r := st.l.Attach(throttle.Reservation{Request: requestOf(tenant)})
		refusal, err := r.Pause(t.Context(), d, "429")
		expect.That(t, err == nil && refusal.Pause == want, refusal, err, "want", want)
	}
	reason := func(want string) throttle.Decision {
		t.Helper()
		d := limitertest.Reserve(t, st.l, st.without("b"))
		expect.Equal(t, d.Reason(), want)
		return d
	}
	pause("ac me", h, 10*m) // the policy's longest
	d := reason(`throttled: p, tenant b, 10m0s: paused until 00:10:00 UTC by the upstream's 429 to ac me, reported by w`)
	want := throttle.Pause{
		At: limitertest.At(0), Author: "w", Cause: "429", Policy: "p", Tenant: "ac me", Until: limitertest.At(10 * m),
	}
	expect.Require(t, d.Pause != nil, d)
	expect.Equal(t, *d.Pause, want)
	st.at(m)
	pause("c", s, 0) // shorter: the first one's goes on
	reason(`throttled: p, tenant b, 9m0s: paused until 00:10:00 UTC by the upstream's 429 to ac me, reported by w`)
	pause("c", 10*m, 0)
	reason(`throttled: p, tenant b, 10m0s: paused until 00:11:00 UTC by the upstream's 429 to c, reported by w`)
	st.at(11 * m)
	st.cost = 3
	over := limitertest.Reserve(t, st.l, st.without("a"))
	expect.That(t, over.Granted && over.Pause == nil, over)
	st.costs(1).at(20 * m)
	st.costs(10).granted("b")
	pause("a", s, s)
	if d := reason("throttled: p/own, tenant b, 10s"); d.Pause == nil { // the window denies for longer than the pause
		t.Error("no pause")
	}
}

// An exempt tenant may take more than the upstream has left. Its refund adds nothing to that.
func TestARefundAddsNothingToWhatTheUpstreamHasLeft(t *testing.T) {
	p := limitertest.Policy(limitertest.SharedWindow(100, h))
	p.Tenants, p.UpstreamShared = map[string]throttle.Tenant{"e": {Exempt: true}}, true
	st := newStory(t, limitertest.RedisClient(t), p)
	st.remaining(st.granted("a1").Reservation, 0, h).pass(s)
	expect.Must(t, expect.ErrOf(limitertest.Reserve(t, st.l, requestOf("e")).Reservation.Cancel(t.Context())))
	expect.Equal(t, limitertest.Peek(t, st.l, requestOf("b")).Remaining.Units, 0)
}

// A pause whose reply was lost began all the same.
func TestAPauseWhoseReplyWasLostBegan(t *testing.T) {
	repeating := throttletest.Client(t, limitertest.RedisClient(t).Options().Addr)
	repeating.AddHook(hooktest.Hook(hooktest.Twice))
	p := limitertest.Policy(limitertest.SharedWindow(10, s))
	p.KeepRate = true
	r := limitertest.New(t, repeating, p).Attach(throttle.Reservation{Request: requestOf("a")})
	for i, want := range []time.Duration{m, 0} {
		refusal, err := r.Pause(t.Context(), m, "")
		expect.That(t, err == nil && refusal.Pause == want, "pause", i, refusal, err)
	}
}

package linetest

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

func (sc *scene) pause(r throttle.Reservation, d time.Duration) *scene {
	sc.t.Helper()
	if _, err := r.Pause(sc.t.Context(), d, ""); err != nil {
		sc.t.Fatal(err)
	}
	return sc
}

// pauseOf is a refusal of a call of a tenant that was granted long ago.
func (sc *scene) pauseOf(tenant string, d time.Duration) *scene {
	sc.t.Helper()
	return sc.pause(sc.l.Attach(throttle.Reservation{Request: of(tenant)}), d)
}

func (sc *scene) remaining(r throttle.Reservation, units int64, reset time.Duration) *scene {
	sc.t.Helper()
	limitertest.Must(sc.t, r.ReportRemaining(sc.t.Context(), throttle.Remaining{Units: units, Reset: reset}))
	return sc
}

// of is a request that names a tenant, and no more.
func of(tenant string) throttle.Request { return throttle.Request{Policy: "p", Tenant: tenant} }

func TestReportsOfTheUpstream(t *testing.T) {
	t.Parallel()
	own := throttle.Window{Name: "own", Limit: 10, Period: 10 * s}
	shared := limitertest.SharedWindow(10, 10*s)
	ofTenant, ofAll := limitertest.Policy(own, shared), limitertest.Policy(own, shared)
	ofAll.Upstream = throttle.UpstreamShared
	ofAll.Adapt = throttle.AdaptOff
	off := func(windows ...throttle.Window) throttle.Policy {
		p := limitertest.Policy(windows...)
		p.Adapt = throttle.AdaptOff
		return p
	}
	plays(t, map[string]play{
		"a pause is for all where the policy says so": {ofAll, func(sc *scene) {
			d := sc.granted("a1")
			sc.at(1*s).pause(d.Reservation, 5*s)
			sc.denied("b1", 5*s)
			sc.denied("a2", 5*s)
			sc.at(3*s).denied("c1", 3*s)
		}},
		"a pause is for the tenant that was refused": {ofTenant, func(sc *scene) {
			d := sc.granted("a1")
			sc.pause(d.Reservation, 5*s)
			sc.denied("a2", 5*s)
			sc.granted("b1", "b2")
		}},
		"waiting tickets keep their order, and go as the window lets them": {off(limitertest.SharedWindow(4, 4*s)), func(sc *scene) {
			sc.granted("a1", "a2", "a3", "a4")
			sc.waits("a5", "a6", "a7", "a8", "a9")
			sc.at(2*s).pauseOf("a", 8*s)
			sc.at(10*s - us).takes()
			sc.at(10*s).takes("a5", "a6", "a7", "a8")
			sc.at(14*s - us).takes()
			sc.at(14 * s).takes("a9")
		}},
		"a later refusal extends a pause": {off(shared), func(sc *scene) {
			first, second, third := sc.granted("a1"), sc.granted("a2"), sc.granted("a3")
			sc.at(1*s).pause(first.Reservation, 2*s)
			sc.pause(second.Reservation, 1*s)
			sc.at(2*s).pause(third.Reservation, 2*s)
			sc.denied("b1", 2*s)
			sc.leave("b1")
			sc.at(4*s).granted("b2", "b3")
		}},
		"a pause ends by Resume": {limitertest.Policy(shared), func(sc *scene) {
			sc.pauseOf("a", h)
			sc.waits("a1", "b1")
			sc.at(1 * m)
			limitertest.Must(sc.t, sc.l.Resume(sc.t.Context(), of("c")))
			sc.takes("a1", "b1")
		}},
		"what was taken comes back to its place in a pause": {limitertest.Policy(limitertest.SharedWindow(1, 2*s)), func(sc *scene) {
			d := sc.granted("a1")
			sc.waits("a2", "a3")
			sc.at(2 * s).takes("a2")
			sc.pause(d.Reservation, 10*s)
			sc.putBack("a2")
			sc.at(12*s - us).takes()
			sc.at(12 * s).takes("a2")
		}},
		"an upstream that has fewer left is believed": {limitertest.Policy(shared), func(sc *scene) {
			d := sc.granted("a1")
			sc.remaining(d.Reservation, 2, 30*s)
			sc.granted("a2", "b1")
			sc.denied("a3", 30*s)
			sc.at(30*s - us).takes()
			sc.at(30 * s).takes("a3")
		}},
		"what is under way is taken off": {limitertest.Policy(shared), func(sc *scene) {
			first := sc.granted("a1")
			sc.remaining(first.Reservation, 9, 30*s)
			sc.at(1 * ms)
			second := sc.granted("a2")
			sc.at(2*ms).granted("a3", "a4") // not yet there when the upstream answered the second
			sc.at(3*ms).remaining(second.Reservation, 4, 30*s)
			sc.remaining(first.Reservation, 10, 30*s) // an older answer says nothing
			sc.granted("b1", "b2")
			sc.denied("b3", 30*s)
		}},
		"an upstream that has more left is not": {limitertest.Policy(shared), func(sc *scene) {
			sc.cost = 9
			d := sc.granted("a1")
			sc.cost = 1
			sc.remaining(d.Reservation, 500, 30*s)
			sc.granted("a2")
			sc.denied("a3", 10*s)
		}},
		"costs": {limitertest.Policy(shared), func(sc *scene) {
			d := sc.granted("a1")
			sc.remaining(d.Reservation, 5, 30*s)
			sc.cost = 4
			sc.granted("a2")
			sc.denied("a3", 30*s)
		}},
	})
}

// Nothing of a pause, or what is left, stays behind.
func TestReportsOfTheUpstreamLeaveNothing(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(limitertest.SharedWindow(10, time.Second))
		p.Adapt = throttle.AdaptOff
		l := limitertest.New(t, client, p)
		d := limitertest.Reserve(t, l, of("a"))
		if _, err := d.Reservation.Pause(t.Context(), 50*ms, ""); err != nil {
			t.Fatal(err)
		}
		limitertest.Must(t, d.Reservation.ReportRemaining(t.Context(), throttle.Remaining{Units: 3, Reset: 50 * ms}))
		keys, err := client.Keys(t.Context(), "*").Result()
		if err != nil || len(keys) == 0 {
			t.Fatalf("%q, %v", keys, err)
		}
		for _, key := range keys {
			if ttl, err := client.PTTL(t.Context(), key).Result(); err != nil || ttl <= 0 || ttl > 5*time.Second && !strings.HasPrefix(key, "sluice:{p}:r:") || ttl > m {
				t.Errorf("%s lives for %v, %v", key, ttl, err)
			}
		}
	})
}

func TestReportsOfTheUpstreamAreChecked(t *testing.T) {
	t.Parallel()
	l := limitertest.New(t, redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), limitertest.Policy(limitertest.SharedWindow(10, s)))
	r := l.Attach(limitertest.Made(of("a"), "0123456789abcdef"))
	paused := func(r throttle.Request, d time.Duration) error {
		_, err := l.Attach(throttle.Reservation{Request: r}).Pause(t.Context(), d, "")
		return err
	}
	for _, tc := range []struct {
		err  error
		want string
	}{
		{paused(of("a"), -s), `throttle: policy "p": pause -1s: must not be below 0`},
		{r.ReportRemaining(t.Context(), throttle.Remaining{Unit: "to ken", Units: 1, Reset: s}), `throttle: policy "p": unit "to ken": no window counts this unit, but requests`},
		{r.ReportRemaining(t.Context(), throttle.Remaining{Units: -1, Reset: s}), `throttle: policy "p": units -1: must be 0 to 1000000000000`},
		{r.ReportRemaining(t.Context(), throttle.Remaining{Units: 1}), `throttle: policy "p": reset 0s: must be above 0 and at most 8784h0m0s`},
	} {
		var request *throttle.RequestError
		if !errors.As(tc.err, &request) || tc.err.Error() != tc.want {
			t.Errorf("got %v, want %s", tc.err, tc.want)
		}
	}
	if err := paused(throttle.Request{Policy: "q"}, s); !errors.Is(err, throttle.ErrUnknownPolicy) {
		t.Error(err)
	}
}

// A request that a pause denies learns of it: until when, and why.
func TestAPauseIsTheReason(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		p := limitertest.Policy(throttle.Window{Name: "own", Limit: 10, Period: 10 * s}, limitertest.SharedWindow(10, 10*s))
		p.Upstream, p.MaxPause, p.Adapt = throttle.UpstreamShared, 10*m, throttle.AdaptOff
		sc := newScene(t, client, p)
		pause := func(tenant string, d, want time.Duration) {
			t.Helper()
			r := sc.l.Attach(throttle.Reservation{Request: of(tenant)})
			if refusal, err := r.Pause(t.Context(), d, "429"); err != nil || refusal.Pause != want {
				t.Errorf("%+v, %v, want %v", refusal, err, want)
			}
		}
		reason := func(want string) throttle.Decision {
			t.Helper()
			d := limitertest.Reserve(t, sc.l, sc.without("b"))
			if got := d.Reason(); got != want {
				t.Errorf("%q, want %q", got, want)
			}
			return d
		}
		pause("ac me", h, 10*m) // the policy's longest
		d := reason(`throttled: p, tenant b, 10m0s: paused until 00:10:00 UTC by the upstream's 429 to ac me`)
		want := throttle.Pause{
			At: limitertest.At(0), Cause: "429", Tenant: "ac me", Until: limitertest.At(10 * m),
		}
		if d.Pause == nil || d.Pause.By == "" {
			t.Fatalf("%+v", d.Pause)
		}
		if want.By = d.Pause.By; *d.Pause != want {
			t.Errorf("%+v, want %+v", d.Pause, want)
		}
		sc.at(m)
		pause("c", s, 0) // shorter: the first one's goes on
		reason(`throttled: p, tenant b, 9m0s: paused until 00:10:00 UTC by the upstream's 429 to ac me`)
		pause("c", 10*m, 0)
		reason(`throttled: p, tenant b, 10m0s: paused until 00:11:00 UTC by the upstream's 429 to c`)
		sc.at(11 * m)
		sc.cost = 3
		if d := limitertest.Reserve(t, sc.l, sc.without("a")); !d.Granted || d.Pause != nil {
			t.Errorf("%+v", d)
		}
		sc.cost = 1
		sc.at(20 * m)
		sc.cost = 10
		sc.granted("b")
		pause("a", s, s)
		if d := reason("throttled: p/own, tenant b, 10s"); d.Pause == nil { // the window denies for longer than the pause
			t.Error("no pause")
		}
	})
}

// A pause whose reply was lost began all the same.
func TestAPauseWhoseReplyWasLostBegan(t *testing.T) {
	limitertest.OnRedis(t, func(t *testing.T, client *redis.Client) {
		repeating := redis.NewClient(client.Options())
		t.Cleanup(func() { repeating.Close() })
		repeating.AddHook(hooktest.Hook(hooktest.Twice))
		p := limitertest.Policy(limitertest.SharedWindow(10, s))
		p.Adapt = throttle.AdaptOff
		r := limitertest.New(t, repeating, p).Attach(throttle.Reservation{Request: of("a")})
		for i, want := range []time.Duration{m, 0} {
			if refusal, err := r.Pause(t.Context(), m, ""); err != nil || refusal.Pause != want {
				t.Errorf("pause %d: %+v, %v", i, refusal, err)
			}
		}
	})
}

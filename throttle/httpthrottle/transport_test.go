package httpthrottle_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestACallThatDoesNotFitIsNotMade(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		server := newUpstream(t, ok)
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limitertest.New(t, client, policy("api", perHour(2))), Policy: "api"})
		for range 2 {
			expect.Must(t, expect.ErrOf(get(t.Context(), rt, server.URL)))
		}
		payload := &watched{Reader: strings.NewReader("x")}
		_, err := (&http.Client{Transport: rt}).Post(server.URL, "text/plain", payload)
		var denied *throttle.DeniedError
		expect.That(t, errors.As(err, &denied) && denied.Decision.RetryIn > 0 &&
			strings.HasPrefix(denied.Error(), "throttled: api/hour, tenant , "),
			"a third call of two an hour", err)
		expect.That(t, payload.closed.Load(), "the body of a call that was not made is open")
		expect.Equal(t, server.calls.Load(), 2, "the server saw", "calls")
	})
}

func TestTheIdentityOfACall(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()),
		throttle.Policy{Name: "jobs", Windows: []throttle.Window{perHour(100, "tenant"), {Name: "tokens", Unit: "tokens", Limit: 100, Period: time.Hour}}},
		policy("api", perHour(100, "tenant")),
		policy("other", perHour(100, "tenant", "host")))
	server := newUpstream(t, ok)
	job := func(policy string, cost map[string]int64) context.Context {
		return throttle.WithCaller(t.Context(), &throttle.Caller{Request: throttle.Request{Policy: policy, Tenant: "acme", Cost: cost}})
	}
	fixed := func(r throttle.Request, ok bool) func(*http.Request) (throttle.Request, bool) {
		return func(*http.Request) (throttle.Request, bool) { return r, ok }
	}
	tokens := map[string]int64{"requests": 2, "tokens": 30}
	host := map[string]string{"host": "h"}
	for _, row := range []struct {
		name   string
		ctx    context.Context
		config httpthrottle.TransportConfig
		counts throttle.Request // how the call is counted; not at all without a policy
		units  int64
		fails  bool
	}{
		{"the job's own policy, and cost", job("jobs", tokens), httpthrottle.TransportConfig{}, throttle.Request{Policy: "jobs", Tenant: "acme"}, 2, false},
		{"another policy than the job's", job("jobs", tokens), httpthrottle.TransportConfig{Policy: "api"}, throttle.Request{Policy: "api", Tenant: "acme"}, 1, false},
		{"a job without a policy", job("", map[string]int64{"requests": 3}), httpthrottle.TransportConfig{Policy: "api"}, throttle.Request{Policy: "api", Tenant: "acme"}, 3, false},
		{"a function", job("jobs", nil), httpthrottle.TransportConfig{Policy: "other", Request: fixed(throttle.Request{Tenant: "beta", Attributes: host}, true)},
			throttle.Request{Policy: "other", Tenant: "beta", Attributes: host}, 1, false},
		{"a function that names no policy", job("jobs", nil), httpthrottle.TransportConfig{Request: fixed(throttle.Request{Tenant: "acme"}, true)},
			throttle.Request{Policy: "jobs", Tenant: "acme"}, 1, false},
		{"a function that does not know", job("jobs", nil), httpthrottle.TransportConfig{Policy: "api", Request: fixed(throttle.Request{}, false)}, throttle.Request{}, 0, true},
		{"nobody", t.Context(), httpthrottle.TransportConfig{}, throttle.Request{}, 0, true},
		{"nobody, and passed", t.Context(), httpthrottle.TransportConfig{PassUnidentified: true}, throttle.Request{}, 0, false},
		{"learning only", job("jobs", nil), httpthrottle.TransportConfig{LearnOnly: true}, throttle.Request{}, 0, false},
	} {
		before := map[string]int64{}
		all := []throttle.Request{{Policy: "jobs", Tenant: "acme"}, {Policy: "api", Tenant: "acme"}, {Policy: "other", Tenant: "beta", Attributes: host}}
		for _, r := range all {
			before[r.Policy] = limitertest.Used(limitertest.Peek(t, limiter, r))[0]
		}
		calls := server.calls.Load()
		row.config.Limiter = limiter
		_, err := get(row.ctx, newTransport(t, row.config), server.URL)
		var unidentified *httpthrottle.UnidentifiedError
		expect.That(t, row.fails == errors.As(err, &unidentified) && (row.fails || err == nil), row.name, err)
		made := server.calls.Load() > calls
		expect.That(t, made != row.fails, row.name, "the call was made", made)
		for _, r := range all {
			want := int64(0)
			if r.Policy == row.counts.Policy {
				want = row.units
			}
			expect.Equal(t, limitertest.Used(limitertest.Peek(t, limiter, r))[0]-before[r.Policy], want, row.name, "policy", r.Policy, "counts")
		}
	}
}

// A job waits in no line but its own policy's: a call that is denied under its ticket joins none.
func TestADeniedCallOfAJobJoinsNoLine(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := limitertest.New(t, client, policy("api", perHour(1)))
		server := newUpstream(t, ok)
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api"})
		expect.Must(t, expect.ErrOf(get(t.Context(), rt, server.URL)))
		job := &throttle.Caller{Request: throttle.Request{Ticket: throttle.Ticket{Queue: "default", ID: "7"}, Key: "key", Front: true}}
		var denied *throttle.DeniedError
		_, err := get(throttle.WithCaller(t.Context(), job), rt, server.URL)
		expect.Require(t, errors.As(err, &denied) && !denied.Decision.Queued, err)
		taken, err := limiter.Line("api").Take(t.Context(), throttle.TakeOptions{Queues: map[string]int{"default": 1}, Max: 1})
		expect.That(t, err == nil && taken.Next < 0, "somebody waits", taken, err)
	})
}

func TestACallThatWasNeverMadeCostsNothing(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := limitertest.New(t, client, policy("api", perHour(9), slots(9)))
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api"})

		listener := expect.Got(net.Listen("tcp", "127.0.0.1:0"))(t)
		address := "http://" + listener.Addr().String()
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				conn.Read(make([]byte, 1))
				conn.Close()
			}
		}()
		_, err := get(t.Context(), rt, address)
		expect.That(t, err != nil, "a call that the server hung up on succeeded")
		limitertest.WantUsed(t, limiter, throttle.Request{Policy: "api"}, 1, 0)
		listener.Close()
		var dial *net.OpError
		_, err = get(t.Context(), rt, "http://127.0.0.1:1")
		expect.That(t, errors.As(err, &dial) && dial.Op == "dial", "a call to nobody", err)
		limitertest.WantUsed(t, limiter, throttle.Request{Policy: "api"}, 1, 0)
		expect.That(t, expect.ErrOf(get(t.Context(), rt, "gopher://127.0.0.1:1")) != nil, "a call by an unknown scheme")
		limitertest.WantUsed(t, limiter, throttle.Request{Policy: "api"}, 1, 0)
	})
}

func TestAContextThatEndsWithTheGrantCostsNothing(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		limiter := limitertest.New(t, client, policy("api", perHour(9), slots(9)))
		client.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if err == nil && hooktest.IsScript(cmd) {
				cancel()
			}
			return err
		}))
		called := false
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api", Base: base(func(*http.Request) (*http.Response, error) {
			called = true
			return nil, errors.New("called")
		})})
		_, err := get(ctx, rt, "http://upstream")
		expect.That(t, errors.Is(err, context.Canceled) && !called, called, err)
		// A caller that leaves before the reply does not wait until its grant is given back.
		limitertest.Until(t, "nothing is used", func() bool {
			return slices.Equal(limitertest.Used(limitertest.Peek(t, limiter, throttle.Request{Policy: "api"})), []int64{0, 0})
		})
	})
}

// A Base that breaks the contract of http.RoundTripper has its client say so.
func TestABaseThatAnswersNothing(t *testing.T) {
	limiter := throttletest.NewLimiter(t, policy("api", perHour(9, "ip")))
	nothing := base(func(*http.Request) (*http.Response, error) { return nil, nil })
	request := func(*http.Request) (throttle.Request, bool) {
		return throttle.Request{Attributes: map[string]string{"ip": "local"}}, true
	}
	for _, learnOnly := range []bool{false, true} {
		transport := newTransport(t, httpthrottle.TransportConfig{Base: nothing, LearnOnly: learnOnly, Limiter: limiter, Policy: "api", Request: request})
		_, err := get(t.Context(), transport, "http://localhost")
		expect.Contains(t, fmt.Sprint(err), "nil *Response")
	}
	d, ok := httpthrottle.RetryAfter(nil)
	expect.That(t, d == 0 && !ok, "no response asks to wait for", d, ok)
}

func TestConfigsOfTransports(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, limitertest.NoRedis(t), policy("api", perHour(1)))
	for want, c := range map[string]httpthrottle.TransportConfig{
		"Limiter is nil":  {},
		`Policy "nope"`:   {Limiter: limiter, Policy: "nope"},
		"MaxWait -1s":     {Limiter: limiter, MaxWait: -time.Second},
		"Pause 8785h0m0s": {Limiter: limiter, Pause: throttle.MaxPeriod + time.Hour},
		"Pause -1s":       {Limiter: limiter, Pause: -time.Second},
	} {
		_, err := httpthrottle.NewTransport(c)
		expect.Contains(t, fmt.Sprint(err), "httpthrottle: TransportConfig."+want)
	}
}

func TestNoCallIsMadeWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	server := newUpstream(t, ok)
	closed, open := policy("closed", perHour(1)), policy("open", slots(1))
	open.FailOpen = true
	limiter := limitertest.New(t, limitertest.NoRedis(t), closed, open)
	_, err := get(t.Context(), newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "closed"}), server.URL)
	var wrapped *url.Error
	expect.That(t, errors.Is(err, throttle.ErrUnavailable) && errors.As(err, &wrapped) && server.calls.Load() == 0,
		err, server.calls.Load())
	opens := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "open"})
	expect.Must(t, expect.ErrOf(get(t.Context(), opens, server.URL)))
}

func TestACallWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		maxWait time.Duration
		request time.Duration // of what Request returns
		timeout time.Duration // of the second call's context; 0 for none
		waits   time.Duration
		denied  bool
	}{
		{"not at all", 0, 0, 0, 0, true},
		{"long enough", 5 * time.Second, 0, 0, 2 * time.Second, false},
		{"as long as Request says", 0, 5 * time.Second, 0, 2 * time.Second, false},
		{"not at all, as Request says", 5 * time.Second, -1, 0, 0, true},
		{"it is known at once that it is too long", time.Second, 0, 0, 0, true},
		{"the deadline comes before its turn", 5 * time.Second, 0, time.Second, 0, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			limitertest.Bubble(t, policy("api", throttle.Window{Name: "w", Limit: 1, Period: 2 * time.Second, Shared: true}), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
				rt := newTransport(t, httpthrottle.TransportConfig{
					Limiter: l, Policy: "api", MaxWait: row.maxWait, Base: answer(http.NoBody),
					Request: func(*http.Request) (throttle.Request, bool) { return throttle.Request{MaxWait: row.request}, true },
				})
				expect.Must(t, expect.ErrOf(get(t.Context(), rt, "http://upstream")))
				ctx := t.Context()
				if row.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, row.timeout)
					defer cancel()
				}
				start := time.Now()
				_, err := get(ctx, rt, "http://upstream")
				var denied *throttle.DeniedError
				expect.That(t, row.denied == errors.As(err, &denied) && (row.denied || err == nil), err)
				expect.Equal(t, time.Since(start), row.waits, "waited")
			})
		})
	}
}

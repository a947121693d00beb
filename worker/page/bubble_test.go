package page_test

import (
	"context"
	"fmt"
	"net"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/page"
)

// inBubble runs a test with a page whose policy "p" has two tickets in line, on fake time. It counts calls to Redis.
func inBubble(t *testing.T, test func(t *testing.T, get func() string, p *page.Page, calls *atomic.Int64)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int64
		limiter, err := throttle.New(throttle.Config{
			Client:   throttletest.InMemory(t).Client(t),
			Observer: expect.On(func(throttle.Call) { calls.Add(1) }),
			Policies: []throttle.Policy{{Name: "p", Windows: []throttle.Window{
				{Name: "w", Limit: 1, Period: 10 * time.Hour},
				{Name: "all", Algorithm: throttle.AlgorithmGCRA, Burst: 1, Limit: 2, Period: 10 * time.Hour, Shared: true},
			}}},
		})
		expect.Must(t, err)
		for i := range 3 {
			r := throttle.Request{Policy: "p", Tenant: "acme", Ticket: throttle.Ticket{Queue: "q", ID: fmt.Sprint(i)}}
			expect.Must(t, expect.ErrOf(limiter.Reserve(t.Context(), r)))
		}
		p := expect.Got(page.New(page.Config{Limiter: limiter}))(t)
		get := func() string {
			w := httptest.NewRecorder()
			p.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/?policy=p", nil))
			return w.Body.String()
		}
		test(t, get, p, &calls)
	})
}

// However many look at the page, Redis is asked once a second.
func TestManyLookAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, get func() string, _ *page.Page, calls *atomic.Int64) {
		calls.Store(0)
		get()
		once := calls.Load()
		for range 50 {
			go get()
		}
		synctest.Wait()
		got := calls.Load()
		expect.That(t, once != 0 && got == once, "51 looked, and made", got, "calls, want the", once, "of one")
		time.Sleep(time.Second)
		get()
		expect.That(t, calls.Load() == 2*once, "a second later the page made", calls.Load()-once, "calls, want", once, "more")
	})
}

// The charts know what was recorded, whether or not somebody looked.
func TestChartsKnowWhatWasRecorded(t *testing.T) {
	inBubble(t, func(t *testing.T, get func() string, p *page.Page, _ *atomic.Int64) {
		expect.That(t, strings.Contains(get(), "Nothing is recorded"), "there is a chart of nothing")
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { p.Run(ctx); close(ended) }()
		time.Sleep(40 * time.Minute)
		stop()
		<-ended
		text := get()
		for _, want := range []string{
			`aria-label="Waiting, 00:10 to 00:39 UTC: at most 2"`, `<span class="quiet">2 now</span>`,
			`<meter min="0" max="1" value="1" aria-label="all: 1 of 1 in 10h">`, // of its burst
		} {
			expect.That(t, strings.Contains(text, want), want, "is missing in:", text)
		}
	})
}

// A hungRedis takes connections, and answers nothing.
type hungRedis struct{}

func (hungRedis) MakeRedisClient() any {
	return redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", Dialer: func(context.Context, string, string) (net.Conn, error) {
		conn, _ := net.Pipe()
		return conn, nil
	}})
}

// However Redis hangs, the page is there within 1.5 s, and says so. If asynq's alone does, it shows the policies.
func TestThePageWaitsForRedisInTime(t *testing.T) {
	t.Parallel()
	test := func(t *testing.T, client *redis.Client, down bool) {
		defer client.Close()
		limiter := expect.Got(throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{{Name: "p", Match: []string{"*"},
			Windows: []throttle.Window{{Name: "w", Limit: 1, Period: time.Hour}}}}}))(t)
		enqueuer := expect.Got(worker.NewClient(hungRedis{}, worker.ClientConfig{Limiter: limiter}))(t)
		defer enqueuer.Close()
		inspector := asynq.NewInspector(hungRedis{})
		defer inspector.Close()
		p := expect.Got(page.New(page.Config{Client: enqueuer, Control: control.StoreOf(limiter), Inspector: inspector, Limiter: limiter}))(t)
		for _, path := range []string{"/", "/?policy=p", "/?policy=p&like=a", "/?find=a", "/?task=a&queue=q", "/"} {
			begun, w := time.Now(), httptest.NewRecorder()
			p.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", path, nil))
			took := time.Since(begun)
			says := strings.Contains(w.Body.String(), `id="down"`)
			expect.That(t, took <= 1500*time.Millisecond && says == down && (down || path != "/" || strings.Contains(w.Body.String(), "The Redis of the queues: ")),
				path, "after", took, "it says", w.Body)
		}
		time.Sleep(time.Minute) // until all calls have ended
	}
	synctest.Test(t, func(t *testing.T) { test(t, hungRedis{}.MakeRedisClient().(*redis.Client), true) })
	synctest.Test(t, func(t *testing.T) { test(t, throttletest.InMemory(t).Client(t), false) })
}

// A slowHook has some commands take seconds.
type slowHook struct{ redis.Hook }

func (slowHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if isSlow, _ := ctx.Value(slowHook{}).(func(redis.Cmder) bool); isSlow != nil && isSlow(cmd) {
			time.Sleep(2 * time.Second)
		}
		return next(ctx, cmd)
	}
}

func (slowHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (slowHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// However Redis hangs, an action is answered within 2 s. What has not begun then never does; the rest may have.
func TestActionsWaitForRedisInTime(t *testing.T) {
	t.Parallel()
	for want, isSlow := range map[string]func(redis.Cmder) bool{
		"Redis does not answer. Nothing has changed.": func(redis.Cmder) bool { return true },
		"Redis does not answer: whether this was done, or a part of it, is not known. When Redis answers": func(cmd redis.Cmder) bool {
			return strings.HasPrefix(cmd.Name(), "eval") && fmt.Sprint(cmd.Args()[2]) == "2" // the state and the log
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			client := throttletest.InMemory(t).Client(t)
			client.AddHook(slowHook{})
			limiter := expect.Got(throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{{Name: "p",
				Windows: []throttle.Window{{Name: "w", Limit: 1, Period: time.Hour}}}}}))(t)
			store := control.StoreOf(limiter)
			p := expect.Got(page.New(page.Config{Control: store, Limiter: limiter, Token: token}))(t)
			cookie, ctx := "", t.Context()
			do := func(method, path string, form url.Values) *httptest.ResponseRecorder {
				r, w := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(form.Encode())), httptest.NewRecorder()
				r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
				r.Header.Set("Cookie", cookie)
				p.ServeHTTP(w, r)
				return w
			}
			cookie, _, _ = strings.Cut(do("POST", "/sign-in", url.Values{"token": {token}, "who": {"anna"}}).Header().Get("Set-Cookie"), ";")
			_, csrf, _ := strings.Cut(do("GET", "/?policy=p", nil).Body.String(), `name="csrf" value="`)
			csrf, _, _ = strings.Cut(csrf, `"`)
			begun := time.Now()
			ctx = context.WithValue(ctx, slowHook{}, isSlow)
			text := do("POST", "/change", url.Values{"csrf": {csrf}, "policy": {"p"}, "what": {"pause"}, "for": {"1h"}, "why": {"a test"},
				"sure": {"yes"}, "version": {"0"}}).Body.String()
			took := time.Since(begun)
			expect.That(t, took <= 2*time.Second && strings.Contains(text, want), "after", took, "it does not say", want, text)
			time.Sleep(time.Minute)
			state, err := store.State(t.Context())
			unchanged := strings.Contains(want, "Nothing")
			expect.That(t, err == nil && unchanged == (len(state.Pauses) == 0), "after", want, "these are in force", state.Pauses, err)
		})
	}
}

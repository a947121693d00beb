package httpthrottle_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
)

func TestMain(m *testing.M) {
	redis.SetLogger(quiet{}) // connections fail on purpose here
	os.Exit(m.Run())
}

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

func newLimiter(t testing.TB, client redis.UniversalClient, policies ...throttle.Policy) *throttle.Limiter {
	t.Helper()
	l, err := throttle.New(throttle.Config{Client: client, Policies: policies})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func policy(name string, windows ...throttle.Window) throttle.Policy {
	return throttle.Policy{Name: name, Windows: windows}
}

// perHour is a window in which no time passes during a test.
func perHour(limit int64, per ...string) throttle.Window {
	return throttle.Window{Name: "hour", Limit: limit, Period: time.Hour, Scope: throttle.Per(per...)}
}

// slots is a window of so many at once, under a lease of 3 s.
func slots(limit int64) throttle.Window {
	return throttle.Window{Name: "slots", Algorithm: throttle.Concurrency, Limit: limit, Lease: 3 * time.Second, Scope: throttle.Shared}
}

// bubble runs the test on fake time, with a miniredis inside. It fails if a goroutine is left behind.
func bubble(t *testing.T, p throttle.Policy, test func(t *testing.T, l *throttle.Limiter, m *miniredis.Miniredis)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server := miniredis.NewMiniRedis()
		server.ClockTTL(true)
		client := redis.NewClient(&redis.Options{
			Addr:   "127.0.0.1:6379", // a name would be looked up outside the bubble
			Dialer: func(context.Context, string, string) (net.Conn, error) { return server.Dial() },
		})
		test(t, newLimiter(t, client, p), server)
		client.Close()
		server.Close()
	})
}

func newTransport(t testing.TB, c httpthrottle.TransportConfig) *httpthrottle.Transport {
	t.Helper()
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Base == nil { // the default one is everybody's: each httptest.Server that closes ends its connections
		base := http.DefaultTransport.(*http.Transport).Clone()
		t.Cleanup(base.CloseIdleConnections)
		c.Base = base
	}
	transport, err := httpthrottle.NewTransport(c)
	if err != nil {
		t.Fatal(err)
	}
	return transport
}

func newMiddleware(t testing.TB, c httpthrottle.MiddlewareConfig) func(http.Handler) http.Handler {
	t.Helper()
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	middleware, err := httpthrottle.NewMiddleware(c)
	if err != nil {
		t.Fatal(err)
	}
	return middleware
}

// A far is a server that counts its calls.
type far struct {
	*httptest.Server
	calls atomic.Int64
}

func newFar(t testing.TB, answer http.HandlerFunc) *far {
	f := &far{}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.calls.Add(1)
		answer(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

func ok(http.ResponseWriter, *http.Request) {}

// get makes a call and reads the answer to its end.
func get(ctx context.Context, rt http.RoundTripper, url string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := (&http.Client{Transport: rt}).Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp, err
}

// used is how many units are counted in each window for a request.
func used(t testing.TB, l *throttle.Limiter, r throttle.Request) []int64 {
	t.Helper()
	var used []int64
	for _, w := range peek(t, l, r).Windows {
		used = append(used, w.Used)
	}
	return used
}

func peek(t testing.TB, l *throttle.Limiter, r throttle.Request) throttle.Decision {
	t.Helper()
	d, err := l.Peek(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// base makes a RoundTripper of a function.
type base func(*http.Request) (*http.Response, error)

func (f base) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A watched body tells whether it was closed.
type watched struct {
	io.Reader
	closed atomic.Bool
}

func (w *watched) Close() error {
	w.closed.Store(true)
	return nil
}

// commands counts what a client sends.
type commands struct{ n atomic.Int64 }

func (c *commands) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *commands) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (c *commands) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if strings.HasPrefix(cmd.Name(), "eval") {
			c.n.Add(1)
		}
		return next(ctx, cmd)
	}
}

// A journal keeps what is logged.
type journal struct {
	mu   sync.Mutex
	text strings.Builder
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) count(text string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Count(j.text.String(), text)
}

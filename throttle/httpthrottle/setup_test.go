package httpthrottle_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
)

func TestMain(m *testing.M) {
	logging.Disable() // connections fail on purpose here
	os.Exit(m.Run())
}

func policy(name string, windows ...throttle.Window) throttle.Policy {
	return throttle.Policy{Name: name, Windows: windows}
}

// perHour is a window that does not move during a test.
func perHour(limit int64, per ...string) throttle.Window {
	return throttle.Window{Name: "hour", Limit: limit, Period: time.Hour, Per: per, Shared: per == nil}
}

// slots is a window that allows so many calls at once. Its lease is 3 s.
func slots(limit int64) throttle.Window {
	return throttle.Window{Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: limit, Lease: 3 * time.Second, Shared: true}
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
	return expect.Got(httpthrottle.NewTransport(c))(t)
}

// An upstream is a server that counts its calls.
type upstream struct {
	*httptest.Server
	calls atomic.Int64
}

func newUpstream(t testing.TB, answer http.HandlerFunc) *upstream {
	u := &upstream{}
	u.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u.calls.Add(1)
		answer(w, r)
	}))
	t.Cleanup(u.Close)
	return u
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

// base makes a RoundTripper of a function.
type base func(*http.Request) (*http.Response, error)

func (f base) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// answer is a base that answers 200 with the body.
func answer(body io.ReadCloser) base {
	return func(req *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: body, Request: req}, nil
	}
}

// stream is a base. The body of its response is what the caller writes, until the call's context ends.
func stream() (base, *io.PipeWriter) {
	reader, writer := io.Pipe()
	return func(req *http.Request) (*http.Response, error) {
		context.AfterFunc(req.Context(), func() { writer.CloseWithError(context.Cause(req.Context())) })
		return answer(reader)(req)
	}, writer
}

// A watched body knows whether it was closed.
type watched struct {
	io.Reader
	closed atomic.Bool
}

func (w *watched) Close() error {
	w.closed.Store(true)
	return nil
}

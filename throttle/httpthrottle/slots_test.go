package httpthrottle_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A call holds its slot until it ends, beyond a lease of 3 s.
func TestASlotIsHeldForAsLongAsTheCall(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	const unread = ", which nobody reads"
	for name, end := range map[string]func(resp *http.Response, writer *io.PipeWriter, cancel context.CancelFunc){
		"its context is canceled" + unread: func(_ *http.Response, _ *io.PipeWriter, cancel context.CancelFunc) { cancel() },
		"its body is closed" + unread:      func(resp *http.Response, _ *io.PipeWriter, _ context.CancelFunc) { resp.Body.Close() },
		"its body is read":                 func(_ *http.Response, writer *io.PipeWriter, _ context.CancelFunc) { writer.Close() },
		"its body breaks":                  func(_ *http.Response, writer *io.PipeWriter, _ context.CancelFunc) { writer.CloseWithError(broken) },
		"its context is canceled":          func(_ *http.Response, _ *io.PipeWriter, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limitertest.Bubble(t, policy("api", slots(1)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
				fake, writer := stream()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				resp, err := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", Base: fake}).
					RoundTrip(httptest.NewRequestWithContext(ctx, "GET", "http://upstream", nil))
				expect.Must(t, err)
				if !strings.HasSuffix(name, unread) {
					go io.Copy(io.Discard, resp.Body)
				}
				for range 10 {
					time.Sleep(900 * time.Millisecond)
					limitertest.WantUsed(t, l, throttle.Request{Policy: "api"}, 1)
				}
				end(resp, writer, cancel)
				time.Sleep(time.Millisecond)
				limitertest.WantUsed(t, l, throttle.Request{Policy: "api"}, 0)
			})
		})
	}
	for name, fake := range map[string]base{
		"there is no body":  answer(http.NoBody),
		"the call fails":    func(*http.Request) (*http.Response, error) { return nil, broken },
		"the upstream says": answer(io.NopCloser(strings.NewReader("x"))),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limitertest.Bubble(t, policy("api", slots(1), perHour(9)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
				resp, err := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", Base: fake}).
					RoundTrip(httptest.NewRequestWithContext(t.Context(), "GET", "http://upstream", nil))
				expect.That(t, err == nil || errors.Is(err, broken), err)
				if err == nil && resp.Body != http.NoBody { // which many do not read, nor close
					io.Copy(io.Discard, resp.Body)
				}
				// That base tells nothing of connections: what may have been made counts.
				limitertest.WantUsed(t, l, throttle.Request{Policy: "api"}, 0, 1)
			})
		})
	}
}

// A call is read to its end though its policy loses its slots meanwhile.
func TestACallOutlivesTheSlotsOfItsPolicy(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("api", slots(1)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		fake, writer := stream()
		resp, err := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", Base: base(func(req *http.Request) (*http.Response, error) {
			expect.Must(t, l.SetPolicies([]throttle.Policy{policy("api", perHour(9))}))
			return fake(req)
		})}).RoundTrip(httptest.NewRequestWithContext(t.Context(), "GET", "http://upstream", nil))
		expect.Must(t, err)
		time.AfterFunc(time.Minute, func() { writer.Close() })
		expect.Must(t, expect.ErrOf(io.ReadAll(resp.Body)))
	})
}

// A function that panics during a call leaves no slot held.
func TestAPanicReleasesTheSlot(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("api", slots(1)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		for name, c := range map[string]httpthrottle.TransportConfig{
			"Base":    {Base: base(func(*http.Request) (*http.Response, error) { panic("on purpose") })},
			"Refusal": {Base: answer(http.NoBody), Refusal: func(*http.Response) (time.Duration, bool) { panic("on purpose") }},
		} {
			c.Limiter, c.Policy = l, "api"
			func() {
				defer func() { _ = recover() }()
				_, err := newTransport(t, c).RoundTrip(httptest.NewRequestWithContext(t.Context(), "GET", "http://upstream", nil))
				t.Errorf("%s: there is no panic, but %v", name, err)
			}()
			limitertest.WantUsed(t, l, throttle.Request{Policy: "api"}, 0)
		}
	})
}

func TestACallEndsWhoseSlotIsLost(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		window := slots(1)
		window.Lease = 6 * time.Second // the other's is not renewed
		api := policy("api", window)
		api.Tenants = map[string]throttle.Tenant{"exempt": {Exempt: true}}
		limiter := limitertest.New(t, client, api)
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}))
		server.EnableHTTP2 = true // whose errors tell no cause
		server.StartTLS()
		t.Cleanup(server.Close)
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
		c := httpthrottle.TransportConfig{Limiter: limiter, Policy: "api", Base: server.Client().Transport}
		resp := expect.Got(newTransport(t, c).RoundTrip(req))(t)
		client.FlushAll(t.Context())
		other := throttle.Request{Policy: "api", Tenant: "exempt"} // a renewal may have come before
		d, err := limiter.Reserve(t.Context(), other)
		expect.Require(t, err == nil && d.Granted, "nobody could take the slot", err)
		if limitertest.Used(limitertest.Peek(t, limiter, other))[0] == 1 {
			expect.Err(t, expect.ErrOf(io.Copy(io.Discard, resp.Body)), throttle.ErrLeaseLost, "reading on")
		}
		resp.Body.Close()
		limitertest.WantUsed(t, limiter, other, 1)
	})
}

// A response that switches protocols can be written to.
func TestASwitchedConnectionIsHeldToo(t *testing.T) {
	t.Parallel()
	limitertest.Bubble(t, policy("api", slots(1)), func(t *testing.T, l *throttle.Limiter, _ throttletest.Memory) {
		near, far := net.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", Base: base(func(req *http.Request) (*http.Response, error) {
			resp, err := answer(near)(req)
			resp.StatusCode = http.StatusSwitchingProtocols
			return resp, err
		})}).
			RoundTrip(httptest.NewRequestWithContext(ctx, "GET", "http://upstream", nil))
		expect.Must(t, err)
		both, ok := resp.Body.(io.ReadWriteCloser)
		expect.Require(t, ok, "a", resp.Body, "cannot be written to")
		go func() { io.Copy(far, far); far.Close() }()
		heard := make([]byte, 5)
		expect.Must(t, expect.ErrOf(both.Write([]byte("hello"))))
		_, err = io.ReadFull(both, heard)
		expect.That(t, err == nil && string(heard) == "hello", heard, err)
		limitertest.WantUsed(t, l, throttle.Request{Policy: "api"}, 1)
		expect.Err(t, both.(interface{ CloseWrite() error }).CloseWrite(), errors.ErrUnsupported) // as by a pipe
		cancel()
		expect.That(t, expect.ErrOf(both.Read(heard)) != nil, "it goes on without a slot")
		synctest.Wait() // the release is under way
		limitertest.WantUsed(t, l, throttle.Request{Policy: "api"}, 0)
		both.Close()
	})
}

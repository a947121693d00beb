package httpthrottle_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/httpthrottle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestACallThatDoesNotFitIsNotMade(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		server := newFar(t, ok)
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: newLimiter(t, client, policy("api", perHour(2))), Policy: "api"})
		for range 2 {
			if _, err := get(t.Context(), rt, server.URL); err != nil {
				t.Fatal(err)
			}
		}
		payload := &watched{Reader: strings.NewReader("x")}
		_, err := (&http.Client{Transport: rt}).Post(server.URL, "text/plain", payload)
		var denied *throttle.DeniedError
		if !errors.As(err, &denied) || denied.Decision.RetryIn <= 0 || !strings.HasPrefix(denied.Error(), "throttled: api/hour, tenant , ") {
			t.Errorf("a third call of two an hour: %v", err)
		}
		if !payload.closed.Load() {
			t.Error("the body of a call that was not made is open")
		}
		if n := server.calls.Load(); n != 2 {
			t.Errorf("the server saw %d calls, want 2", n)
		}
	})
}

func TestWhoseACallIs(t *testing.T) {
	t.Parallel()
	limiter := newLimiter(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()),
		throttle.Policy{Name: "jobs", Windows: []throttle.Window{perHour(100, "tenant"), {Name: "tokens", Unit: "tokens", Limit: 100, Period: time.Hour}}},
		policy("api", perHour(100, "tenant")),
		policy("other", perHour(100, "tenant", "host")))
	server := newFar(t, ok)
	job := func(policy string, cost map[string]int64) context.Context {
		return throttle.WithJob(t.Context(), &throttle.Job{Request: throttle.Request{Policy: policy, Tenant: "acme", Cost: cost, IdempotencyKey: "the job's"}})
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
		counts throttle.Request // by whom the call is counted; no policy: nobody
		units  int64
		fails  bool
	}{
		{"the job's own policy, and cost", job("jobs", tokens), httpthrottle.TransportConfig{}, throttle.Request{Policy: "jobs", Tenant: "acme"}, 2, false},
		{"another policy than the job's", job("jobs", tokens), httpthrottle.TransportConfig{Policy: "api"}, throttle.Request{Policy: "api", Tenant: "acme"}, 1, false},
		{"a job without a policy", job("", map[string]int64{"requests": 3}), httpthrottle.TransportConfig{Policy: "api"}, throttle.Request{Policy: "api", Tenant: "acme"}, 3, false},
		{"a function", job("jobs", nil), httpthrottle.TransportConfig{Policy: "other", Request: fixed(throttle.Request{Tenant: "beta", Attributes: host}, true)},
			throttle.Request{Policy: "other", Tenant: "beta", Attributes: host}, 1, false},
		{"a function that does not know", job("jobs", nil), httpthrottle.TransportConfig{Policy: "api", Request: fixed(throttle.Request{}, false)}, throttle.Request{}, 0, true},
		{"nobody", t.Context(), httpthrottle.TransportConfig{}, throttle.Request{}, 0, true},
		{"nobody, and passed", t.Context(), httpthrottle.TransportConfig{PassUnidentified: true}, throttle.Request{}, 0, false},
		{"learning only", job("jobs", nil), httpthrottle.TransportConfig{LearnOnly: true}, throttle.Request{}, 0, false},
	} {
		before := map[string]int64{}
		all := []throttle.Request{{Policy: "jobs", Tenant: "acme"}, {Policy: "api", Tenant: "acme"}, {Policy: "other", Tenant: "beta", Attributes: host}}
		for _, r := range all {
			before[r.Policy] = used(t, limiter, r)[0]
		}
		calls := server.calls.Load()
		row.config.Limiter = limiter
		_, err := get(row.ctx, newTransport(t, row.config), server.URL)
		var unidentified *httpthrottle.UnidentifiedError
		if row.fails != errors.As(err, &unidentified) || !row.fails && err != nil {
			t.Errorf("%s: %v", row.name, err)
		}
		if made := server.calls.Load() > calls; made == row.fails {
			t.Errorf("%s: the call was made: %v", row.name, made)
		}
		for _, r := range all {
			want := int64(0)
			if r.Policy == row.counts.Policy {
				want = row.units
			}
			if got := used(t, limiter, r)[0] - before[r.Policy]; got != want {
				t.Errorf("%s: policy %s counts %d, want %d", row.name, r.Policy, got, want)
			}
		}
	}
}

func TestACallWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		maxWait time.Duration
		timeout time.Duration // of the second call's context; 0 for none
		waits   time.Duration
		denied  bool
	}{
		{"not at all", 0, 0, 0, true},
		{"long enough", 5 * time.Second, 0, 2 * time.Second, false},
		{"it is known at once that it is too long", time.Second, 0, 0, true},
		{"the deadline comes before its turn", 5 * time.Second, time.Second, 0, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			bubble(t, policy("api", throttle.Window{Name: "w", Limit: 1, Period: 2 * time.Second, Scope: throttle.Shared}), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
				rt := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: row.maxWait, Base: answer(http.NoBody)})
				if _, err := get(t.Context(), rt, "http://far"); err != nil {
					t.Fatal(err)
				}
				ctx := t.Context()
				if row.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, row.timeout)
					defer cancel()
				}
				start := time.Now()
				_, err := get(ctx, rt, "http://far")
				var denied *throttle.DeniedError
				if row.denied != errors.As(err, &denied) || !row.denied && err != nil {
					t.Error(err)
				}
				if waited := time.Since(start); waited != row.waits {
					t.Errorf("waited %v, want %v", waited, row.waits)
				}
			})
		})
	}
}

func TestACallWaitsForASlotThatComesEarly(t *testing.T) {
	t.Parallel()
	bubble(t, policy("api", slots(1)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		fake, writer := stream()
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: time.Minute, Base: fake})
		// It says that it may take an hour: all that is known of when the slot is free.
		long, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		first, err := rt.RoundTrip(httptest.NewRequestWithContext(long, "GET", "http://far", nil))
		if err != nil {
			t.Fatal(err)
		}
		if d := peek(t, l, throttle.Request{Policy: "api"}); d.RetryIn < 59*time.Minute {
			t.Fatalf("the slot is free in %v at the latest, not an hour", d.RetryIn)
		}
		time.AfterFunc(10*time.Second+300*time.Millisecond, func() { writer.Close() })
		go io.Copy(io.Discard, first.Body)
		start := time.Now()
		rt = newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: time.Minute, Base: answer(http.NoBody)})
		if _, err := get(t.Context(), rt, "http://far"); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(start); waited < 10300*time.Millisecond || waited > 11300*time.Millisecond {
			t.Errorf("waited %v for a slot that was free after 10.3s", waited)
		}
	})
}

func TestACallWhoseContextEndsWaitsNoLonger(t *testing.T) {
	t.Parallel()
	bubble(t, policy("api", perHour(1)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", MaxWait: 2 * time.Hour, Base: answer(http.NoBody)})
		if _, err := get(t.Context(), rt, "http://far"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		start := time.Now()
		if _, err := get(ctx, rt, "http://far"); !errors.Is(err, context.Canceled) || time.Since(start) != time.Minute {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
	})
}

// answer is a base that answers 200 with the body.
func answer(body io.ReadCloser) base {
	return func(req *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: body, Request: req}, nil
	}
}

// stream is a base whose answer's body is what is written, until the call's context ends.
func stream() (base, *io.PipeWriter) {
	reader, writer := io.Pipe()
	return func(req *http.Request) (*http.Response, error) {
		context.AfterFunc(req.Context(), func() { writer.CloseWithError(context.Cause(req.Context())) })
		return answer(reader)(req)
	}, writer
}

// What ends a call, ends its hold of a slot, and not before: a lease is 3 s.
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
			bubble(t, policy("api", slots(1)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
				fake, writer := stream()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				resp, err := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", Base: fake}).
					RoundTrip(httptest.NewRequestWithContext(ctx, "GET", "http://far", nil))
				if err != nil {
					t.Fatal(err)
				}
				if !strings.HasSuffix(name, unread) {
					go io.Copy(io.Discard, resp.Body)
				}
				for range 10 {
					time.Sleep(900 * time.Millisecond)
					if n := used(t, l, throttle.Request{Policy: "api"}); n[0] != 1 {
						t.Fatal("a call under way holds nothing")
					}
				}
				end(resp, writer, cancel)
				time.Sleep(time.Millisecond)
				if n := used(t, l, throttle.Request{Policy: "api"}); n[0] != 0 {
					t.Error("a call that has ended holds its slot")
				}
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
			bubble(t, policy("api", slots(1), perHour(9)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
				resp, err := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", Base: fake}).
					RoundTrip(httptest.NewRequestWithContext(t.Context(), "GET", "http://far", nil))
				if err != nil && !errors.Is(err, broken) {
					t.Error(err)
				}
				if err == nil && resp.Body != http.NoBody { // which many do not read, nor close
					io.Copy(io.Discard, resp.Body)
				}
				// That base tells nothing of connections: what may have been made counts.
				if n := used(t, l, throttle.Request{Policy: "api"}); !slices.Equal(n, []int64{0, 1}) {
					t.Errorf("slots and calls counted %v, want 0 and 1", n)
				}
			})
		})
	}
}

func TestACallEndsWhoseSlotIsLost(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		window := slots(1)
		window.Lease = time.Second
		limiter := newLimiter(t, client, policy("api", window))
		server := newFar(t, func(w http.ResponseWriter, r *http.Request) {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		})
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
		resp, err := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api"}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		client.FlushAll(t.Context())
		other := throttle.Request{Policy: "api", Exempt: true} // a renewal may have come before
		if d, err := limiter.Reserve(t.Context(), other); err != nil || !d.Granted {
			t.Fatal("nobody could take the slot", err)
		}
		if used(t, limiter, other)[0] == 1 {
			if _, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, throttle.ErrLeaseLost) {
				t.Errorf("reading on: %v", err)
			}
		}
		resp.Body.Close()
		if n := used(t, limiter, other); n[0] != 1 {
			t.Errorf("%d slots are held, want the other's", n[0])
		}
	})
}

// An answer that switches protocols is written to.
func TestASwitchedConnectionIsHeldToo(t *testing.T) {
	t.Parallel()
	bubble(t, policy("api", slots(1)), func(t *testing.T, l *throttle.Limiter, _ *miniredis.Miniredis) {
		near, far := net.Pipe()
		resp, err := newTransport(t, httpthrottle.TransportConfig{Limiter: l, Policy: "api", Base: answer(near)}).
			RoundTrip(httptest.NewRequestWithContext(t.Context(), "GET", "http://far", nil))
		if err != nil {
			t.Fatal(err)
		}
		both, ok := resp.Body.(io.ReadWriteCloser)
		if !ok {
			t.Fatalf("a %T cannot be written to", resp.Body)
		}
		go func() { io.Copy(far, far); far.Close() }()
		heard := make([]byte, 5)
		if _, err := both.Write([]byte("hello")); err != nil {
			t.Error(err)
		}
		if _, err := io.ReadFull(both, heard); err != nil || string(heard) != "hello" {
			t.Errorf("heard %q, %v", heard, err)
		}
		if n := used(t, l, throttle.Request{Policy: "api"}); n[0] != 1 {
			t.Error("a connection in use holds nothing")
		}
		both.Close()
		if n := used(t, l, throttle.Request{Policy: "api"}); n[0] != 0 {
			t.Error("a closed connection holds its slot")
		}
	})
}

// A job waits in no line but its own policy's: a call that is denied under its ticket joins none.
func TestADeniedCallOfAJobJoinsNoLine(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := newLimiter(t, client, policy("api", perHour(1)))
		server := newFar(t, ok)
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api"})
		if _, err := get(t.Context(), rt, server.URL); err != nil {
			t.Fatal(err)
		}
		job := &throttle.Job{Request: throttle.Request{Ticket: throttle.TicketID{Queue: "default", ID: "7"}, Key: "key", Front: true}}
		var denied *throttle.DeniedError
		if _, err := get(throttle.WithJob(t.Context(), job), rt, server.URL); !errors.As(err, &denied) || denied.Decision.Queued {
			t.Fatal(err)
		}
		taken, err := limiter.Line("api").Take(t.Context(), throttle.TakeOptions{Queues: []string{"default"}, Max: 1})
		if err != nil || taken.Next >= 0 {
			t.Errorf("somebody waits: %+v, %v", taken, err)
		}
	})
}

func TestSlotsOnLoopback(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := newLimiter(t, client, policy("api", slots(1)))
		server := newFar(t, func(w http.ResponseWriter, r *http.Request) {
			if n := used(t, limiter, throttle.Request{Policy: "api"}); n[0] != 1 {
				t.Errorf("%d slots held during a call", n[0])
			}
			fmt.Fprint(w, strings.Repeat("x", 100_000))
		})
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api"})
		for range 5 { // one after the other: each has released when its body was read
			if _, err := get(t.Context(), rt, server.URL); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestACallThatWasNeverMadeCostsNothing(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		limiter := newLimiter(t, client, policy("api", perHour(9), slots(9)))
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api"})

		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
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
		if _, err := get(t.Context(), rt, address); err == nil {
			t.Error("a call that the server hung up on succeeded")
		}
		if n := used(t, limiter, throttle.Request{Policy: "api"}); !slices.Equal(n, []int64{1, 0}) {
			t.Errorf("a call that may have been heard: %v counted, want 1 and no slot", n)
		}
		listener.Close()
		var dial *net.OpError
		if _, err := get(t.Context(), rt, address); !errors.As(err, &dial) || dial.Op != "dial" {
			t.Errorf("a call to nobody: %v", err)
		}
		if n := used(t, limiter, throttle.Request{Policy: "api"}); !slices.Equal(n, []int64{1, 0}) {
			t.Errorf("a call that was never made: %v counted, want 1 and no slot as before", n)
		}
	})
}

// afterwardsDo runs a function after each script call.
type afterwardsDo func()

func (f afterwardsDo) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f afterwardsDo) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (f afterwardsDo) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if err == nil && strings.HasPrefix(cmd.Name(), "eval") {
			f()
		}
		return err
	}
}

func TestAContextThatEndsWithTheGrantCostsNothing(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		limiter := newLimiter(t, client, policy("api", perHour(9), slots(9)))
		client.AddHook(afterwardsDo(cancel))
		called := false
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api", Base: base(func(*http.Request) (*http.Response, error) {
			called = true
			return nil, errors.New("called")
		})})
		if _, err := get(ctx, rt, "http://far"); !errors.Is(err, context.Canceled) || called {
			t.Errorf("called %v: %v", called, err)
		}
		if n := used(t, limiter, throttle.Request{Policy: "api"}); !slices.Equal(n, []int64{0, 0}) {
			t.Errorf("%v counted, want nothing", n)
		}
	})
}

func TestARefusalIsLearnt(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	now := time.Now().UTC().Truncate(time.Second)
	date := func(d time.Duration) string { return now.Add(d).Format(http.TimeFormat) }
	for _, row := range []struct {
		name   string
		status int
		fields []string // pairs
		pause  time.Duration
	}{
		{"seconds", 429, []string{"Retry-After", "30"}, 30 * time.Second},
		{"a date, by the upstream's clock", 429, []string{"Date", date(-day), "Retry-After", date(40*time.Second - day)}, 40 * time.Second},
		{"a date without a clock", 429, []string{"Retry-After", now.Add(2 * time.Hour).Format(http.TimeFormat)}, 2 * time.Hour},
		{"no word", 429, nil, 7 * time.Second},
		{"nonsense", 429, []string{"Retry-After", "soon"}, 7 * time.Second},
		{"at once", 429, []string{"Retry-After", "0"}, 7 * time.Second},
		{"below 0", 429, []string{"Retry-After", "-5"}, 7 * time.Second},
		{"for ages", 429, []string{"Retry-After", "99999999999999999999"}, day},
		{"nothing left, and until when", 429, []string{"RateLimit", `"a";r=0;t=50, "b";r=9;t=3600`}, 50 * time.Second},
		{"unavailable", 503, []string{"Retry-After", "20"}, 20 * time.Second},
		{"unavailable, without a word", 503, nil, 0},
		{"broken", 500, []string{"Retry-After", "20"}, 0},
		{"forbidden", 403, nil, 0},
		{"forbidden for now", 403, []string{"Retry-After", "60"}, time.Minute},
		{"forbidden, as nothing is left", 403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "90"}, 90 * time.Second},
		{"fine", 200, []string{"Retry-After", "20"}, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			p := policy("api", perHour(1000))
			p.MaxPause = 24 * time.Hour
			limiter := newLimiter(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), p)
			job := &throttle.Job{}
			job.Refused("api", time.Hour) // by an earlier call
			if row.pause > 0 {
				job.Answered(time.Now())
			}
			rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api", Pause: 7 * time.Second,
				Base: base(func(req *http.Request) (*http.Response, error) {
					h := http.Header{}
					for i := 0; i < len(row.fields); i += 2 {
						h.Set(row.fields[i], row.fields[i+1])
					}
					return &http.Response{StatusCode: row.status, Header: h, Body: http.NoBody}, nil
				})})
			resp, err := get(throttle.WithJob(t.Context(), job), rt, "http://far")
			if err != nil || resp.StatusCode != row.status {
				t.Fatal("the answer is the caller's in any case:", err)
			}
			retryIn, policy, refused := job.Refusal()
			d := peek(t, limiter, throttle.Request{Policy: "api"})
			if row.pause == 0 {
				if refused || !d.Granted {
					t.Errorf("no refusal, but the job was refused: %v, for %v", refused, d.RetryIn)
				}
				return
			}
			within := func(what string, got time.Duration) {
				if got > row.pause || got < row.pause-20*time.Second && got < row.pause/2 || got <= 0 {
					t.Errorf("%s %v, want %v", what, got, row.pause)
				}
			}
			within("paused for", d.RetryIn)
			within("the job is to come again in", retryIn)
			if !refused || policy != "api" {
				t.Errorf("the job was told of a refusal: %v, by policy %q", refused, policy)
			}
		})
	}
}

func TestAPauseHoldsForAllWhoShareThePolicy(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		server := newFar(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "600")
			w.WriteHeader(http.StatusTooManyRequests)
		})
		for _, learnOnly := range []bool{false, true} {
			name := fmt.Sprintf("api-%v", learnOnly)
			limiter := newLimiter(t, client, policy(name, perHour(1000)))
			var log bytes.Buffer
			one := newTransport(t, httpthrottle.TransportConfig{
				Limiter: limiter, Policy: name, LearnOnly: learnOnly, Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			other := newTransport(t, httpthrottle.TransportConfig{Limiter: newLimiter(t, client, policy(name, perHour(1000))), Policy: name})
			before := server.calls.Load()
			if _, err := get(t.Context(), one, server.URL); err != nil {
				t.Fatal(err)
			}
			_, err := get(t.Context(), other, server.URL)
			var denied *throttle.DeniedError
			if !errors.As(err, &denied) || denied.Decision.RetryIn < time.Minute {
				t.Errorf("learn only %v: a call after a refusal: %v", learnOnly, err)
			}
			if n := server.calls.Load() - before; n != 1 {
				t.Errorf("learn only %v: the upstream saw %d calls, want 1", learnOnly, n)
			}
			if learnOnly { // it is refused again
				if _, err := get(t.Context(), one, server.URL); err != nil {
					t.Fatal(err)
				}
			}
			want := `msg="httpthrottle: the upstream refused a call: its policy pauses" policy=` + name + ` tenant="" for=10m0s`
			if strings.Count(log.String(), "\n") != 1 || !strings.Contains(log.String(), want) {
				t.Errorf("logged:\n%swant once:\n%s", &log, want)
			}
		}
	})
}

func TestWhatIsLeftIsLearntAndToldOnce(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		remaining, quota, age := int64(1000), int64(1000), "0"
		server := newFar(t, func(w http.ResponseWriter, _ *http.Request) {
			remaining--
			w.Header().Set("Age", age)
			w.Header().Set("RateLimit", fmt.Sprintf(`"all";r=%d;t=3000, "slots";r=0;t=10`, max(0, remaining)))
			w.Header().Set("RateLimit-Policy", `"slots";q=5;qu="concurrent-requests"`)
		})
		sent := &commands{}
		client.AddHook(sent)
		limiter := newLimiter(t, client, policy("api", perHour(quota)))
		rt := newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "api"})
		call := func(what string, granted bool, scripts int64) {
			t.Helper()
			before := sent.n.Load()
			_, err := get(t.Context(), rt, server.URL)
			var denied *throttle.DeniedError
			if granted != (err == nil) || !granted && !errors.As(err, &denied) {
				t.Fatalf("%s: %v", what, err)
			}
			// go-redis loads a script by a second call.
			if n := sent.n.Load() - before; n != scripts && n != scripts+1 {
				t.Errorf("%s: %d script calls, want %d", what, n, scripts)
			}
		}
		call("the first", true, 1)
		for range 5 {
			call("the upstream counts as we do", true, 1)
		}
		remaining, age = 5, "7"
		call("others took all but 5, by an answer from a cache", true, 1)
		age = "0"
		call("others took all but 4", true, 2)
		call("3 are left", true, 1)
		call("2 are left", true, 1)
		call("1 is left", true, 1)
		call("none is left", false, 1)
		if n := server.calls.Load(); n != 11 {
			t.Errorf("the upstream saw %d calls, want 11", n)
		}
	})
}

func TestConfigsOfTransports(t *testing.T) {
	t.Parallel()
	limiter := newLimiter(t, throttletest.Client(t, "127.0.0.1:1"), policy("api", perHour(1)))
	for want, c := range map[string]httpthrottle.TransportConfig{
		"Limiter is nil":  {},
		`Policy "nope"`:   {Limiter: limiter, Policy: "nope"},
		"MaxWait -1s":     {Limiter: limiter, MaxWait: -time.Second},
		"Pause 8785h0m0s": {Limiter: limiter, Pause: throttle.MaxPeriod + time.Hour},
		"Pause -1s":       {Limiter: limiter, Pause: -time.Second},
	} {
		if _, err := httpthrottle.NewTransport(c); err == nil || !strings.Contains(err.Error(), "httpthrottle: TransportConfig."+want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestNoCallIsMadeWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	server := newFar(t, ok)
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: -1})
	defer client.Close()
	closed, open := policy("closed", perHour(1)), policy("open", slots(1))
	open.Fail = throttle.FailOpen
	limiter := newLimiter(t, client, closed, open)
	_, err := get(t.Context(), newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "closed"}), server.URL)
	var wrapped *url.Error
	if !errors.Is(err, throttle.ErrUnavailable) || !errors.As(err, &wrapped) || server.calls.Load() != 0 {
		t.Errorf("fail: closed: %v, after %d calls", err, server.calls.Load())
	}
	if _, err := get(t.Context(), newTransport(t, httpthrottle.TransportConfig{Limiter: limiter, Policy: "open"}), server.URL); err != nil {
		t.Errorf("fail: open: %v", err)
	}
}

package limitertest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// impatient is a client that tries everything once.
func impatient(t *testing.T, addr string) *redis.Client {
	t.Helper()
	return givesUpAfter(t, addr, 20*s)
}

// unanswered is a client that soon gives up waiting for a Redis that hangs.
func unanswered(t *testing.T) *redis.Client {
	t.Helper()
	p := NewLossyProxy(t, throttletest.Miniredis(t).Addr())
	p.Hole.Store(true)
	return givesUpAfter(t, p.Addr, 200*ms)
}

func givesUpAfter(t *testing.T, addr string, wait time.Duration) *redis.Client {
	client := redis.NewClient(&redis.Options{
		Addr: addr, MaxRetries: -1, DialerRetries: 1, PoolSize: 1, PoolTimeout: 10 * ms, ReadTimeout: wait,
	})
	t.Cleanup(func() { client.Close() })
	return client
}

// unavailable is what both modes make of a Redis that cannot serve.
func unavailable(t *testing.T, client redis.UniversalClient, what string) {
	t.Helper()
	closed := three()
	open := three()
	open.Name, open.FailOpen = "open", true
	l := New(t, client, closed, open)
	d, err := l.Reserve(t.Context(), Acme(1))
	expect.That(t, errors.Is(err, throttle.ErrUnavailable) && !d.Granted, what, "granted", d.Granted, err)
	r := Acme(1)
	r.Policy = "open"
	d, err = l.Reserve(t.Context(), r)
	expect.That(t, err == nil && d.Granted && errors.Is(d.FailedOpen, throttle.ErrUnavailable) &&
		d.Windows == nil && !d.At.IsZero(), what, "fail open", d, err)
	expect.Must(t, expect.ErrOf(d.Reservation.Cancel(t.Context())))
	expect.Err(t, expect.ErrOf(l.Peek(t.Context(), r)), throttle.ErrUnavailable, what)
	d, err = l.Wait(t.Context(), r)
	expect.That(t, err == nil && d.FailedOpen != nil, what, "Wait", d, err)
	expect.Err(t, expect.ErrOf(l.Attach(Elsewhere(t, open, r)).Cancel(t.Context())), throttle.ErrUnavailable, what)
}

func TestRedisThatIsGone(t *testing.T) {
	used := func(t *testing.T, addr string, stop func()) *redis.Client {
		client := impatient(t, addr)
		Reserve(t, New(t, client, three()), Acme(1))
		stop()
		return client
	}
	cases := map[string]func(t *testing.T) *redis.Client{
		"redis":     func(t *testing.T) *redis.Client { p := servers.RedisProcess(t); return used(t, p.Addr, p.Stop) },
		"miniredis": func(t *testing.T) *redis.Client { m := throttletest.Miniredis(t); return used(t, m.Addr(), m.Close) },
		"client": func(t *testing.T) *redis.Client {
			client := impatient(t, throttletest.Miniredis(t).Addr())
			client.Close()
			return client
		},
		"pool": func(t *testing.T) *redis.Client {
			client := impatient(t, throttletest.Miniredis(t).Addr())
			conn := client.Conn()
			t.Cleanup(func() { conn.Close() })
			expect.Must(t, conn.Ping(t.Context()).Err()) // takes the only connection
			return client
		},
		"hangs": unanswered,
	}
	for name, err := range map[string]error{
		"pipe closed": io.ErrClosedPipe,
		"TLS refused": tls.RecordHeaderError{Msg: "first record does not look like a TLS handshake"},
		"certificate": x509.UnknownAuthorityError{},
		"dialer":      errors.New("no such unit"),
	} {
		cases[name] = func(t *testing.T) *redis.Client {
			client := redis.NewClient(&redis.Options{
				Dialer:     func(context.Context, string, string) (net.Conn, error) { return nil, err },
				MaxRetries: -1, DialerRetries: 1,
			})
			t.Cleanup(func() { client.Close() })
			return client
		}
	}
	for name, gone := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			unavailable(t, gone(t), name)
		})
	}
}

// What Redis says while it cannot serve, if it says anything.
func TestRedisThatCannotServe(t *testing.T) {
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		client := impatient(t, throttletest.Redis(t))
		do := func(args ...any) {
			t.Helper()
			expect.Must(t, client.Do(t.Context(), args...).Err())
		}
		l := New(t, client, three())
		Reserve(t, l, Acme(1))
		for _, state := range []struct {
			name     string
			on, off  []any
			readable bool // Peek serves: then only the writing verbs fail
		}{
			{"OOM", []any{"CONFIG", "SET", "maxmemory", "1"}, []any{"CONFIG", "SET", "maxmemory", "0"}, true},
			{"NOREPLICAS", []any{"CONFIG", "SET", "min-replicas-to-write", "1"}, []any{"CONFIG", "SET", "min-replicas-to-write", "0"}, true},
			{"READONLY", []any{"REPLICAOF", "127.0.0.1", "1"}, []any{"REPLICAOF", "NO", "ONE"}, true},
		} {
			before := Dump(t, client)
			do(state.on...)
			err := expect.ErrOf(l.Reserve(t.Context(), Acme(1)))
			expect.That(t, errors.Is(err, throttle.ErrUnavailable) && strings.Contains(err.Error(), state.name), state.name, err)
			expect.Must(t, expect.ErrOf(l.Peek(t.Context(), Acme(1))))
			do(state.off...)
			expect.Equal(t, Dump(t, client), before, state.name)
		}
		do("CONFIG", "SET", "maxmemory", "0")
		Reserve(t, l, Acme(1))
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		server := throttletest.Miniredis(t)
		client := impatient(t, server.Addr())
		for _, reply := range []string{
			"LOADING Redis is loading the dataset in memory",
			"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
			"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
			"CLUSTERDOWN The cluster is down",
			"ERR max number of clients reached",
			"NOAUTH Authentication required.",
		} {
			server.SetError(reply)
			unavailable(t, client, reply)
		}
	})
}

// A script that breaks is our fault, not Redis's: nothing fails open on it.
func TestUnexpectedReplies(t *testing.T) {
	p := three()
	p.FailOpen = true
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		breaks := func(text string) string {
			return strings.Replace(text, "local reply, n = {", "nothing.at = all\nlocal reply, n = {", 1)
		}
		l := NewEdited(t, client, nil, []func(string) string{breaks}, p).Limiter
		refused(t, l, client, "script that breaks", throttle.ErrReply)
	})
	for name, reply := range map[string]any{
		"status": "OK", "nil": nil, "empty": []any{}, "too short": []any{int64(1), int64(2), int64(3)}, "strings": []any{"a", "b"},
	} {
		client := throttletest.Client(t, throttletest.Miniredis(t).Addr())
		client.AddHook(hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			if script, ok := cmd.(*redis.Cmd); ok && err == nil {
				script.SetVal(reply)
			}
			return err
		}))
		d, err := New(t, client, p).Reserve(t.Context(), Acme(1))
		expect.That(t, errors.Is(err, throttle.ErrReply) && !d.Granted, name, "granted", d.Granted, err)
	}
}

// A context that ends is not a Redis that is down: nothing fails open.
func TestContextThatEnds(t *testing.T) {
	p := three()
	p.FailOpen = true
	t.Run("cancelled before", func(t *testing.T) {
		throttletest.Each(t, func(t *testing.T, client *redis.Client) {
			l := New(t, client, p)
			ctx, end := context.WithCancelCause(t.Context())
			cause := errors.New("shutting down")
			end(cause)
			for name, ask := range map[string]func(context.Context, throttle.Request) (throttle.Decision, error){
				"Reserve": l.Reserve, "Peek": l.Peek, "Wait": l.Wait,
			} {
				d, err := ask(ctx, Acme(1))
				expect.That(t, errors.Is(err, context.Canceled) && errors.Is(err, cause) &&
					!errors.Is(err, throttle.ErrUnavailable) && !d.Granted, name, "granted", d.Granted, err)
			}
			expect.Equal(t, len(Dump(t, client)), 0)
		})
	})
	t.Run("deadline while Redis hangs", func(t *testing.T) {
		t.Parallel()
		l := New(t, unanswered(t), p)
		ctx, end := context.WithTimeout(t.Context(), 20*ms)
		defer end()
		d, err := l.Reserve(ctx, Acme(1))
		expect.That(t, errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, throttle.ErrUnavailable) &&
			!d.Granted, "granted", d.Granted, err)
	})
	t.Run("cancelled while Redis is down", func(t *testing.T) {
		t.Parallel()
		ctx, end := context.WithCancelCause(t.Context())
		end(errors.New("shutting down"))
		d, err := New(t, NoRedis(t), p).Reserve(ctx, Acme(1))
		expect.That(t, errors.Is(err, context.Canceled) && !d.Granted, "granted", d.Granted, err)
	})
}

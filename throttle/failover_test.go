package throttle_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A replica becomes the primary while the old one goes on, as when a network is cut in two. Both
// know what was granted before. So together they exceed a limit by what was not, and never by more
// than the limit. An old primary that writes only with a replica grants nothing any more.
func TestWhatTwoPrimariesExceed(t *testing.T) {
	t.Parallel()
	const limit = 5
	for _, row := range []struct {
		args   []string
		before int
		want   int // granted in all
	}{
		{nil, 0, 2 * limit},
		{nil, 3, 2*limit - 3},
		{nil, limit, limit},
		{[]string{"--min-replicas-to-write", "1"}, 3, limit},
	} {
		t.Run(fmt.Sprint(row.before, " before ", row.args), func(t *testing.T) {
			t.Parallel()
			old, promoted := twoServers(t, row.args...)
			p := throttle.Policy{Name: "p", Windows: []throttle.Window{{Name: "w", Limit: limit, Period: h}}}
			granted := 0
			drain := func(client *redis.Client, most int) {
				t.Helper()
				l := newLimiter(t, client, p)
				for range most {
					d, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "acme"})
					if err != nil && !errors.Is(err, throttle.ErrUnavailable) {
						t.Fatal(err)
					}
					if d.Granted {
						granted++
					}
				}
			}
			drain(old, row.before)
			promote(t, old, promoted)
			drain(old, 2*limit)
			drain(promoted, 2*limit)
			if granted != row.want {
				t.Errorf("granted %d of %d, want %d", granted, limit, row.want)
			}
		})
	}
}

// twoServers starts a primary and a replica that follows it.
func twoServers(t *testing.T, args ...string) (primary, replica *redis.Client) {
	t.Helper()
	primary = throttletest.Client(t, throttletest.Redis(t, append(args, "--repl-diskless-sync-delay", "0")...))
	replica = throttletest.Client(t, throttletest.Redis(t, "--replicaof", strings.Replace(primary.Options().Addr, ":", " ", 1)))
	untilReplication(t, replica, "master_link_status:up")
	untilReplication(t, primary, "state=online")
	return primary, replica
}

// promote makes the replica a primary that knows all until now, beside the old one.
func promote(t *testing.T, primary, replica *redis.Client) {
	t.Helper()
	if err := primary.Wait(t.Context(), 1, 10*time.Second).Err(); err != nil {
		t.Fatal(err)
	}
	if err := replica.Do(t.Context(), "replicaof", "no", "one").Err(); err != nil {
		t.Fatal(err)
	}
	untilReplication(t, primary, "connected_slaves:0")
}

// untilReplication waits until INFO replication contains the text.
func untilReplication(t *testing.T, client *redis.Client, text string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !strings.Contains(client.Info(t.Context(), "replication").Val(), text); {
		if time.Now().After(end) {
			t.Fatalf("in vain until it says %s", text)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// A new primary does not know the last grants of the old one. With "failover: strict" it grants
// nothing until they count no more, and takes nothing from the line. Then it goes on for good.
func TestAStrictPolicyIsClosedAfterAFailover(t *testing.T) {
	t.Parallel()
	const limit, period = 5, time.Second
	old, promoted := twoServers(t)
	p := throttle.Policy{Name: "p", Failover: throttle.FailoverStrict, Windows: []throttle.Window{
		{Name: "w", Limit: limit, Period: period, Scope: throttle.Shared},
		{Name: "each", Algorithm: throttle.GCRA, Limit: 1000, Burst: 10, Period: period},
	}}
	request := throttle.Request{Policy: "p", Tenant: "acme"}
	before := newLimiter(t, old, p)
	reserve(t, before, request)
	promote(t, old, promoted)
	var last throttle.Decision
	for range limit - 1 {
		last = reserve(t, before, request) // which the new primary does not know
	}
	if !last.Granted {
		t.Fatal("the old primary did not grant its limit")
	}
	after := newLimiter(t, promoted, p)
	for range 2 {
		if d, err := after.Reserve(t.Context(), request); !errors.Is(err, throttle.ErrUnavailable) || !strings.Contains(err.Error(), "CLOSED after a failover") {
			t.Errorf("after the failover: granted %v, %v", d.Granted, err)
		}
	}
	if taken, err := after.Line("p").Take(t.Context(), throttle.TakeOptions{Queues: []string{"q"}, Max: 1}); !errors.Is(err, throttle.ErrUnavailable) {
		t.Errorf("after the failover: took %v, %v", taken.Tickets, err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		d, err := after.Reserve(t.Context(), request)
		if err == nil {
			if since := d.At.Sub(last.At); !d.Granted || since < period {
				t.Errorf("granted %v, %v after the last grant of the old primary", d.Granted, since)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	for range limit - 1 {
		if d := reserve(t, after, request); !d.Granted {
			t.Error("it has not opened for good")
		}
	}
}

// Policies that close are closed for as long as their slowest window counts.
func TestHowLongAStrictPolicyIsClosed(t *testing.T) {
	for want, windows := range map[string][]throttle.Window{
		"60001": {{Name: "a", Limit: 1, Period: s}, {Name: "b", Limit: 1, Period: m, Margin: ms}},
		"30000": {{Name: "a", Algorithm: throttle.Concurrency, Limit: 1}},
		"5000":  {{Name: "a", Algorithm: throttle.GCRA, Limit: 2, Burst: 10, Period: s}},
		"8000":  {{Name: "a", Algorithm: throttle.Fixed, Limit: 2, Period: 8 * s}},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			old, promoted := twoServers(t)
			p := throttle.Policy{Name: "p", Failover: throttle.FailoverStrict, Windows: windows}
			request := throttle.Request{Policy: "p", Tenant: "acme"}
			reserve(t, newLimiter(t, old, p), request)
			promote(t, old, promoted)
			_, err := newLimiter(t, promoted, p).Reserve(t.Context(), request)
			if err == nil || !strings.Contains(err.Error(), "for another "+want+" ms") {
				t.Errorf("want it closed for %s ms: %v", want, err)
			}
		})
	}
}

// A user who may not ask for the primary's ID would not learn of a failover: its calls fail.
func TestAStrictPolicyNeedsToKnowThePrimary(t *testing.T) {
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		p := throttle.Policy{Name: "p", Failover: throttle.FailoverStrict, Windows: []throttle.Window{{Name: "w", Limit: 5, Period: h}}}
		request := throttle.Request{Policy: "p", Tenant: "acme"}
		for range 2 {
			if d := reserve(t, newLimiter(t, client, p), request); !d.Granted {
				t.Error("it is closed without a failover")
			}
		}
		if client.Do(t.Context(), "acl", "setuser", "meek", "on", "nopass", "~*", "+@all", "-info").Err() != nil {
			return // miniredis
		}
		meek := redis.NewClient(&redis.Options{Addr: client.Options().Addr, Username: "meek", Password: "any"})
		defer meek.Close()
		if d, err := newLimiter(t, meek, p).Reserve(t.Context(), request); err == nil {
			t.Errorf("granted %v without the right to ask", d.Granted)
		}
	})
}

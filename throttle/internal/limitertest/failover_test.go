package limitertest

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
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
	type row struct{ before, want int } // granted before, and in all
	for _, c := range []struct {
		args []string
		rows []row
	}{
		{nil, []row{{0, 2 * limit}, {3, 2*limit - 3}, {limit, limit}}},
		{[]string{"--min-replicas-to-write", "1"}, []row{{3, limit}}},
	} {
		t.Run(fmt.Sprint(c.args), func(t *testing.T) {
			t.Parallel()
			old, promoted := twoServers(t, c.args...)
			granted := make([]int, len(c.rows))
			drain := func(client *redis.Client, i, most int) {
				t.Helper()
				name := fmt.Sprint("p", i)
				l := New(t, client, throttle.Policy{Name: name, Windows: []throttle.Window{{Name: "w", Limit: limit, Period: h}}})
				for range most {
					d, err := l.Reserve(t.Context(), throttle.Request{Policy: name, Tenant: "acme"})
					if err != nil && !errors.Is(err, throttle.ErrUnavailable) {
						t.Fatal(err)
					}
					if d.Granted {
						granted[i]++
					}
				}
			}
			for i, r := range c.rows {
				drain(old, i, r.before)
			}
			promote(t, old, promoted)
			for i, r := range c.rows {
				drain(old, i, 2*limit)
				drain(promoted, i, 2*limit)
				if granted[i] != r.want {
					t.Errorf("%d before: granted %d of %d, want %d", r.before, granted[i], limit, r.want)
				}
			}
		})
	}
}

// A network is cut in two, and no connection breaks: on one side are the old primary and a client
// that still reaches it, on the other the replica and all others. The replica becomes a primary, and
// for a while both grant. No period has more than one more limit. An old primary that writes only
// with a replica stops when it has not heard of one for so long, and then the limit holds.
func TestWhatABlackholedPrimaryExceeds(t *testing.T) {
	t.Parallel()
	w := throttle.Window{Name: "w", Limit: 5, Period: 200 * ms, Scope: throttle.ScopeShared}
	p := throttle.Policy{Name: "p", Windows: []throttle.Window{w}}
	for name, args := range map[string][]string{
		"goes on": nil, "stops": {"--min-replicas-to-write", "1", "--min-replicas-max-lag", "2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			old := throttletest.Client(t, throttletest.Redis(t, append(args, "--repl-diskless-sync-delay", "0")...))
			hole := NewProxy(t, old.Options().Addr)
			promoted := throttletest.Client(t, throttletest.Redis(t, "--replicaof", strings.Replace(hole.Addr, ":", " ", 1)))
			untilReplication(t, promoted, "master_link_status:up")
			untilReplication(t, old, "state=online")
			behind := redis.NewClient(&redis.Options{Addr: hole.Addr, ReadTimeout: 50 * ms, MaxRetries: -1})
			defer behind.Close()

			var mu sync.Mutex
			var log []Grant
			drive := func(client *redis.Client, until func(err error) bool) {
				l := New(t, client, p)
				for end := time.Now().Add(m); ; time.Sleep(5 * ms) {
					d, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "acme"})
					if d.Granted {
						mu.Lock()
						log = append(log, Grant{At: d.At.UnixMicro(), Units: 1})
						mu.Unlock()
					}
					if until(err) {
						return
					}
					if time.Now().After(end) {
						t.Errorf("in vain, and the last error is %v", err)
						return
					}
				}
			}
			granted := func(n int) func(error) bool {
				return func(error) bool { mu.Lock(); defer mu.Unlock(); return len(log) >= n }
			}
			drive(behind, granted(12))
			hole.Hole.Store(true)
			drive(behind, func(err error) bool { return errors.Is(err, throttle.ErrUnavailable) })
			Must(t, promoted.Do(t.Context(), "replicaof", "no", "one").Err())
			var both sync.WaitGroup
			over, stopped := time.Now().Add(s), atomic.Bool{}
			both.Go(func() {
				drive(old, func(err error) bool {
					return time.Now().After(over) && (args == nil || errors.Is(err, throttle.ErrUnavailable))
				})
				stopped.Store(true)
			})
			both.Go(func() { drive(promoted, func(error) bool { return stopped.Load() }) })
			both.Wait()
			most := MostOver(w, log)
			t.Logf("%d granted, %d above the limit of %d", len(log), most, w.Limit)
			if most > w.Limit || args == nil && most <= 0 {
				t.Errorf("%d above the limit, want 1 to %d", most, w.Limit)
			}
			if args != nil {
				time.Sleep(w.Period)
				log = nil
				drive(promoted, granted(12))
				drive(old, func(err error) bool { return errors.Is(err, throttle.ErrUnavailable) })
				if most := MostOver(w, log); most > 0 {
					t.Errorf("%d above the limit after the old primary has stopped", most)
				}
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
	Must(t, primary.Wait(t.Context(), 1, 10*time.Second).Err())
	Must(t, replica.Do(t.Context(), "replicaof", "no", "one").Err())
	untilReplication(t, primary, "connected_slaves:0")
}

// untilReplication waits until INFO replication contains the text.
func untilReplication(t *testing.T, client *redis.Client, text string) {
	t.Helper()
	Until(t, "INFO replication says "+text, func() bool {
		return strings.Contains(client.Info(t.Context(), "replication").Val(), text)
	})
}

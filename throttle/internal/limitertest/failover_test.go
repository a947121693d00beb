package limitertest

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A network is cut in two, and no connection breaks: on one side are the old primary and a client
// that still reaches it, on the other the replica and all others. The replica becomes a primary, and
// for a while both grant. No period has more than one more limit. An old primary that writes only
// with a replica stops when it has not heard of one for so long, and then the limit holds.
func TestWhatABlackholedPrimaryExceeds(t *testing.T) {
	t.Parallel()
	w := throttle.Window{Name: "w", Limit: 5, Period: 200 * ms, Shared: true}
	p := throttle.Policy{Name: "p", Windows: []throttle.Window{w}}
	for name, args := range map[string][]string{
		"goes on": nil, "stops": {"--min-replicas-to-write", "1", "--min-replicas-max-lag", "2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			old := throttletest.Client(t, throttletest.Redis(t, append(args, "--repl-diskless-sync-delay", "0")...))
			hole := NewLossyProxy(t, old.Options().Addr)
			promoted := throttletest.Client(t, throttletest.Redis(t, "--replicaof", strings.Replace(hole.Addr, ":", " ", 1)))
			untilReplication(t, promoted, "master_link_status:up")
			untilReplication(t, old, "state=online")
			behind := redis.NewClient(&redis.Options{Addr: hole.Addr, ReadTimeout: 50 * ms, MaxRetries: -1})
			defer behind.Close()

			var mu sync.Mutex
			var log []LoggedGrant
			drive := func(client *redis.Client, until func(granted int, err error) bool) {
				l, granted := New(t, client, p), 0
				for end := time.Now().Add(m); ; time.Sleep(5 * ms) {
					d, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "acme"})
					if d.Granted {
						granted++
						mu.Lock()
						log = append(log, LoggedGrant{At: d.At.UnixMicro(), Units: 1})
						mu.Unlock()
					}
					if until(granted, err) {
						return
					}
					if time.Now().After(end) {
						t.Errorf("in vain, and the last error is %v", err)
						return
					}
				}
			}
			several := func(granted int, _ error) bool { return granted >= 12 }
			refused := func(_ int, err error) bool { return errors.Is(err, throttle.ErrUnavailable) }
			drive(behind, several)
			hole.Hole.Store(true)
			drive(behind, refused)
			expect.Must(t, promoted.Do(t.Context(), "replicaof", "no", "one").Err())
			var both sync.WaitGroup
			var stopped atomic.Bool
			both.Go(func() {
				if args == nil {
					drive(old, several)
				} else {
					drive(old, refused)
				}
				stopped.Store(true)
			})
			both.Go(func() {
				drive(promoted, func(granted int, err error) bool { return stopped.Load() && several(granted, err) })
			})
			both.Wait()
			most := MostOver(w, log)
			t.Logf("%d granted, %d above the limit of %d", len(log), most, w.Limit)
			expect.That(t, most <= w.Limit, most, "above the limit, want at most", w.Limit)
			if args != nil {
				time.Sleep(w.Period)
				log = nil
				drive(promoted, several)
				drive(old, refused)
				expect.That(t, MostOver(w, log) <= 0, "above the limit after the old primary has stopped")
			}
		})
	}
}

// untilReplication waits until INFO replication contains the text.
func untilReplication(t *testing.T, client *redis.Client, text string) {
	t.Helper()
	Until(t, "INFO replication says "+text, func() bool {
		return strings.Contains(client.Info(t.Context(), "replication").Val(), text)
	})
}

package faulttest

import (
	"syscall"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
)

// The sentinels replace the primary while tasks wait in line: it was killed, it does not answer for
// a while and comes back, or an operator asked for it. In the last case the old primary serves for
// a moment beside the new one, and what it writes is lost. Asynq's tasks run twice then, as do
// ours. An old primary that writes only with a replica serves nobody after it has lost it, but the
// new one then waits for the old one to become its replica.
func TestADrainGoesOnAfterASentinelFailover(t *testing.T) {
	t.Parallel()
	asked := func(t *testing.T, s *servers.Sentinels) {
		if err := s.Failover(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	const some, any = 2 * drainSlots, 1000
	for _, row := range []struct {
		name  string
		fail  func(t *testing.T, s *servers.Sentinels)
		args  []string
		twice int
	}{
		{"killed", func(_ *testing.T, s *servers.Sentinels) { s.Redis[0].Stop() }, nil, some},
		{"stopped", func(t *testing.T, s *servers.Sentinels) {
			s.Redis[0].Cmd.Process.Signal(syscall.SIGSTOP)
		}, nil, some},
		{"asked", asked, nil, any},
		{"asked, min-replicas-to-write", asked, []string{"--min-replicas-to-write", "1"}, some},
	} {
		if row.args != nil && !long() {
			continue
		}
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			s := servers.Sentinel(t, 1, row.args...)
			d := &drain{
				TB:    t,
				asynq: asynq.RedisFailoverClientOpt{MasterName: servers.MasterName, SentinelAddrs: s.Addrs()},
				each:  100,
				limits: func() redis.UniversalClient {
					return redis.NewFailoverClient(&redis.FailoverOptions{MasterName: servers.MasterName, SentinelAddrs: s.Addrs()})
				},
				queues:   []string{"one", "two"},
				policies: drained("a", "b"), tenants: 3,
			}
			d.start()
			d.part(0.3)
			row.fail(t, s)
			d.until("the sentinels have replaced the primary", func() bool {
				now, err := s.Primary(t.Context())
				return err == nil && now == s.Redis[1]
			})
			promoted := time.Now()
			d.part(0.6)
			if row.name == "stopped" {
				s.Redis[0].Cmd.Process.Signal(syscall.SIGCONT)
			}
			d.finish(promoted, row.twice)
		})
	}
}

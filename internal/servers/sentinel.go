package servers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// MasterName is the name by which sentinels know the primary.
const MasterName = "mymaster"

// Sentinels are a primary, its replicas, and the sentinels that watch over them.
type Sentinels struct {
	Redis     []*Process // the first began as the primary
	Sentinels []*Process
}

// Sentinel starts a primary with replicas, and three sentinels. They end with the test. A primary
// that does not answer for half a second is replaced.
func Sentinel(t testing.TB, replicas int, args ...string) *Sentinels {
	t.Helper()
	return started(t, func(dir string) (*Sentinels, error) { return StartSentinels(dir, replicas, args...) })
}

// StartSentinels is Sentinel for programs that are not tests: the servers work below the directory given, and Stop
// ends them. It returns when the sentinels know each other and all replicas, within a minute.
func StartSentinels(dir string, replicas int, args ...string) (*Sentinels, error) {
	s := &Sentinels{}
	if err := s.start(dir, replicas, args); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

func (s *Sentinels) start(dir string, replicas int, args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for i := range 1 + replicas {
		more := []string{"--repl-diskless-sync-delay", "0"}
		if i > 0 {
			more = append(more, "--replicaof", strings.Replace(s.Redis[0].Addr, ":", " ", 1))
		}
		p, err := startIn(dir, fmt.Sprint("redis", i), append(more, args...)...)
		if err != nil {
			return err
		}
		s.Redis = append(s.Redis, p)
	}
	for _, p := range s.Redis[1:] {
		if err := until(ctx, func() bool {
			info, _ := p.do(ctx, "info", "replication").Text()
			return strings.Contains(info, "master_link_status:up")
		}); err != nil {
			return fmt.Errorf("a replica follows: %w", err)
		}
	}
	host, port, _ := strings.Cut(s.Redis[0].Addr, ":")
	for i := range 3 {
		path := filepath.Join(dir, fmt.Sprint("sentinel", i))
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
		config := filepath.Join(path, "sentinel.conf") // which the sentinel writes to
		text := strings.NewReplacer("NAME", MasterName, "HOST", host, "PORT", port).Replace(sentinelConfig)
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			return err
		}
		p, err := startServer(path, config, "--sentinel")
		if err != nil {
			return err
		}
		s.Sentinels = append(s.Sentinels, p)
	}
	return s.Settled(ctx)
}

const sentinelConfig = `
sentinel monitor NAME HOST PORT 2
sentinel down-after-milliseconds NAME 500
sentinel failover-timeout NAME 4000
`

// Settled waits until every sentinel knows the others and all replicas, and can reach them.
func (s *Sentinels) Settled(ctx context.Context) error {
	for _, p := range s.Sentinels {
		if err := until(ctx, func() bool {
			known, err := p.do(ctx, "sentinel", "ckquorum", MasterName).Text()
			if err != nil || !strings.HasPrefix(known, "OK 3 ") {
				return false
			}
			client := redis.NewSentinelClient(&redis.Options{Addr: p.Addr})
			defer client.Close()
			replicas, err := client.Replicas(ctx, MasterName).Result()
			if err != nil || len(replicas) < len(s.Redis)-1 {
				return false
			}
			for _, replica := range replicas {
				if replica["flags"] != "slave" || replica["master-link-status"] != "ok" {
					return false
				}
			}
			return true
		}); err != nil {
			return fmt.Errorf("the sentinels know all servers: %w", err)
		}
	}
	return nil
}

// Addrs returns the addresses of the sentinels.
func (s *Sentinels) Addrs() []string { return addrsOf(s.Sentinels) }

// Primary returns the server that most sentinels take for the primary.
func (s *Sentinels) Primary(ctx context.Context) (*Process, error) {
	votes := map[string]int{}
	for _, p := range s.Sentinels {
		addr, err := p.do(ctx, "sentinel", "get-master-addr-by-name", MasterName).StringSlice()
		if err == nil && len(addr) == 2 {
			votes[strings.Join(addr, ":")]++
		}
	}
	for _, p := range s.Redis {
		if 2*votes[p.Addr] > len(s.Sentinels) {
			return p, nil
		}
	}
	return nil, fmt.Errorf("the sentinels name %v", votes)
}

// Failover has the sentinels replace the primary although it answers.
func (s *Sentinels) Failover(ctx context.Context) error {
	return s.Sentinels[0].do(ctx, "sentinel", "failover", MasterName).Err()
}

// Stop kills all servers that still run.
func (s *Sentinels) Stop() {
	for _, p := range append(s.Sentinels, s.Redis...) {
		p.Stop()
	}
}

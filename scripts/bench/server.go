package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
)

// A server is a redis-server, and a client that counts what it sends.
type server struct {
	client  *redis.Client
	control *redis.Client // not counted
	dir     string
	process *servers.Process
	sent    *counter
}

func startServer(connections int) (*server, error) {
	dir, err := os.MkdirTemp("", "sluice-bench-")
	if err != nil {
		return nil, err
	}
	process, err := servers.StartRedis(dir)
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	s := &server{
		client:  redis.NewClient(&redis.Options{Addr: process.Addr, PoolSize: connections}),
		control: redis.NewClient(&redis.Options{Addr: process.Addr}),
		dir:     dir,
		process: process,
		sent:    &counter{},
	}
	s.client.AddHook(s.sent)
	return s, nil
}

func (s *server) stop() {
	s.client.Close()
	s.control.Close()
	s.process.Stop()
	os.RemoveAll(s.dir)
}

// usage is what the server spent since the last reset.
type usage struct {
	cpu    float64 // microseconds of the process
	inside float64 // commands called by scripts
	server float64 // microseconds in commands that the client sent
}

func (s *server) reset(ctx context.Context) (cpu float64, err error) {
	s.sent.reset()
	if err := s.control.ConfigResetStat(ctx).Err(); err != nil {
		return 0, err
	}
	return s.cpu(ctx)
}

func (s *server) usage(ctx context.Context, cpuBefore float64) (usage, error) {
	cpu, err := s.cpu(ctx)
	if err != nil {
		return usage{}, err
	}
	stats, err := s.info(ctx, "commandstats")
	if err != nil {
		return usage{}, err
	}
	u := usage{cpu: cpu - cpuBefore}
	for command, line := range stats {
		var calls, sum int64
		var perCall float64
		if _, err := fmt.Sscanf(line, "calls=%d,usec=%d,usec_per_call=%g", &calls, &sum, &perCall); err != nil {
			return usage{}, fmt.Errorf("INFO commandstats: %q: %w", line, err)
		}
		name := strings.TrimPrefix(command, "cmdstat_")
		if strings.Contains(name, "|") || name == "info" {
			continue // our own CONFIG RESETSTAT and INFO
		}
		// The commands inside a script are in the time of the script already. More precise
		// than usec_per_call, which has two digits.
		sent := s.sent.of(name)
		u.server += float64(sum) * float64(sent) / float64(calls)
		u.inside += float64(calls - sent)
	}
	return u, nil
}

func (s *server) cpu(ctx context.Context) (float64, error) {
	lines, err := s.info(ctx, "cpu")
	if err != nil {
		return 0, err
	}
	user, err := strconv.ParseFloat(lines["used_cpu_user"], 64)
	if err != nil {
		return 0, err
	}
	sys, err := strconv.ParseFloat(lines["used_cpu_sys"], 64)
	return (user + sys) * 1e6, err
}

func (s *server) memory(ctx context.Context) (int64, error) {
	lines, err := s.info(ctx, "memory")
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(lines["used_memory"], 10, 64)
}

func (s *server) info(ctx context.Context, section string) (map[string]string, error) {
	text, err := s.control.Info(ctx, section).Result()
	if err != nil {
		return nil, err
	}
	lines := map[string]string{}
	for line := range strings.SplitSeq(text, "\r\n") {
		if name, value, ok := strings.Cut(line, ":"); ok {
			lines[name] = value
		}
	}
	return lines, nil
}

// A counter is a hook that counts the commands a client sends, by name.
type counter struct {
	mu    sync.Mutex
	calls map[string]int64
}

func (c *counter) count(cmds ...redis.Cmder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cmd := range cmds {
		c.calls[strings.ToLower(cmd.Name())]++
	}
}

func (c *counter) of(name string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls[name]
}

func (c *counter) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = map[string]int64{}
}

func (c *counter) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (c *counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.count(cmd)
		return next(ctx, cmd)
	}
}

func (c *counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.count(cmds...)
		return next(ctx, cmds)
	}
}

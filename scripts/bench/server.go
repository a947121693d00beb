package main

import (
	"context"
	"fmt"
	"os"
	"slices"
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
	process *servers.Process
	sent    *counter
}

// startServer starts a redis-server that stops when the case has ended.
func startServer(o scenarioOptions, connections int) *server {
	dir := must(os.MkdirTemp("", "sluice-bench-"))
	o.atEnd(func() { os.RemoveAll(dir) })
	process := must(servers.StartRedis(dir))
	o.atEnd(process.Stop)
	s := &server{
		client:  redis.NewClient(&redis.Options{Addr: process.Addr, PoolSize: connections}),
		control: redis.NewClient(&redis.Options{Addr: process.Addr}),
		process: process,
		sent:    &counter{},
	}
	s.client.AddHook(s.sent)
	o.atEnd(func() { s.client.Close(); s.control.Close() })
	return s
}

// usage is what the server spent since the last reset.
type usage struct {
	cpu    float64 // microseconds of the process
	inside float64 // commands called by scripts
	server float64 // microseconds in commands that the client sent
}

func (s *server) reset(ctx context.Context) (cpu float64) {
	s.sent.reset()
	check(s.control.ConfigResetStat(ctx).Err())
	return s.cpu(ctx)
}

func (s *server) usage(ctx context.Context, cpuBefore float64) usage {
	u := usage{cpu: s.cpu(ctx) - cpuBefore}
	for name, stat := range s.commands(ctx) {
		if strings.Contains(name, "|") || name == "info" {
			continue // our own CONFIG RESETSTAT and INFO
		}
		// The commands inside a script are in the time of the script already. More precise
		// than usec_per_call, which has two digits.
		sent := s.sent.of(name)
		u.server += float64(stat.usec) * float64(sent) / float64(stat.calls)
		u.inside += float64(stat.calls - sent)
	}
	return u
}

// A commandStat is what Redis counted of one command since the last reset.
type commandStat struct{ calls, usec int64 }

// commands is by the name of the command, with those inside scripts.
func (s *server) commands(ctx context.Context) map[string]commandStat {
	stats := map[string]commandStat{}
	for command, line := range s.info(ctx, "commandstats") {
		var stat commandStat
		if _, err := fmt.Sscanf(line, "calls=%d,usec=%d", &stat.calls, &stat.usec); err != nil {
			fail("INFO commandstats: %s: %q: %w", command, line, err)
		}
		stats[strings.TrimPrefix(command, "cmdstat_")] = stat
	}
	return stats
}

// calls returns how many commands Redis processed since the last reset, but for our own.
func (s *server) calls(ctx context.Context, own ...string) float64 {
	sum := int64(0)
	for name, stat := range s.commands(ctx) {
		if name, _, _ = strings.Cut(name, "|"); !slices.Contains(own, name) {
			sum += stat.calls
		}
	}
	return float64(sum)
}

func (s *server) cpu(ctx context.Context) float64 {
	lines := s.info(ctx, "cpu")
	user := must(strconv.ParseFloat(lines["used_cpu_user"], 64))
	return (user + must(strconv.ParseFloat(lines["used_cpu_sys"], 64))) * 1e6
}

func (s *server) memory(ctx context.Context) int64 {
	return must(strconv.ParseInt(s.info(ctx, "memory")["used_memory"], 10, 64))
}

func (s *server) info(ctx context.Context, section string) map[string]string {
	text := must(s.control.Info(ctx, section).Result())
	lines := map[string]string{}
	for line := range strings.SplitSeq(text, "\r\n") {
		if name, value, ok := strings.Cut(line, ":"); ok {
			lines[name] = value
		}
	}
	return lines
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

func (c *counter) DialHook(next redis.DialHook) redis.DialHook { return next }

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

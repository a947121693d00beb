package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/servers"
)

// A server is a redis-server.
type server struct {
	control *redis.Client
	process *servers.Process
}

// startServer starts a redis-server that stops when the case has ended.
func startServer(o scenarioOptions) *server {
	dir := must(os.MkdirTemp("", "sluice-bench-"))
	o.cleanup(func() { os.RemoveAll(dir) })
	process := must(servers.StartRedis(dir))
	o.cleanup(process.Stop)
	s := &server{redis.NewClient(&redis.Options{Addr: process.Addr}), process}
	o.cleanup(func() { s.control.Close() })
	return s
}

// A commandStat has the counts that Redis keeps of one command since the last reset.
type commandStat struct{ calls, usec int64 }

// commands returns the counts by command. Commands inside scripts count, too.
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

// calls returns how many commands Redis processed since the last reset, except for skipped commands.
func (s *server) calls(ctx context.Context, skipped ...string) float64 {
	sum := int64(0)
	for name, stat := range s.commands(ctx) {
		if name, _, _ = strings.Cut(name, "|"); !slices.Contains(skipped, name) {
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

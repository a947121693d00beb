package main

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

//go:embed bullmq.js
var bullMQ []byte

// caseBullMQ: a queue for Node with one fixed window for all jobs, in turn with plain asynq.
func caseBullMQ(ctx context.Context, o scenarioOptions) []figure {
	dir := must(os.MkdirTemp("", "sluice-bench-"))
	o.cleanup(func() { os.RemoveAll(dir) })
	check(os.WriteFile(filepath.Join(dir, "bullmq.mjs"), bullMQ, 0o600))
	install := exec.CommandContext(ctx, "npm", "install", "--prefix", dir, "bullmq@6.7.0", "ioredis@6.0.0")
	if text, err := install.CombinedOutput(); err != nil {
		o.say("left out, as it needs node and npm: %v: %s", err, text)
		return nil
	}
	c := crew{slots: 32}
	s, _ := newDrainTestbed(ctx, o, c)
	return medians(o.rounds, func(int) (figures []figure) {
		for _, r := range []rate{{1_000_000, time.Second}, {2000, time.Second}} {
			n := 2000 * (1 + o.size(3, 20))
			plain := s.drainPlain(ctx, c, tasks(n, 10))
			starts, cpu := s.drainBullMQ(ctx, dir, n, r.limit)
			name := fmt.Sprintf("at most %d a second: ", r.limit)
			o.say("%splain %v; BullMQ %.0f/s, %.1f us of Redis a task", name, plain, perSecond(starts), cpu)
			figures = append(figures,
				figure{Name: name + "throughput, beside plain asynq", Value: perSecond(starts) / perSecond(plain.starts)},
				figure{Name: name + "Redis CPU a task, beside plain asynq's", Value: cpu / plain.cpu})
		}
		return figures
	})
}

// drainBullMQ returns when the jobs started, and the CPU of Redis in microseconds a job.
func (s *testbed) drainBullMQ(ctx context.Context, dir string, jobs, limit int) (starts []start, cpu float64) {
	s.clear(ctx)
	_, port, _ := strings.Cut(s.addr(), ":")
	node := exec.CommandContext(ctx, "node", "bullmq.mjs", port, fmt.Sprint(jobs), fmt.Sprint(limit))
	node.Dir, node.Stderr = dir, os.Stderr
	in, out := must(node.StdinPipe()), bufio.NewReader(must(node.StdoutPipe()))
	check(node.Start())
	must(out.ReadString('\n')) // it is ready
	var line []byte
	_, cpu = s.spent(ctx, func() {
		must(io.WriteString(in, "\n"))
		line = must(out.ReadBytes('\n'))
	})
	check(node.Wait())
	var times []float64
	check(json.Unmarshal(line, &times))
	for _, ms := range times {
		starts = append(starts, start{at: time.UnixMicro(int64(ms * 1000))})
	}
	return starts, cpu / float64(jobs)
}

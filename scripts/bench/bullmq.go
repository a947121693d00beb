package main

import (
	"bufio"
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"
)

//go:embed bullmq
var bullMQSource embed.FS

// A bullMQ is an installation of BullMQ, a queue for Node that has a limiter.
type bullMQ struct{ dir string }

// installBullMQ installs BullMQ into a directory of its own, which is removed when the case has
// ended. If it cannot, missing says why.
func installBullMQ(ctx context.Context, o scenarioOptions) (b *bullMQ, missing error) {
	for _, command := range []string{"node", "npm"} {
		if _, err := exec.LookPath(command); err != nil {
			return nil, fmt.Errorf("%s is not installed", command)
		}
	}
	b = &bullMQ{must(os.MkdirTemp("", "sluice-bench-bullmq-"))}
	o.atEnd(func() { os.RemoveAll(b.dir) })
	return b, b.install(ctx)
}

func (b *bullMQ) install(ctx context.Context) error {
	check(os.CopyFS(b.dir, must(fs.Sub(bullMQSource, "bullmq"))))
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	npm := exec.CommandContext(ctx, "npm", "install", "--no-audit", "--no-fund", "--silent")
	npm.Dir = b.dir
	if said, err := npm.CombinedOutput(); err != nil {
		return fmt.Errorf("npm install: %w: %s", err, strings.TrimSpace(string(said)))
	}
	return nil
}

// process runs bullmq/peer.js with the arguments. It returns the cost of one job, from the time
// that the peer was ready to its end, and when its handlers started.
func (b *bullMQ) process(ctx context.Context, s *site, jobs int, mode string, args ...any) (c cost, starts []start) {
	_, port, err := net.SplitHostPort(s.addr())
	check(err)
	ctx, cancel := context.WithCancel(ctx)
	words := []string{"peer.js", port, mode, fmt.Sprint(jobs)}
	for _, a := range args {
		words = append(words, fmt.Sprint(a))
	}
	node := exec.CommandContext(ctx, "node", words...)
	node.Dir, node.Stderr = b.dir, os.Stderr
	in, out := must(node.StdinPipe()), must(node.StdoutPipe())
	check(node.Start())
	ended := false
	defer func() {
		cancel()
		if !ended {
			node.Wait()
		}
	}()
	said := bufio.NewReader(out)
	if line := must(said.ReadString('\n')); line != "ready\n" {
		fail("BullMQ's process said %q in place of ready", line)
	}
	var line string
	took, cpu := s.spent(ctx, func() {
		must(io.WriteString(in, "begin\n"))
		line = must(said.ReadString('\n'))
	})
	var answer struct {
		Starts []float64 `json:"starts"` // milliseconds since 1970
	}
	check(json.Unmarshal([]byte(line), &answer))
	ended = true
	check(node.Wait())
	for _, ms := range answer.Starts {
		at := time.UnixMicro(int64(ms * 1000))
		starts = append(starts, start{at: at, granted: at})
	}
	return cost{took.Seconds() * 1e6 / float64(jobs), cpu / float64(jobs)}, starts
}

package main

import (
	"bufio"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"time"
)

//go:embed bullmq
var bullMQSource embed.FS

// A bullMQ is an installation of BullMQ, a queue for Node that has a limiter.
type bullMQ struct{ dir string }

// installBullMQ installs BullMQ into a directory of its own. If it cannot, missing says why.
func installBullMQ(ctx context.Context) (b *bullMQ, missing error) {
	for _, command := range []string{"node", "npm"} {
		if _, err := exec.LookPath(command); err != nil {
			return nil, fmt.Errorf("%s is not installed", command)
		}
	}
	dir, err := os.MkdirTemp("", "sluice-bench-bullmq-")
	if err != nil {
		return nil, err
	}
	b = &bullMQ{dir}
	if err := b.install(ctx); err != nil {
		b.remove()
		return nil, err
	}
	return b, nil
}

func (b *bullMQ) install(ctx context.Context) error {
	files, err := bullMQSource.ReadDir("bullmq")
	if err != nil {
		return err
	}
	for _, f := range files {
		text, err := bullMQSource.ReadFile(path.Join("bullmq", f.Name()))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(b.dir, f.Name()), text, 0o600); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	npm := exec.CommandContext(ctx, "npm", "install", "--no-audit", "--no-fund", "--silent")
	npm.Dir = b.dir
	if said, err := npm.CombinedOutput(); err != nil {
		return fmt.Errorf("npm install: %w: %s", err, strings.TrimSpace(string(said)))
	}
	return nil
}

func (b *bullMQ) remove() { os.RemoveAll(b.dir) }

// process runs bullmq/peer.js with the arguments. It returns the cost of one job, from the time
// that the peer was ready to its end, and when its handlers started.
func (b *bullMQ) process(ctx context.Context, s *site, jobs int, mode string, args ...any) (c cost, starts []start, err error) {
	_, port, err := net.SplitHostPort(s.addr())
	if err != nil {
		return cost{}, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	words := []string{"peer.js", port, mode, fmt.Sprint(jobs)}
	for _, a := range args {
		words = append(words, fmt.Sprint(a))
	}
	node := exec.CommandContext(ctx, "node", words...)
	node.Dir, node.Stderr = b.dir, os.Stderr
	in, err := node.StdinPipe()
	if err != nil {
		return cost{}, nil, err
	}
	out, err := node.StdoutPipe()
	if err != nil {
		return cost{}, nil, err
	}
	if err := node.Start(); err != nil {
		return cost{}, nil, err
	}
	defer func() {
		if err != nil {
			cancel()
		}
		err = errors.Join(err, node.Wait())
	}()
	said := bufio.NewReader(out)
	if line, err := said.ReadString('\n'); err != nil || line != "ready\n" {
		return cost{}, nil, fmt.Errorf("BullMQ's process said %q in place of ready: %w", line, err)
	}
	var line string
	took, cpu, err := s.spent(ctx, func() error {
		if _, err := io.WriteString(in, "begin\n"); err != nil {
			return err
		}
		line, err = said.ReadString('\n')
		return err
	})
	if err != nil {
		return cost{}, nil, fmt.Errorf("BullMQ's process: %w", err)
	}
	var answer struct {
		Starts []float64 `json:"starts"` // milliseconds since 1970
	}
	if err := json.Unmarshal([]byte(line), &answer); err != nil {
		return cost{}, nil, fmt.Errorf("BullMQ's process: %w", err)
	}
	for _, ms := range answer.Starts {
		at := time.UnixMicro(int64(ms * 1000))
		starts = append(starts, start{at: at, granted: at})
	}
	return cost{took.Seconds() * 1e6 / float64(jobs), cpu / float64(jobs)}, starts, nil
}

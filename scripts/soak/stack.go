package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// A stack is a redis-server with its proxy, journal, workers and producer.
type stack struct {
	cluster   bool // the redis-server is a Redis Cluster
	dir       string
	inspector *asynq.Inspector
	jobs      []job
	journal   *journal
	name      string
	proxy     *proxy
	redis     *redis.Client // not through the proxy
	server    *exec.Cmd
	throttled bool
	witness   *witness

	addr       string // of the redis-server
	reports    net.Listener
	closing    []func()
	workersLog *os.File   // what workers log
	disrupting sync.Mutex // one at a time
	workers    []*process
	mu         sync.Mutex
	enqueued   map[string]bool
	ticketless []string
	suspects   map[string]time.Time // tasks without a ticket: since when
	stuck      []string             // workers that did not end on SIGTERM
	disrupted  []disruptionEnd
}

func newStack(ctx context.Context, name, dir string, throttled bool, o options, jobs []job) (*stack, error) {
	s := &stack{
		cluster: o.cluster, dir: filepath.Join(dir, name), enqueued: map[string]bool{}, jobs: jobs,
		journal: newJournal(jobs), name: name, throttled: throttled, witness: newWitness(),
	}
	if err := s.open(ctx, o); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *stack) open(ctx context.Context, o options) (err error) {
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	if s.workersLog, err = os.Create(filepath.Join(s.dir, "workers.log")); err != nil {
		return err
	}
	s.closing = append(s.closing, func() { s.workersLog.Close() })
	if err := s.startRedis(); err != nil {
		return err
	}
	s.redis = redis.NewClient(&redis.Options{Addr: s.addr})
	s.inspector = asynq.NewInspector(asynq.RedisClientOpt{Addr: s.addr})
	s.closing = append(s.closing, func() { s.redis.Close(); s.inspector.Close() })
	for end := time.Now().Add(20 * time.Second); s.redis.Ping(ctx).Err() != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) || ctx.Err() != nil {
			return fmt.Errorf("redis-server does not answer on %s: see %s", s.addr, s.dir)
		}
	}
	if s.cluster {
		if err := makeCluster(ctx, s.redis); err != nil {
			return err
		}
	}
	if s.reports, err = s.journal.serve(); err != nil {
		return err
	}
	s.closing = append(s.closing, func() { s.reports.Close() })
	s.proxy = newProxy(s.addr, s.witness, o.seed, o.rate)
	for i := range o.workers {
		p := &process{name: "worker-" + strconv.Itoa(i)}
		s.workers = append(s.workers, p)
		if err := s.startWorker(p); err != nil {
			return err
		}
	}
	return nil
}

func (s *stack) startRedis() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.addr = l.Addr().String()
	l.Close()
	_, port, _ := net.SplitHostPort(s.addr)
	enabled := map[bool]string{false: "no", true: "yes"}[s.cluster]
	s.server = exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
		"--cluster-enabled", enabled, "--dir", s.dir, "--logfile", filepath.Join(s.dir, "redis.log"))
	s.server.SysProcAttr = ownGroup()
	if err := s.server.Start(); err != nil {
		return err
	}
	s.closing = append(s.closing, func() {
		s.server.Process.Kill()
		s.server.Wait()
	})
	return nil
}

// close ends all processes of the stack.
func (s *stack) close() {
	for _, p := range s.workers {
		if p.cmd != nil && p.cmd.Process != nil && p.cmd.ProcessState == nil {
			s.endWorker(p, os.Kill)
		}
	}
	for i := len(s.closing) - 1; i >= 0; i-- {
		s.closing[i]()
	}
}

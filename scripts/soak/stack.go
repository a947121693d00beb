package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
)

// A stack is a redis-server with all around it: proxy, journal, workers and producer.
type stack struct {
	dir       string
	inspector *asynq.Inspector
	jobs      []job
	journal   *journal
	name      string
	proxy     *proxy
	redis     *redis.Client // past the proxy
	server    *exec.Cmd
	throttled bool
	witness   *witness

	addr     string // of the redis-server
	reports  net.Listener
	closing  []func()
	diary    *os.File // what workers log
	blows    sync.Mutex
	workers  []*crew
	mu       sync.Mutex
	enqueued map[string]bool
	strays   []string
	suspects map[string]bool // of being strays
	hits     []hit
	counts   map[string]int // of blows
}

// A hit is a blow that was dealt; work can go on from at.
type hit struct {
	at   time.Time
	kind string
}

// A crew is the place of a worker: one process after the other.
type crew struct {
	name  string
	count int
	cmd   *exec.Cmd
	port  net.Listener
	stdin *os.File
}

func (c *crew) holder() string { return c.name + "." + strconv.Itoa(c.count) }

func newStack(ctx context.Context, name, dir string, throttled bool, o options, jobs []job) (*stack, error) {
	s := &stack{
		dir: filepath.Join(dir, name), jobs: jobs, journal: newJournal(jobs), name: name, throttled: throttled,
		witness: newWitness(), enqueued: map[string]bool{}, counts: map[string]int{},
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
	if s.diary, err = os.Create(filepath.Join(s.dir, "workers.log")); err != nil {
		return err
	}
	s.closing = append(s.closing, func() { s.diary.Close() })
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
	if s.reports, err = s.journal.serve(); err != nil {
		return err
	}
	s.closing = append(s.closing, func() { s.reports.Close() })
	s.proxy = newProxy(s.addr, s.witness, o.seed, o.rate)
	for i := range o.workers {
		c := &crew{name: "worker-" + strconv.Itoa(i)}
		s.workers = append(s.workers, c)
		if err := s.startWorker(c); err != nil {
			return err
		}
	}
	return nil
}

// ownGroup keeps the terminal's Ctrl-C, which is for the soak, from the process.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func (s *stack) startRedis() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.addr = l.Addr().String()
	l.Close()
	_, port, _ := net.SplitHostPort(s.addr)
	s.server = exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
		"--dir", s.dir, "--logfile", filepath.Join(s.dir, "redis.log"))
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

func (s *stack) startWorker(c *crew) error {
	c.count++
	port, err := s.proxy.listen(c.holder())
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	c.port, c.stdin = port, write
	c.cmd = exec.Command(self, workerCommand, "-holder", c.holder(), "-journal", s.reports.Addr().String(),
		"-redis", port.Addr().String(), "-throttled="+strconv.FormatBool(s.throttled))
	c.cmd.Stdin, c.cmd.Stderr, c.cmd.SysProcAttr = read, s.diary, ownGroup()
	err = c.cmd.Start()
	read.Close()
	return err
}

// endWorker ends a worker's process by a signal, and waits until it has.
func (s *stack) endWorker(c *crew, signal os.Signal) {
	if signal == os.Kill {
		s.witness.died(c.holder())
	}
	c.cmd.Process.Signal(signal)
	slow := time.AfterFunc(20*time.Second, func() {
		s.witness.died(c.holder())
		c.cmd.Process.Kill()
	})
	c.cmd.Wait()
	slow.Stop()
	c.port.Close()
	c.stdin.Close()
}

// deal deals a blow, and returns when it is over.
func (s *stack) deal(ctx context.Context, b blow) error {
	s.blows.Lock()
	defer s.blows.Unlock()
	now := time.Now()
	switch b.kind {
	case kill, term:
		signal := os.Signal(syscall.SIGTERM)
		if b.kind == kill {
			signal = os.Kill
		}
		c := s.workers[b.worker]
		s.endWorker(c, signal)
		if err := s.startWorker(c); err != nil {
			return err
		}
	case stop:
		s.server.Process.Signal(syscall.SIGSTOP)
		time.Sleep(b.lasts)
		now = time.Now()
		s.server.Process.Signal(syscall.SIGCONT)
	case flush:
		if err := s.redis.ScriptFlush(ctx).Err(); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hits = append(s.hits, hit{now, b.kind})
	s.counts[b.kind]++
	return nil
}

// A producer enqueues jobs, through the proxy.
type producer struct {
	plain   *asynq.Client
	planner *worker.Client // nil without Sluice
	stack   *stack
}

func (s *stack) produce(ctx context.Context, begin time.Time) error {
	port, err := s.proxy.listen("producer")
	if err != nil {
		return err
	}
	defer port.Close()
	opt := asynq.RedisClientOpt{Addr: port.Addr().String()}
	p := &producer{plain: asynq.NewClient(opt), stack: s}
	defer p.plain.Close()
	if s.throttled {
		limits := redis.NewClient(&redis.Options{Addr: opt.Addr})
		defer limits.Close()
		limiter, err := throttle.New(throttle.Config{Client: limits, Policies: []throttle.Policy{soakPolicy()}})
		if err != nil {
			return err
		}
		if p.planner, err = worker.NewClient(opt, worker.ClientConfig{Limiter: limiter}); err != nil {
			return err
		}
		defer p.planner.Close()
	}
	var all sync.WaitGroup
	defer all.Wait()
	room := make(chan struct{}, 16)
	for _, j := range s.jobs {
		select {
		case <-time.After(time.Until(begin.Add(j.At))):
		case <-ctx.Done():
			return nil
		}
		room <- struct{}{}
		all.Go(func() {
			p.enqueue(ctx, j)
			<-room
		})
	}
	return nil
}

// enqueue tries until the task is there: that its ID is taken means that it is.
func (p *producer) enqueue(ctx context.Context, j job) {
	opts := []asynq.Option{asynq.TaskID(j.ID), asynq.MaxRetry(j.MaxRetry)}
	if j.Retained {
		opts = append(opts, asynq.Retention(24*time.Hour))
	}
	if j.Delay > 0 {
		opts = append(opts, asynq.ProcessIn(j.Delay))
	}
	task := worker.NewTask(worker.Identity{Tenant: j.Tenant}, taskType, nil)
	for ctx.Err() == nil {
		var err error
		if j.Planned && p.planner != nil {
			var info *worker.TaskInfo
			info, err = p.planner.EnqueueContext(ctx, task, opts...)
			if err == nil && j.Delay == 0 {
				p.stack.journal.promised(j.ID, info.StartsAt)
			}
		} else {
			_, err = p.plain.EnqueueContext(ctx, task, opts...)
		}
		if err == nil || errors.Is(err, asynq.ErrTaskIDConflict) {
			p.stack.mu.Lock()
			p.stack.enqueued[j.ID] = true
			p.stack.mu.Unlock()
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// waiting is how many tasks asynq has that have not ended, and Sluice's places in line.
func (s *stack) waiting(ctx context.Context) (tasks int, places int64, err error) {
	q, err := s.inspector.GetQueueInfo(queue)
	if errors.Is(err, asynq.ErrQueueNotFound) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	places, err = s.redis.HLen(ctx, placesKey).Result()
	return q.Pending + q.Active + q.Scheduled + q.Retry, places, err
}

// lookForStrays notes tasks that wait for long in asynq, as those do that stand in line, and do
// not stand there. It is for the time without faults: a task that is seen so twice is no chance.
func (s *stack) lookForStrays(ctx context.Context) error {
	soon := strconv.FormatInt(time.Now().Add(10*time.Second).Unix(), 10) // retries and undecided tasks come back before that
	seen := map[string]bool{}
	for _, set := range []string{"scheduled", "retry"} {
		ids, err := s.redis.ZRangeArgs(ctx, redis.ZRangeArgs{
			Key: "asynq:{" + queue + "}:" + set, ByScore: true, Start: soon, Stop: "+inf",
		}).Result()
		if err != nil {
			return err
		}
		for _, id := range ids {
			inLine, err := s.redis.HExists(ctx, placesKey, ticketPrefix+id).Result()
			if err != nil {
				return err
			}
			if inLine {
				continue
			}
			if seen[id] = true; s.suspects[id] && !slices.Contains(s.strays, id) {
				s.strays = append(s.strays, id)
			}
		}
	}
	s.suspects = seen
	return nil
}

// hurry lets a minute pass for the leases of workers that are gone and for tickets that did not
// come when they were called, and has workers that start look at both.
func (s *stack) hurry(ctx context.Context) error {
	orphans := s.witness.orphans()
	past := float64(time.Now().Add(-31 * time.Second).Unix())
	for _, id := range orphans {
		if err := s.redis.ZAddXX(ctx, "asynq:{"+queue+"}:lease", redis.Z{Score: past, Member: id}).Err(); err != nil {
			return err
		}
	}
	called, err := s.redis.ZRange(ctx, calledKey, 0, -1).Result()
	if err != nil || len(orphans)+len(called) == 0 {
		return err
	}
	for _, ticket := range called {
		if err := s.redis.ZAddXX(ctx, calledKey, redis.Z{Score: float64(time.Now().UnixMicro()), Member: ticket}).Err(); err != nil {
			return err
		}
	}
	s.stopWorkers()
	for _, c := range s.workers {
		if err := s.startWorker(c); err != nil {
			return err
		}
	}
	return nil
}

// stopWorkers ends all workers as a deploy does.
func (s *stack) stopWorkers() {
	s.blows.Lock()
	defer s.blows.Unlock()
	var all sync.WaitGroup
	for _, c := range s.workers {
		if c.cmd != nil && c.cmd.ProcessState == nil {
			all.Go(func() { s.endWorker(c, syscall.SIGTERM) })
		}
	}
	all.Wait()
}

// close ends everything that this stack has started.
func (s *stack) close() {
	for _, c := range s.workers {
		if c.cmd != nil && c.cmd.Process != nil && c.cmd.ProcessState == nil {
			s.endWorker(c, os.Kill)
		}
	}
	for i := len(s.closing) - 1; i >= 0; i-- {
		s.closing[i]()
	}
}

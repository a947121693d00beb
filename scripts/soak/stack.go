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
	suspects map[string]time.Time // of being strays: since when
	stuck    []string             // workers that did not end
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
		s.mu.Lock()
		s.stuck = append(s.stuck, c.holder())
		s.mu.Unlock()
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
	plain  *asynq.Client
	joiner *worker.Client // nil without Sluice
	stack  *stack
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
		if p.joiner, err = worker.NewClient(opt, worker.ClientConfig{Limiter: limiter}); err != nil {
			return err
		}
		defer p.joiner.Close()
	}
	var all sync.WaitGroup
	defer all.Wait()
	room := make(chan struct{}, 16)
	for i := 0; i < len(s.jobs); {
		together := p.together(s.jobs[i:])
		i += len(together)
		select {
		case <-time.After(time.Until(begin.Add(together[0].At))):
		case <-ctx.Done():
			return nil
		}
		room <- struct{}{}
		all.Go(func() {
			p.enqueue(ctx, together)
			<-room
		})
	}
	return nil
}

// together are those of the jobs, from the first on, that are enqueued by one call.
func (p *producer) together(jobs []job) []job {
	n := 1
	for p.joiner != nil && n < len(jobs) && jobs[0].Batched && jobs[0].Joins && jobs[n].Batched && jobs[n].Joins && jobs[n].At == jobs[0].At {
		n++
	}
	return jobs[:n]
}

// enqueue tries until the tasks are there: that an ID is taken means that its task is, and so does its lock.
func (p *producer) enqueue(ctx context.Context, jobs []job) {
	for len(jobs) > 0 && ctx.Err() == nil {
		var failed []job
		for i, err := range p.try(ctx, jobs) {
			if err != nil && !errors.Is(err, asynq.ErrTaskIDConflict) && !errors.Is(err, asynq.ErrDuplicateTask) {
				failed = append(failed, jobs[i])
				continue
			}
			p.stack.mu.Lock()
			p.stack.enqueued[jobs[i].ID] = true
			p.stack.mu.Unlock()
		}
		if jobs = failed; len(jobs) > 0 {
			time.Sleep(100 * time.Millisecond)
		}
	}
}

func (p *producer) try(ctx context.Context, jobs []job) []error {
	tasks := make([]*asynq.Task, len(jobs))
	for i, j := range jobs {
		opts := []asynq.Option{asynq.TaskID(j.ID), asynq.MaxRetry(j.MaxRetry)}
		if j.Retained {
			opts = append(opts, asynq.Retention(24*time.Hour))
		}
		if j.Delay > 0 {
			opts = append(opts, asynq.ProcessIn(j.Delay))
		}
		if j.Unique {
			opts = append(opts, asynq.Unique(24*time.Hour))
		}
		tasks[i] = worker.NewTask(worker.Identity{Tenant: j.Tenant}, taskType, []byte(j.ID), opts...)
	}
	errs := make([]error, len(jobs))
	if p.joiner == nil || !jobs[0].Joins {
		for i, task := range tasks {
			_, errs[i] = p.plain.EnqueueContext(ctx, task)
		}
		return errs
	}
	for i, result := range p.joiner.EnqueueBatch(ctx, tasks) {
		if errs[i] = result.Err; result.Start.Joined {
			p.stack.journal.joined(jobs[i].ID, result.Start.At)
		}
	}
	return errs
}

// waiting returns how many tasks asynq has that have not ended, and how many tickets are in line.
func (s *stack) waiting(ctx context.Context) (tasks int, tickets int64, err error) {
	q, err := s.inspector.GetQueueInfo(queue)
	if errors.Is(err, asynq.ErrQueueNotFound) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	tickets, err = s.redis.HLen(ctx, ticketsKey).Result()
	return q.Pending + q.Active + q.Scheduled + q.Retry, tickets, err
}

// lookForStrays notes tasks that asynq keeps for later, as it does tasks in line, but that have no
// ticket. It is for the time without faults. A ticket whose worker was killed is missing for a few
// seconds; a task without one for longer is no coincidence.
func (s *stack) lookForStrays(ctx context.Context) error {
	const missing = 15 * time.Second
	now := time.Now()
	soon := strconv.FormatInt(now.Add(10*time.Second).Unix(), 10) // retries and undecided tasks come back before that
	inLine, err := waitingTasks(ctx, s.redis)
	if err != nil {
		return err
	}
	seen := map[string]time.Time{}
	for _, set := range []string{"scheduled", "retry"} {
		ids, err := s.redis.ZRangeArgs(ctx, redis.ZRangeArgs{
			Key: "asynq:{" + queue + "}:" + set, ByScore: true, Start: soon, Stop: "+inf",
		}).Result()
		if err != nil {
			return err
		}
		for _, id := range ids {
			if slices.Contains(inLine, id) {
				continue
			}
			since := s.suspects[id]
			if since.IsZero() {
				since = now
			}
			if seen[id] = since; now.Sub(since) > missing && !slices.Contains(s.strays, id) {
				s.strays = append(s.strays, id)
			}
		}
	}
	s.suspects = seen
	return nil
}

// hurry lets a minute pass for the leases of workers that are gone, and has workers that start look at them.
func (s *stack) hurry(ctx context.Context) error {
	orphans := s.witness.orphans()
	past := float64(time.Now().Add(-31 * time.Second).Unix())
	for _, id := range orphans {
		if err := s.redis.ZAddXX(ctx, "asynq:{"+queue+"}:lease", redis.Z{Score: past, Member: id}).Err(); err != nil {
			return err
		}
	}
	if len(orphans) == 0 {
		return nil
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

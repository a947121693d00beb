package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// A disruptionEnd is when a recovery begins to count: at the end of a stop, at the begin of others.
type disruptionEnd struct {
	at   time.Time
	kind string
}

// A process is one worker. It is started again after it was killed or ended.
type process struct {
	name  string
	count int // of starts
	cmd   *exec.Cmd
	port  net.Listener
	stdin *os.File
}

// holder returns the name by which attempts know the present process.
func (p *process) holder() string { return p.name + "." + strconv.Itoa(p.count) }

// ownGroup keeps the terminal's Ctrl-C from a process: only the soak is to see it.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func (s *stack) startWorker(p *process) error {
	p.count++
	port, err := s.proxy.listen(p.holder())
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
	p.port, p.stdin = port, write
	p.cmd = exec.Command(self, workerCommand, "-holder", p.holder(), "-journal", s.reports.Addr().String(),
		"-redis", port.Addr().String(), "-throttled="+strconv.FormatBool(s.throttled),
		"-cluster="+strconv.FormatBool(s.cluster))
	p.cmd.Stdin, p.cmd.Stderr, p.cmd.SysProcAttr = read, s.workersLog, ownGroup()
	err = p.cmd.Start()
	read.Close()
	return err
}

// endWorker ends a worker by a signal, and waits until it has ended.
func (s *stack) endWorker(p *process, signal os.Signal) {
	if signal == os.Kill {
		s.witness.died(p.holder())
	}
	p.cmd.Process.Signal(signal)
	slow := time.AfterFunc(20*time.Second, func() {
		s.mu.Lock()
		s.stuck = append(s.stuck, p.holder())
		s.mu.Unlock()
		s.witness.died(p.holder())
		p.cmd.Process.Kill()
	})
	p.cmd.Wait()
	slow.Stop()
	p.port.Close()
	p.stdin.Close()
}

// disrupt makes a disruption, and returns when it is over.
func (s *stack) disrupt(ctx context.Context, d disruption) error {
	s.disrupting.Lock()
	defer s.disrupting.Unlock()
	now := time.Now()
	switch d.kind {
	case kill, term:
		signal := os.Signal(syscall.SIGTERM)
		if d.kind == kill {
			signal = os.Kill
		}
		p := s.workers[d.worker]
		s.endWorker(p, signal)
		if err := s.startWorker(p); err != nil {
			return err
		}
	case stop:
		s.server.Process.Signal(syscall.SIGSTOP)
		time.Sleep(d.lasts)
		now = time.Now()
		s.server.Process.Signal(syscall.SIGCONT)
	case flush:
		if err := s.redis.ScriptFlush(ctx).Err(); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disrupted = append(s.disrupted, disruptionEnd{now, d.kind})
	return nil
}

// stopWorkers ends all workers as a deploy does.
func (s *stack) stopWorkers() {
	s.disrupting.Lock()
	defer s.disrupting.Unlock()
	var all sync.WaitGroup
	for _, p := range s.workers {
		if p.cmd != nil && p.cmd.ProcessState == nil {
			all.Go(func() { s.endWorker(p, syscall.SIGTERM) })
		}
	}
	all.Wait()
}

// Package servers starts what tests, benchmarks and tools need on this machine: Redis alone, as a
// Cluster or under sentinels, and nginx. Each has ports and a directory of its own.
package servers

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// requireEnv names the environment variable that, when not empty, makes a test fail instead of
// being skipped where redis-server or nginx is not installed.
const requireEnv = "SLUICE_REQUIRE_REDIS"

// RedisProcess starts a redis-server on a free loopback port, without persistence, with these arguments, for a test.
func RedisProcess(t testing.TB, args ...string) *Process {
	t.Helper()
	return started(t, func(dir string) (*Process, error) { return StartRedis(dir, args...) })
}

// started starts servers that end with the test.
func started[S interface{ Stop() }](t testing.TB, start func(dir string) (S, error)) S {
	t.Helper()
	requireRedis(t)
	servers := expect.Got(start(t.TempDir()))(t)
	t.Cleanup(servers.Stop)
	return servers
}

// requireRedis skips the test, or fails it, where there is no redis-server.
func requireRedis(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err == nil {
		return
	}
	expect.Require(t, os.Getenv(requireEnv) == "", "redis-server is not installed, and", requireEnv, "is set")
	t.Skip("redis-server is not installed: scripts/test installs it")
}

// A Process is a running redis-server or nginx.
type Process struct {
	Addr string
	Cmd  *exec.Cmd

	exited chan struct{}
	claim  net.PacketConn // never closed: clients may look for a server that was stopped
}

// StartRedis is RedisProcess for programs that are not tests: the server works in the directory given, and Stop ends it.
func StartRedis(dir string, args ...string) (*Process, error) {
	return startServer(dir, append([]string{"--save", "", "--appendonly", "no"}, args...)...)
}

// startIn is StartRedis in a new directory of that name.
func startIn(dir, name string, args ...string) (*Process, error) {
	path := filepath.Join(dir, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		return nil, err
	}
	return StartRedis(path, args...)
}

func addrsOf(processes []*Process) []string {
	addrs := make([]string, len(processes))
	for i, p := range processes {
		addrs[i] = p.Addr
	}
	return addrs
}

// startServer starts a redis-server with these arguments, the first of which may be a configuration file.
func startServer(dir string, args ...string) (*Process, error) {
	log := filepath.Join(dir, "redis.log")
	return startOnFreePort(log, func(port int) (*exec.Cmd, error) {
		return exec.Command("redis-server", append(slices.Clone(args),
			"--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--dir", dir, "--logfile", log)...), nil
	})
}

// startOnFreePort starts a command that listens on a port, and waits until it does.
func startOnFreePort(log string, command func(port int) (*exec.Cmd, error)) (*Process, error) {
	// Another program can take the port between our look and the start: then look again.
	for range 10 {
		port, err := FreePort()
		if err != nil {
			return nil, err
		}
		p := &Process{Addr: fmt.Sprintf("127.0.0.1:%d", port), exited: make(chan struct{})}
		// If another test chose this port too, our server would answer it: so each server also claims its UDP port.
		if p.claim, err = net.ListenPacket("udp", p.Addr); err != nil {
			continue
		}
		if p.Cmd, err = command(port); err == nil {
			err = p.Cmd.Start()
		}
		if err != nil {
			p.claim.Close()
			return nil, err
		}
		go func() { p.Cmd.Wait(); close(p.exited) }()
		if answers(p.Addr, p.exited) {
			return p, nil
		}
		p.Stop()
	}
	return nil, fmt.Errorf("the server did not start on any of 10 ports: see %s", log)
}

// Stop kills the server, if it still runs, and waits until it has ended.
func (p *Process) Stop() {
	p.Cmd.Process.Kill()
	<-p.exited
}

// FreePort returns a port that nobody listens on, nor on the one 10,000 above, which is the bus of a
// node of a Cluster. Both are below the ports that outgoing connections get, 32768 and up: one of
// these would keep a server from starting.
func FreePort() (port int, err error) {
	for range 100 {
		port = 10_000 + rand.IntN(10_000)
		if err = closed(port); err == nil {
			err = closed(port + 10_000)
		}
		if err == nil {
			return port, nil
		}
	}
	return 0, err
}

func closed(port int) error {
	l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port))
	if err != nil {
		return err
	}
	return l.Close()
}

// answers waits until the server takes connections, at most 20 s.
func answers(addr string, exited <-chan struct{}) bool {
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		select {
		case <-exited:
			return false
		default:
		}
		if conn, err := net.DialTimeout("tcp", addr, time.Second); err == nil {
			conn.Close()
			return true
		}
	}
	return false
}

package limitertest

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Twice runs every script twice and returns the second reply, as go-redis does when the first was
// lost.
type Twice struct{ Repeated atomic.Int64 }

func (*Twice) DialHook(next redis.DialHook) redis.DialHook { return next }

func (tw *Twice) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if err == nil && IsScript(cmd) {
			tw.Repeated.Add(1)
			err = next(ctx, cmd)
		}
		return err
	}
}

func (tw *Twice) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := next(ctx, cmds); err != nil || !IsScript(cmds[0]) {
			return err
		}
		tw.Repeated.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

// A Proxy stands between client and Redis. It loses replies, or everything.
type Proxy struct {
	Addr string
	Lose atomic.Int32 // replies to scripts yet to be lost
	Lost atomic.Int32
	Hole atomic.Bool // it swallows all that is sent either way, and connections stay
}

// NewProxy returns a proxy of the Redis at an address.
func NewProxy(t *testing.T, server string) *Proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	p := &Proxy{Addr: listener.Addr().String()}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go p.serve(client, server)
		}
	}()
	return p
}

func (p *Proxy) serve(client net.Conn, addr string) {
	defer client.Close()
	server, err := net.Dial("tcp", addr)
	if err != nil {
		return
	}
	defer server.Close()
	var doomed atomic.Bool
	go func() {
		defer server.Close()
		for request := make([]byte, 64<<10); ; {
			n, err := client.Read(request)
			if err != nil {
				return
			}
			if bytes.Contains(bytes.ToLower(request[:n]), []byte("evalsha")) && p.Lose.Add(-1) >= 0 {
				doomed.Store(true)
			}
			if p.Hole.Load() {
				continue
			}
			if _, err := server.Write(request[:n]); err != nil {
				return
			}
		}
	}()
	for reply := make([]byte, 64<<10); ; {
		n, err := server.Read(reply)
		if err != nil {
			return
		}
		if doomed.Load() {
			p.Lost.Add(1)
			return // the script has run, and nobody hears of it
		}
		if p.Hole.Load() {
			continue
		}
		if _, err := client.Write(reply[:n]); err != nil {
			return
		}
	}
}

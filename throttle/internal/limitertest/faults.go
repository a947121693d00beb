package limitertest

import (
	"bytes"
	"net"
	"sync/atomic"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

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
	expect.Must(t, err)
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

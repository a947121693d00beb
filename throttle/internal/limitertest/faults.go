package limitertest

import (
	"bytes"
	"net"
	"sync/atomic"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A LossyProxy stands between client and Redis. It loses replies, or everything.
type LossyProxy struct {
	Addr string
	Lose atomic.Int32 // how many replies to scripts it has yet to lose
	Lost atomic.Int32
	Hole atomic.Bool // it swallows all that is sent either way, and connections stay
}

// NewLossyProxy returns a proxy of the Redis at an address.
func NewLossyProxy(t *testing.T, server string) *LossyProxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	expect.Must(t, err)
	t.Cleanup(func() { listener.Close() })
	p := &LossyProxy{Addr: listener.Addr().String()}
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

func (p *LossyProxy) serve(client net.Conn, addr string) {
	server, err := net.Dial("tcp", addr)
	if err != nil {
		client.Close()
		return
	}
	pass := func(from, to net.Conn, goesOn func(sent []byte) bool) {
		defer to.Close()
		for buffer := make([]byte, 64<<10); ; {
			n, err := from.Read(buffer)
			if err != nil || !goesOn(buffer[:n]) {
				return
			}
			if !p.Hole.Load() {
				_, _ = to.Write(buffer[:n]) // if it fails, the other direction ends both
			}
		}
	}
	var doomed atomic.Bool
	go pass(client, server, func(request []byte) bool {
		if bytes.Contains(bytes.ToLower(request), []byte("evalsha")) && p.Lose.Add(-1) >= 0 {
			doomed.Store(true)
		}
		return true
	})
	pass(server, client, func([]byte) bool {
		lost := doomed.Load()
		if lost {
			p.Lost.Add(1) // the script has run, and nobody hears of it
		}
		return !lost
	})
}

package sitetest

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A BreakableProxy stands between clients and a Redis. It can be cut, and it can hang.
type BreakableProxy struct {
	mu    sync.Mutex
	conns []net.Conn
	isCut bool
	hangs chan struct{} // is closed when it goes on; nil while it does
}

// Options returns o with every connection through the proxy.
func (p *BreakableProxy) Options(o *redis.Options) *redis.Options {
	through := *o
	dial := o.Dialer
	through.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.isCut {
			return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("the connection is cut")}
		}
		server, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		client, inside := net.Pipe()
		p.conns = append(p.conns, inside, server)
		go p.forward(inside, server)
		go p.forward(server, inside)
		return TCP{client}, nil
	}
	through.DialerRetries = 1
	return &through
}

// forward reads on while the proxy hangs, as the buffers of a real connection do.
func (p *BreakableProxy) forward(from, to net.Conn) {
	read := make(chan []byte, 1000)
	go func() {
		defer to.Close()
		for b := range read {
			p.wait()
			_, _ = to.Write(b)
		}
		p.wait()
	}()
	defer close(read)
	for buffer := make([]byte, 64<<10); ; {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		read <- slices.Clone(buffer[:n])
	}
}

func (p *BreakableProxy) wait() {
	p.mu.Lock()
	hangs := p.hangs
	p.mu.Unlock()
	if hangs != nil {
		<-hangs
	}
}

// Cut breaks all connections, and lets no new connection through.
func (p *BreakableProxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.isCut = true
	for _, conn := range p.conns {
		conn.Close()
	}
	p.conns = nil
}

// Mend lets new connections through.
func (p *BreakableProxy) Mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.isCut = false
}

// Hang stops the Redis as SIGSTOP does, until the channel is closed. Meanwhile it takes connections and
// commands, and answers nothing. Afterwards it does all of it, even for callers that have given up.
func (p *BreakableProxy) Hang(d time.Duration) (goesOn <-chan struct{}) {
	hangs := make(chan struct{})
	p.mu.Lock()
	p.hangs = hangs
	p.mu.Unlock()
	time.AfterFunc(d, func() {
		p.mu.Lock()
		p.hangs = nil
		p.mu.Unlock()
		close(hangs)
	})
	return hangs
}

// TCP is a pipe that fails as a connection over TCP does.
type TCP struct{ net.Conn }

func (c TCP) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return n, closedLikeTCP(err)
}

func (c TCP) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, closedLikeTCP(err)
}

func (c TCP) SetDeadline(t time.Time) error { return closedLikeTCP(c.Conn.SetDeadline(t)) }

func (c TCP) SetReadDeadline(t time.Time) error { return closedLikeTCP(c.Conn.SetReadDeadline(t)) }

func (c TCP) SetWriteDeadline(t time.Time) error { return closedLikeTCP(c.Conn.SetWriteDeadline(t)) }

func closedLikeTCP(err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return net.ErrClosed
	}
	return err
}

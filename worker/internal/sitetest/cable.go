package sitetest

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Cable can be cut: connections through it fail until it is mended.
type Cable struct {
	mu    sync.Mutex
	conns []net.Conn
	isCut bool
}

// Options are those of o with every connection through the cable.
func (c *Cable) Options(o *redis.Options) *redis.Options {
	through := *o
	dial := o.Dialer
	through.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.isCut {
			return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("the cable is cut")}
		}
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		c.conns = append(c.conns, conn)
		return Plug{conn}, nil
	}
	through.DialerRetries = 1
	return &through
}

// Cut breaks all connections, and lets no new ones through.
func (c *Cable) Cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = true
	for _, conn := range c.conns {
		conn.Close()
	}
	c.conns = nil
}

// Mend lets new connections through.
func (c *Cable) Mend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = false
}

// A Plug is one end of a cable. It fails like a connection over TCP, even if it is a pipe.
type Plug struct{ net.Conn }

func (p Plug) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	return n, closedLikeTCP(err)
}

func (p Plug) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	return n, closedLikeTCP(err)
}

func (p Plug) SetDeadline(t time.Time) error { return closedLikeTCP(p.Conn.SetDeadline(t)) }

func (p Plug) SetReadDeadline(t time.Time) error { return closedLikeTCP(p.Conn.SetReadDeadline(t)) }

func (p Plug) SetWriteDeadline(t time.Time) error { return closedLikeTCP(p.Conn.SetWriteDeadline(t)) }

func closedLikeTCP(err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return net.ErrClosed
	}
	return err
}

package worker_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A cable can be cut: connections through it fail until it is mended.
type cable struct {
	mu    sync.Mutex
	conns []net.Conn
	isCut bool
}

// options are those of o with every connection through the cable.
func (c *cable) options(o *redis.Options) *redis.Options {
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
		return plug{conn}, nil
	}
	through.DialerRetries = 1
	return &through
}

func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = true
	for _, conn := range c.conns {
		conn.Close()
	}
	c.conns = nil
}

func (c *cable) mend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = false
}

// A plug is one end of a cable. It fails like a connection over TCP, even if it is a pipe.
type plug struct{ net.Conn }

func (p plug) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	return n, closedLikeTCP(err)
}

func (p plug) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	return n, closedLikeTCP(err)
}

func (p plug) SetDeadline(t time.Time) error { return closedLikeTCP(p.Conn.SetDeadline(t)) }

func (p plug) SetReadDeadline(t time.Time) error { return closedLikeTCP(p.Conn.SetReadDeadline(t)) }

func (p plug) SetWriteDeadline(t time.Time) error { return closedLikeTCP(p.Conn.SetWriteDeadline(t)) }

func closedLikeTCP(err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return net.ErrClosed
	}
	return err
}

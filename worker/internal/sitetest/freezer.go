package sitetest

import (
	"context"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// A Freezer is a Redis that can be stopped as by SIGSTOP: it takes connections and commands,
// answers nothing, and does all of it when it goes on, even for callers that have given up.
type Freezer struct {
	mu    sync.Mutex
	thaws chan struct{} // nil while it runs
}

// Freeze stops the Redis for this long, and returns then.
func (f *Freezer) Freeze(d time.Duration) {
	thaws := make(chan struct{})
	f.mu.Lock()
	f.thaws = thaws
	f.mu.Unlock()
	time.Sleep(d)
	f.mu.Lock()
	f.thaws = nil
	f.mu.Unlock()
	close(thaws)
}

func (f *Freezer) wait() {
	f.mu.Lock()
	thaws := f.thaws
	f.mu.Unlock()
	if thaws != nil {
		<-thaws
	}
}

// Options are those of o with every connection through the freezer.
func (f *Freezer) Options(o *redis.Options) *redis.Options {
	through := *o
	dial := o.Dialer
	through.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		server, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		client, inside := net.Pipe()
		sent := make(chan []byte, 1000)
		go func() {
			defer close(sent)
			for buffer := make([]byte, 64<<10); ; {
				n, err := inside.Read(buffer)
				if err != nil {
					return
				}
				sent <- slices.Clone(buffer[:n])
			}
		}()
		go func() {
			defer server.Close()
			for b := range sent {
				f.wait()
				server.Write(b)
			}
			f.wait()
		}()
		go func() {
			defer inside.Close()
			for buffer := make([]byte, 64<<10); ; {
				n, err := server.Read(buffer)
				if err != nil {
					return
				}
				f.wait()
				inside.Write(buffer[:n])
			}
		}()
		return Plug{client}, nil
	}
	return &through
}

// SetClock keeps the clock of a miniredis ahead of this machine's, until its result is called.
func SetClock(m *miniredis.Miniredis, ahead *atomic.Int64) (end func()) {
	ended := make(chan struct{})
	go func() {
		for {
			m.SetTime(time.Now().Add(time.Duration(ahead.Load())))
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ended:
				return
			}
		}
	}()
	synctest.Wait()
	return func() { close(ended) }
}

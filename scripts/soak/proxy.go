package main

import (
	"bufio"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A proxy stands in front of one redis-server. It disturbs calls by their fates, and shows the
// witness calls and replies.
type proxy struct {
	rate    float64
	seed    uint64
	server  string
	witness *witness
	calm    atomic.Bool // no more faults

	mu    sync.Mutex
	calls map[string]uint64 // so far, by kind
}

func newProxy(server string, w *witness, seed uint64, rate float64) *proxy {
	return &proxy{rate: rate, seed: seed, server: server, witness: w, calls: map[string]uint64{}}
}

// listen accepts connections of one process until the listener is closed.
func (p *proxy) listen(holder string) (net.Listener, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go p.serve(conn, holder)
		}
	}()
	return l, nil
}

// serve forwards one connection. It reads the replies to all forwarded calls, even if the client is
// gone: Redis executes these calls all the same, except one that still waits.
func (p *proxy) serve(client net.Conn, holder string) {
	defer client.Close()
	server, err := net.Dial("tcp", p.server)
	if err != nil {
		return
	}
	defer server.Close()
	calls := make(chan wireCall, 1<<16)
	var gone, waits atomic.Bool
	go func() {
		defer close(calls)
		p.forward(client, server, calls, &waits)
		gone.Store(true)
		if waits.Load() {
			server.Close()
		}
	}()
	replies := bufio.NewReader(server)
	for call := range calls {
		if call.kind == "subscribe" || call.kind == "psubscribe" {
			go func() {
				for range calls { // closed when the client goes
				}
				server.Close()
			}()
			io.Copy(client, replies)
			return
		}
		reply, err := readValue(replies)
		for err == nil && reply[0] == '>' {
			client.Write(reply)
			reply, err = readValue(replies)
		}
		if err != nil {
			return
		}
		if call.kind == waiting {
			waits.Store(false)
		}
		p.witness.saw(call, reply, holder, func() bool {
			switch {
			case call.fate == dropped:
				gone.Store(true)
				client.Close()
			case !gone.Load():
				_, err := client.Write(reply)
				return err == nil
			}
			return false
		})
	}
}

func (p *proxy) forward(client, server net.Conn, calls chan<- wireCall, waits *atomic.Bool) {
	requests := bufio.NewReader(client)
	for {
		request, err := readValue(requests)
		if err != nil {
			return
		}
		command, err := words(request)
		if err != nil {
			client.Close()
			return
		}
		call := callOf(command)
		var delay time.Duration
		call.fate, delay = p.draw(call.kind)
		time.Sleep(delay)
		if call.fate == cut {
			client.Close()
			return
		}
		if call.kind == waiting {
			waits.Store(true)
		}
		calls <- call
		if _, err := server.Write(request); err != nil {
			client.Close()
			return
		}
	}
}

// draw returns the fate and the delay of the next call of a kind.
func (p *proxy) draw(kind string) (fate, time.Duration) {
	if p.calm.Load() || slices.Contains(handshake, kind) {
		return passes, 0
	}
	p.mu.Lock()
	n := p.calls[kind]
	p.calls[kind]++
	p.mu.Unlock()
	f, delay := fateOf(p.seed, kind, n, p.rate)
	if f != passes {
		p.witness.mu.Lock()
		p.witness.faults[f]++
		p.witness.mu.Unlock()
	}
	return f, delay
}

// drawn returns how many calls of a kind there were.
func (p *proxy) drawn(kind string) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls[kind]
}

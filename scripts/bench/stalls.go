package main

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A stall is a time in which the machine held up this process or its Redis. The line is not to
// blame for what a task took longer then.
type stall struct{ from, to time.Time }

// stallsFrom is the least length of a stall, and pulse the time between two pings.
const (
	stallsFrom = 10 * time.Millisecond
	pulse      = 5 * time.Millisecond
)

// A stallWatch pings Redis all the time, and notes slow answers.
type stallWatch struct {
	end func()

	mu    sync.Mutex
	found []stall // in the order of time
}

func watchStalls(client *redis.Client) *stallWatch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &stallWatch{}
	var watching sync.WaitGroup
	watching.Go(func() {
		for from := time.Now(); ctx.Err() == nil; from = time.Now() {
			time.Sleep(pulse)
			client.Ping(ctx)
			if to := time.Now(); to.Sub(from) > pulse+stallsFrom {
				w.mu.Lock()
				w.found = append(w.found, stall{from, to})
				w.mu.Unlock()
			}
		}
	})
	w.end = func() {
		cancel()
		watching.Wait()
	}
	return w
}

// between returns how much of that time were stalls.
func (w *stallWatch) between(from, to time.Time) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var sum time.Duration
	for _, s := range w.found {
		if s.to.After(from) && s.from.Before(to) {
			sum += min(to.Sub(s.from), to.Sub(from), s.to.Sub(from), s.to.Sub(s.from))
		}
	}
	return sum
}

func (w *stallWatch) longest() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	longest := time.Duration(0)
	for _, s := range w.found {
		longest = max(longest, s.to.Sub(s.from))
	}
	return longest
}

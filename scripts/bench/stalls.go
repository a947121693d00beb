package main

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A stall is a time in which this process or its Redis was held up by the machine: what a task
// took longer meanwhile is not the line's doing.
type stall struct{ from, to time.Time }

// stallsFrom is how long a stall is at the least, and pulse how often one is looked for.
const (
	stallsFrom = 10 * time.Millisecond
	pulse      = 5 * time.Millisecond
)

// A stallWatch asks Redis for nothing all the time, and notes when the answer took long.
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

// between is for how much of that time the machine held everything up.
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

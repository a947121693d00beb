package main

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// pulse is the time between two pings.
const pulse = 5 * time.Millisecond

// A stallWatch pings Redis all the time. A slow answer says that the machine held up this process
// or its Redis: the line is not to blame for what a task took longer then.
type stallWatch struct {
	end func()

	mu   sync.Mutex
	most time.Duration // that an answer took
}

func watchStalls(client *redis.Client) *stallWatch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &stallWatch{}
	var watching sync.WaitGroup
	watching.Go(func() {
		for from := time.Now(); ctx.Err() == nil; from = time.Now() {
			time.Sleep(pulse)
			client.Ping(ctx)
			w.mu.Lock()
			w.most = max(w.most, time.Since(from)-pulse)
			w.mu.Unlock()
		}
	})
	w.end = func() {
		cancel()
		watching.Wait()
	}
	return w
}

func (w *stallWatch) longest() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.most
}

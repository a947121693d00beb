package dispatch

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// troubleTimeout bounds calls that clean up.
const troubleTimeout = 5 * time.Second

// A backgroundRunner runs what nobody waits for, until it is closed.
type backgroundRunner struct {
	ctx     context.Context // ends when it is closed
	cancel  context.CancelFunc
	serving context.Context // ends when no more tasks are handed out
	stop    context.CancelFunc
	emptied chan struct{} // closed when all that was ready is put back after stop

	mu     sync.Mutex
	busy   sync.WaitGroup
	closed bool // nothing is added to busy any more
}

func newBackgroundRunner() *backgroundRunner {
	b := &backgroundRunner{emptied: make(chan struct{})}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.serving, b.stop = context.WithCancel(b.ctx)
	return b
}

func (b *backgroundRunner) isStopped() bool { return b.serving.Err() != nil }

func (b *backgroundRunner) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-b.ctx.Done():
	}
}

// RetryInBackground makes a call in the background, and repeats it for ten seconds while it fails.
func (b *backgroundRunner) RetryInBackground(do func(context.Context) error) {
	b.inBackground(func() {
		delay := 50 * time.Millisecond
		for end := time.Now().Add(2 * troubleTimeout); ; delay = min(2*delay, time.Second) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(b.ctx), troubleTimeout)
			err := do(ctx)
			cancel()
			if err == nil || b.ctx.Err() != nil || time.Now().After(end) {
				return
			}
			b.sleep(delay)
		}
	})
}

// insist repeats a call on asynq's Redis until it is answered, as it may have made tasks active. It returns
// false if the dispatcher closes before an answer.
func (d *Dispatcher) insist(call func(ctx context.Context) error) bool {
	for begun := time.Now(); ; d.sleep(retryAfterError) {
		err := call(d.ctx)
		if err != nil && d.ctx.Err() != nil {
			return false
		}
		d.Limiter.Config().Observer.Called(throttle.Call{Err: err, Script: "dequeue", Took: time.Since(begun)})
		if err == nil {
			d.asynqLog.Answered(0)
			return true
		}
		d.asynqLog.Failed(err)
	}
}

// inBackground runs a function for which close waits, unless that is over.
func (b *backgroundRunner) inBackground(run func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		go run()
		return
	}
	b.busy.Go(run)
}

// close waits for what is under way. A call that fails is not repeated any more.
func (b *backgroundRunner) close() {
	b.cancel()
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.busy.Wait()
}

package dispatch

import (
	"context"
	"sync"
	"time"
)

// troubleTimeout bounds calls that clean up.
const troubleTimeout = 5 * time.Second

// A background runs what nobody waits for, until it is closed.
type background struct {
	ctx     context.Context // ends when it is closed
	cancel  context.CancelFunc
	serving context.Context // ends when no more tasks are handed out
	stop    context.CancelFunc
	emptied chan struct{} // closed when all that was ready is put back after stop

	mu     sync.Mutex
	busy   sync.WaitGroup
	closed bool // nothing is added to busy any more
}

func newBackground() *background {
	b := &background{emptied: make(chan struct{})}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.serving, b.stop = context.WithCancel(b.ctx)
	return b
}

func (b *background) isStopped() bool { return b.serving.Err() != nil }

func (b *background) sleep(pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-b.ctx.Done():
	}
}

// Later makes a call in the background, and repeats it for ten seconds while it fails.
func (b *background) Later(do func(context.Context) error) {
	b.inBackground(func() {
		pause := 50 * time.Millisecond
		for end := time.Now().Add(2 * troubleTimeout); ; pause = min(2*pause, time.Second) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(b.ctx), troubleTimeout)
			err := do(ctx)
			cancel()
			if err == nil || b.ctx.Err() != nil || time.Now().After(end) {
				return
			}
			b.sleep(pause)
		}
	})
}

// insist repeats a call on asynq's Redis until it is answered, as it may have made tasks active. While
// Next waits it returns the errors. The result is false if the dispatcher is closed before.
func (d *Dispatcher) insist(call func(ctx context.Context) error) bool {
	for begun := time.Now(); ; {
		err := call(d.ctx)
		if err != nil && d.ctx.Err() != nil {
			return false
		}
		if d.AsynqAnswers(err, time.Since(begun)); err == nil {
			return true
		}
		d.mu.Lock()
		if d.waiting {
			d.failed = err
			signal(d.ready)
		}
		d.mu.Unlock()
		d.sleep(errorPause)
	}
}

// inBackground runs a function for which close waits, unless that is over.
func (b *background) inBackground(run func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		go run()
		return
	}
	b.busy.Go(run)
}

// close waits for what is under way. A call that fails is not repeated any more.
func (b *background) close() {
	b.cancel()
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.busy.Wait()
}

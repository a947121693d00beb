package limitertest

import (
	"context"
	"runtime"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// A scriptGate is a connection that can stop scripts.
type scriptGate struct {
	redis.UniversalClient

	mu      sync.Mutex
	shut    chan struct{} // nil if it is open
	stopped chan struct{} // one value for each call that is stopped
}

func (g *scriptGate) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	g.mu.Lock()
	shut, stopped := g.shut, g.stopped
	g.mu.Unlock()
	if shut != nil {
		stopped <- struct{}{}
		<-shut
	}
	return g.UniversalClient.EvalSha(ctx, sha, keys, args...)
}

func (g *scriptGate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut, g.stopped = make(chan struct{}), make(chan struct{}, 100)
}

func (g *scriptGate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.shut)
	g.shut = nil
}

// A Call is a Reserve, a Peek or, with a reservation, a Cancel.
type Call struct {
	Peek    bool
	Request throttle.Request
	Cancel  *throttle.Reservation
}

func (h *Hooked) call(ctx context.Context, c Call) (throttle.Decision, error) {
	switch {
	case c.Cancel != nil:
		return TryCancel(ctx, h.Limiter, *c.Cancel)
	case c.Peek:
		return h.Limiter.Peek(ctx, c.Request)
	}
	return h.Reserve(ctx, c.Request)
}

// Together makes calls of policy "p" that go to Redis in one call, in order: after a Peek that waits for them.
func (h *Hooked) Together(t TB, calls ...Call) []throttle.Decision {
	t.Helper()
	decisions, errs := h.TryTogether(t, calls...)
	for i, err := range errs {
		if err != nil {
			t.Fatalf("call %d of the batch: %v", i, err)
		}
	}
	return decisions
}

// TryTogether is Together for calls that may fail.
func (h *Hooked) TryTogether(t TB, calls ...Call) ([]throttle.Decision, []error) {
	t.Helper()
	h.gate.close()
	peeked := make(chan error)
	go func() {
		_, err := h.Limiter.Peek(t.Context(), costless(calls))
		peeked <- err
	}()
	<-h.gate.stopped
	decisions, errs := make([]throttle.Decision, len(calls)), make([]error, len(calls))
	var made sync.WaitGroup
	for i, c := range calls {
		made.Go(func() { decisions[i], errs[i] = h.call(t.Context(), c) })
		for h.hooks.Gathered("p") <= i {
			runtime.Gosched()
		}
	}
	h.gate.open()
	expect.Must(t, <-peeked)
	made.Wait()
	return decisions, errs
}

// costless returns a request that the limiter does not refuse: it costs nothing.
func costless(calls []Call) throttle.Request {
	r := calls[0].Request
	if calls[0].Cancel != nil {
		r = calls[0].Cancel.Request
	}
	r.Cost = map[string]int64{throttle.Requests: 0}
	return r
}

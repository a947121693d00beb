package page

import (
	"context"
	"sync"
	"time"
)

const (
	fresh      = time.Second     // for how long an answer is shown to others too
	askTimeout = 5 * time.Second // of a question to Redis
	maxRecent  = 1000            // answers
)

// recent keeps answers for a moment: however many follow the page, Redis is asked once a second.
type recent struct {
	mu      sync.Mutex
	answers map[string]*answer
}

type answer struct {
	at    time.Time
	done  chan struct{}
	value any
	err   error
}

// remember returns the answer to a question, which it asks if nobody has done so just now.
func remember[T any](r *recent, ctx context.Context, key string, ask func(context.Context) (T, error)) (T, error) {
	a, ours := r.of(key)
	if ours {
		func() {
			defer close(a.done)
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout) // others wait for it too
			defer cancel()
			a.value, a.err = ask(ctx)
		}()
	}
	select {
	case <-a.done:
		value, _ := a.value.(T)
		return value, a.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// of returns the answer to a question, and whether the caller is to ask it.
func (r *recent) of(key string) (a *answer, ours bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if a = r.answers[key]; a != nil && now.Sub(a.at) < fresh {
		return a, false
	}
	if r.answers == nil || len(r.answers) >= maxRecent {
		kept := map[string]*answer{}
		for key, a := range r.answers {
			if now.Sub(a.at) < fresh {
				kept[key] = a
			}
		}
		r.answers = kept
	}
	a = &answer{at: now, done: make(chan struct{})}
	r.answers[key] = a
	return a, true
}

// forget forgets all answers, as something has changed.
func (r *recent) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answers = nil
}

package page

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	fresh      = time.Second             // for how long an answer is shown to others too
	askTimeout = 5 * time.Second         // of a question to Redis
	viewWithin = 1500 * time.Millisecond // how long a page waits for its answers
	maxRecent  = 1000                    // answers

	changeWithin = viewWithin + 400*time.Millisecond // for an action, and the page after it
)

// recent caches answers for a moment: however many browsers follow the page, Redis is asked once a second. A
// question that Redis has not answered yet is not asked again: callers get its last answer.
type recent struct {
	mu      sync.Mutex
	answers map[string]*answer
	failing time.Time // since when nothing is answered; zero while Redis answers
	good    time.Time // when Redis answered last
}

type answer struct {
	at       time.Time
	previous any // the value of the last answer
	done     chan struct{}
	value    any
	err      error
}

var errSilent = errors.New("redis does not answer")

// isSilent reports whether a call failed because Redis did not answer, cannot serve now, or refuses its user.
func isSilent(err error) bool {
	return errors.Is(err, throttle.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, io.EOF) || errors.As(err, new(net.Error))
}

// remember returns the answer to a question, which it asks unless somebody just did; on an error the last answer.
func remember[T any](r *recent, ctx context.Context, key string, ask func(context.Context) (T, error)) (T, error) {
	begun := time.Now()
	a, ours := r.answer(key)
	if ours {
		go func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout) // others wait for it too
			defer cancel()
			value, err := ask(ctx)
			r.answered(a, value, err)
		}()
	}
	select {
	case <-a.done:
		value, _ := a.value.(T)
		return value, a.err
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) && time.Since(begun) > viewWithin/2 { // else it came late in a view
			r.fails()
		}
		value, _ := a.previous.(T)
		return value, errSilent
	}
}

// answered notes an answer.
func (r *recent) answered(a *answer, value any, err error) {
	if err != nil {
		if isSilent(err) {
			r.fails()
		}
		value = a.previous
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.failing, r.good = time.Time{}, time.Now()
	}
	a.value, a.err = value, err
	close(a.done)
}

func (r *recent) fails() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failing.IsZero() {
		r.failing = time.Now()
	}
}

// outage returns since when Redis does not answer, zero if it does, and when it answered last.
func (r *recent) outage() (since, good time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failing, r.good
}

// answer returns the answer to a question, and whether the caller is to ask it.
func (r *recent) answer(key string) (a *answer, ours bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	last := r.answers[key]
	if last != nil && now.Sub(last.at) < fresh {
		return last, false
	}
	a = &answer{at: now, done: make(chan struct{})}
	if last != nil {
		select {
		case <-last.done:
			a.previous = last.value
		default:
			return last, false // it is still under way
		}
	}
	if r.answers == nil {
		r.answers = map[string]*answer{}
	}
	for key := range r.answers {
		if len(r.answers) < maxRecent {
			break
		}
		delete(r.answers, key)
	}
	r.answers[key] = a
	return a, true
}

// forget makes later callers ask anew after a change. A question under way is asked again once it is answered.
func (r *recent) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.answers {
		a.at = time.Time{}
	}
}

package script

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A fakeLine notes the takes, and answers by what is asked of it.
type fakeLine struct {
	mu    sync.Mutex
	log   []string
	reply func(ctx context.Context) (Taken, error)
}

func (f *fakeLine) take(ctx context.Context, _ *Policy, seq int64, q TakeRequest) (Taken, error) {
	f.mu.Lock()
	f.log = append(f.log, fmt.Sprintf("%d %v %d", seq, slices.Sorted(maps.Keys(q.Queues)), q.Max))
	f.mu.Unlock()
	return f.reply(ctx)
}

func (f *fakeLine) calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

func newFakeTaker(f *fakeLine) *Taker {
	return &Taker{take: f.take, turn: make(chan struct{}, 1)}
}

func got(tickets int) func(context.Context) (Taken, error) {
	return func(context.Context) (Taken, error) { return Taken{At: 1, Tickets: make([]TakenTicket, tickets)}, nil }
}

func lost(context.Context) (Taken, error) { return Taken{}, errors.New("connection reset") }

func TestATakeThatWasNotAnsweredIsRepeated(t *testing.T) {
	f := &fakeLine{}
	taker, p := newFakeTaker(f), &Policy{}
	take := func(reply func(context.Context) (Taken, error), max int, want int) {
		t.Helper()
		f.reply = reply
		taken, err := taker.Take(t.Context(), p, TakeRequest{Queues: map[string]int{"q": 1}, Max: max})
		expect.That(t, (err == nil) == (want >= 0) && (err != nil || len(taken.Tickets) == want), taken, err)
	}
	acknowledge := func(reply func(context.Context) (Taken, error), ok bool) {
		t.Helper()
		f.reply = reply
		_, err := taker.Take(t.Context(), p, TakeRequest{})
		expect.That(t, (err == nil) == ok, err)
	}
	acknowledge(got(0), true) // nothing to say
	take(got(2), 2, 2)
	take(lost, 3, -1)
	acknowledge(got(0), true) // nor here: nobody knows what was taken
	take(lost, 4, -1)
	take(got(1), 5, 1)
	acknowledge(lost, false)
	acknowledge(got(0), true)
	acknowledge(got(0), true)
	take(got(0), 6, 0)
	acknowledge(got(0), true)
	take(got(0), 7, 0)
	want := []string{"1 [q] 2", "2 [q] 3", "2 [q] 4", "2 [q] 5", "3 [] 0", "4 [] 0", "5 [q] 6", "6 [q] 7"}
	expect.Equal(t, f.calls(), want, "calls")
}

// The context is honoured although the call goes on, which holds up the next; what it got comes again.
func TestATakeEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeLine{reply: func(context.Context) (Taken, error) {
			time.Sleep(3 * time.Second) // as go-redis does, whose reads do not end with their context
			return Taken{At: 1, Tickets: make([]TakenTicket, 1)}, nil
		}}
		taker, p := newFakeTaker(f), &Policy{}
		begin := time.Now()
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
			_, err := taker.Take(ctx, p, TakeRequest{Queues: map[string]int{"q": 1}, Max: 1})
			expect.Err(t, err, context.DeadlineExceeded)
			cancel()
		}
		spent := time.Since(begin)
		expect.That(t, spent == 500*time.Millisecond && len(f.calls()) == 1, f.calls(), "in", spent)
		taken, err := taker.Take(t.Context(), p, TakeRequest{Queues: map[string]int{"r": 1}, Max: 2})
		spent = time.Since(begin)
		expect.That(t, err == nil && len(taken.Tickets) == 1 && spent == 6*time.Second, taken, err, "after", spent)
		expect.Equal(t, f.calls(), []string{"1 [q] 1", "1 [r] 2"}, "calls")
		f.reply = func(ctx context.Context) (Taken, error) { <-ctx.Done(); return Taken{}, ctx.Err() }
		_, err = taker.Take(t.Context(), p, TakeRequest{Queues: map[string]int{"q": 1}, Max: 1})
		expect.That(t, err != nil && !errors.Is(err, context.DeadlineExceeded), err)
	})
}

// Scripts remember whether an earlier copy of a call was granted, or joined, by the first letters of the statuses.
func TestFirstLettersOfStatuses(t *testing.T) {
	by := map[string][]string{}
	for _, status := range statuses {
		by[status[:1]] = append(by[status[:1]], status)
	}
	expect.That(t, len(by["o"]) == 1 && by["o"][0] == Granted && len(by["j"]) == 1 && by["j"][0] == Joined, by)
}

package script

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	maxBatch = 64 // requests of one call to Redis

	// maxBatchWindows bounds the windows that all requests of a call look at: a call blocks Redis.
	maxBatchWindows = 512

	// batchTimeout bounds a batch of several callers, each of whom may wait for less.
	batchTimeout = 5 * time.Second
)

// A Batcher sends the requests of one policy name, one call to Redis at a time. A request is sent
// at once if no call is under way. Requests that come meanwhile are gathered, and the next call
// sends them together. (Databases call it group commit.) It is safe for concurrent use.
type Batcher struct {
	decide func(ctx context.Context, p *Policy, seq int64, requests []Request) ([]Answer, error)
	seq    atomic.Int64

	mu      sync.Mutex
	busy    bool // a call is under way
	waiting []item

	// lost cancels what calls without an answer may have granted. The next call begins with it: what
	// the script remembers of the last call says what that was.
	lost []item
}

// An item is one request that waits.
type item struct {
	policy  *Policy
	request Request
	asked   *asked // nil if nobody waits for the answer
	index   int    // in asked.answers
}

// An asked holds the answers that one caller waits for.
type asked struct {
	ctx     context.Context
	answers []Answer
	err     error // the first one
	left    int   // answers that are missing
	done    chan struct{}
	gone    bool   // the caller gave up
	batch   *batch // the call under way with some of its requests
}

// A batch is one call for several callers.
type batch struct {
	callers int // that have not given up
	ctx     context.Context
	cancel  context.CancelFunc
	policy  *Policy
	items   []item
}

// NewBatcher returns a batcher of one policy name.
func (r *Runner) NewBatcher() *Batcher { return &Batcher{decide: r.decide} }

// batch returns how many requests a call may have.
func (p *Policy) batch() int { return max(1, min(maxBatch, maxBatchWindows/max(1, len(p.Windows)))) }

// Do returns an answer to each of the requests, in order. If the context ends first it returns the
// context's error, and what was granted is cancelled. With a deadline it returns then, whatever
// Redis does. Other errors are those of go-redis, or a *ReplyError. If a single request cannot be
// decided, its answer has the error.
func (b *Batcher) Do(ctx context.Context, p *Policy, requests ...Request) ([]Answer, error) {
	if err := ctx.Err(); err != nil || len(requests) == 0 {
		return nil, err
	}
	_, timed := ctx.Deadline() // a client does not heed it, unless it is told to
	b.mu.Lock()
	if !b.busy && !timed && len(b.lost) == 0 && len(requests) <= p.batch() {
		b.busy = true
		b.mu.Unlock()
		defer b.ended() // even if a hook of the client panics
		answers, errs := make([]Answer, len(requests)), make([]error, len(requests))
		for i, r := range b.run(ctx, p, requests) {
			answers[i], errs[i] = r.answer, r.err
			b.note(p, requests[i], r)
		}
		return answers, cmp.Or(errs...)
	}
	a := &asked{ctx: ctx, answers: make([]Answer, len(requests)), left: len(requests), done: make(chan struct{})}
	b.mu.Unlock()
	items := make([]item, len(requests))
	for i, r := range requests { // not in send, where all others would wait for it
		r.args = r.append(make([]any, 0, p.size()), p.leases)
		items[i] = item{p, r, a, i}
	}
	b.mu.Lock()
	b.waiting = append(b.waiting, items...)
	if !b.busy {
		b.busy = true
		b.next()
	}
	b.mu.Unlock()
	select {
	case <-a.done:
	case <-ctx.Done():
		if b.giveUp(a) {
			return nil, ctx.Err()
		}
	}
	return a.answers, a.err
}

// Gathered returns how many requests wait for the call that is under way.
func (b *Batcher) Gathered() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.waiting)
}

// giveUp reports whether the caller is not answered yet, and then forgets it.
func (b *Batcher) giveUp(a *asked) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.left == 0 {
		return false
	}
	a.gone = true
	b.waiting = slices.DeleteFunc(b.waiting, func(it item) bool { return it.asked == a })
	if a.batch != nil {
		if a.batch.callers--; a.batch.callers == 0 {
			a.batch.cancel()
		}
	}
	return true
}

func (b *Batcher) ended() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.next()
}

// next sends what waits, after a call has ended. The lock is held.
func (b *Batcher) next() {
	if s := b.load(); s != nil {
		go b.send(s)
	}
}

// load takes what one call can send from what waits, or returns nil. The lock is held.
func (b *Batcher) load() *batch {
	if len(b.waiting) == 0 {
		b.busy, b.waiting = false, nil
		return nil
	}
	s := &batch{ctx: context.Background(), policy: b.waiting[0].policy}
	// After a call by another policy nothing says any more what the last one got.
	b.lost = slices.DeleteFunc(b.lost, func(it item) bool { return it.policy != s.policy })
	b.waiting, b.lost = append(b.lost, b.waiting...), nil
	b.waiting = slices.DeleteFunc(b.waiting, func(it item) bool {
		goes := it.policy == s.policy && len(s.items) < s.policy.batch()
		if goes {
			s.items = append(s.items, it)
		}
		return goes
	})
	for _, it := range s.items {
		switch a := it.asked; {
		case a == nil:
			s.callers++
		case a.batch != s:
			a.batch = s
			if s.callers++; s.callers == 1 {
				s.ctx = context.WithoutCancel(a.ctx) // for its values, such as a trace
			}
		}
	}
	s.ctx, s.cancel = context.WithTimeout(s.ctx, batchTimeout)
	return s
}

// send makes one call for several callers, and then the next ones. Redis waits for nothing while
// callers wake up.
func (b *Batcher) send(s *batch) {
	for s != nil {
		requests := make([]Request, len(s.items))
		for i := range s.items {
			requests[i] = s.items[i].request
		}
		results := b.run(s.ctx, s.policy, requests)
		late := errors.Is(s.ctx.Err(), context.DeadlineExceeded)
		s.cancel()

		b.mu.Lock()
		answered := b.deliver(s.items, results, late)
		s = b.load()
		b.mu.Unlock()
		go func() {
			for _, a := range answered {
				close(a.done)
			}
		}()
	}
}

// deliver hands answers to the callers that have not given up. The next call cancels what the
// others were granted. It returns the callers that miss no answer any more. The lock is held.
func (b *Batcher) deliver(items []item, results []result, late bool) (answered []*asked) {
	for i, it := range items {
		a, r := it.asked, results[i]
		b.lose(it.policy, it.request, r)
		switch {
		case a == nil:
		case a.gone:
			// What an idempotency key got before may belong to another call.
			if r.err == nil && grants(it.request.Op) && r.answer.Status == Granted {
				b.waiting = append(b.waiting, item{policy: it.policy, request: it.request.cancel(r.answer.At)})
			}
		default:
			a.batch, a.answers[it.index] = nil, r.answer
			if err := r.err; err != nil && a.err == nil {
				if late {
					// Not wrapped: the caller's own context has not ended.
					err = fmt.Errorf("no answer within %v: %v", batchTimeout, err)
				}
				a.err = err
			}
			if a.left--; a.left == 0 {
				answered = append(answered, a)
			}
		}
	}
	return answered
}

// cancel returns the request that gives back what a request was granted at a time.
func (r Request) cancel(at int64) Request {
	return Request{Op: Cancel, ID: r.ID, At: at, Once: r.Once, Own: r.Own, Keys: r.Keys, Cost: r.Cost}
}

func (b *Batcher) note(p *Policy, request Request, r result) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lose(p, request, r)
}

// lose notes a request that Redis may have granted without an answer. Its caller was told an error.
// An idempotency key keeps what it got, for the caller to ask again. The lock is held.
func (b *Batcher) lose(p *Policy, request Request, r result) {
	var answer redis.Error
	if r.err == nil || errors.As(r.err, &answer) {
		return
	}
	switch {
	case request.lost > 0: // of a call before: that is still to be cancelled, unless this one did it
	case grants(request.Op) && request.Once == "":
		request = request.cancel(0)
		request.lost, request.lostSeq = r.index, r.seq
	default:
		return
	}
	if len(b.lost) < p.batch()/2 { // each call has room for those who wait
		b.lost = append(b.lost, item{policy: p, request: request})
	}
}

// A result is what became of a request: number index, from 1, of the call with that sequence number.
type result struct {
	answer     Answer
	err        error
	seq, index int64
}

// run makes one call to Redis. If the script fails, any of the requests may be the cause: then each
// gets a call of its own.
func (b *Batcher) run(ctx context.Context, p *Policy, requests []Request) []result {
	seq := b.seq.Add(1)
	answers, err := b.decide(ctx, p, seq, requests)
	results := make([]result, len(requests))
	for i := range results {
		switch {
		case err == nil:
			results[i].answer = answers[i]
		case len(requests) > 1 && ScriptFailed(err):
			results[i] = b.run(ctx, p, requests[i:i+1])[0]
		default:
			results[i] = result{err: err, seq: seq, index: int64(i + 1)}
		}
	}
	return results
}

package script

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	maxGroup        = 64              // requests of one call to Redis
	maxGroupWindows = 512             // windows that the requests of one call read: a call blocks Redis
	callTimeout     = 5 * time.Second // ends go-redis's repeats of a call. One that hangs ends by the client's ReadTimeout
)

// A Runner makes scripts, and sends calls. Its fields are set before the first call. It is safe for concurrent use.
type Runner struct {
	Client redis.UniversalClient
	Prefix string // of all keys; it has no brace

	// Now, if not nil, returns the time for the scripts in microseconds, or 0 for the clock of Redis.
	Now func() int64

	Edit func(text string) string // for tests: if not nil, it changes the text of every script

	// Called is called after each call of the script "decide" or "take". n counts requests, or tickets.
	Called func(ctx context.Context, line, script string, n int, took time.Duration, err error)

	made sync.Map // *redis.Script, by name and algorithms
}

// Classify wraps an error of Redis in its kind. Package throttle, which has the kinds, sets it before anything runs, and
// uses its own. It is here for package inspect alone: in package throttle it would have to be exported to users.
var Classify func(ctx context.Context, policy string, err error) error

// NewID returns 16 random hex digits.
func NewID() string { return fmt.Sprintf("%016x", rand.Uint64()) }

// call makes one call of the named script for a process, and reads the reply. A repeated call has the same number.
func (r *Runner) call(
	ctx context.Context, p *Policy, name, process string, seq int64, args []any, read func(reply []any) (n int, err error),
) error {
	begun, now, n := time.Now(), int64(0), 0
	if r.Now != nil {
		now = r.Now()
	}
	keys := []string{Prefix(r.Prefix, p.Line) + "q"}
	cluster, isCluster := r.Client.(interface{ ReloadState(ctx context.Context) })
	if isCluster {
		// While a slot is migrated, its old node has some of the keys and its new node the others. A script that derives
		// keys would fail halfway on the old node, and find empty windows on the new one. A second key that never exists
		// makes both refuse the whole call (TRYAGAIN), and the client repeats it.
		keys = append(keys, Prefix(r.Prefix, p.Line)+"none")
	}
	args = slices.Concat([]any{now, process, seq, p.text, p.Paused(), p.listsText(now)}, args)
	reply, err := p.scripts[name].Run(ctx, r.Client, keys, args...).Slice()
	if isCluster && err != nil && !isAnswer(err) {
		cluster.ReloadState(ctx) // which nodes there are: another one may serve the slot by now
	}
	if err == nil {
		n, err = read(reply)
	}
	r.Called(ctx, p.Line, name, n, time.Since(begun), err)
	return err
}

// isAnswer reports whether an error is an answer of Redis. It counts as one that granted nothing.
func isAnswer(err error) bool { return errors.As(err, new(redis.Error)) }

// A Group sends the requests of one line, one call to Redis at a time. A request is sent at once if no call is under
// way. Those that come during a call share the next one (group commit). It is safe for concurrent use.
type Group struct {
	decide func(ctx context.Context, p *Policy, seq int64, requests []Request, args []any) ([]Answer, error)
	seq    atomic.Int64 // of the last call

	mu      sync.Mutex
	busy    bool      // a call is under way
	waiting []*bundle // of callers, or of cancellations: see cancelKnown

	// undoLost cancels what a call granted whose answer was lost. Only the next call can do that, and begins
	// with it: the script's record of the last call tells which grants these were.
	undoLost []*bundle
}

// A bundle has the requests of one caller, or a part of them that one call can carry.
type bundle struct {
	ctx      context.Context
	policy   *Policy
	requests []Request
	args     []any         // of the requests
	call     *groupCall    // that carries it; nil while the bundle waits
	answers  []Answer      // nil until the call has ended
	done     chan struct{} // closed when the answers are there
	gone     bool          // the caller gave up
}

// A groupCall is a call to Redis that is under way, with the bundles that it carries.
type groupCall struct {
	cancel  context.CancelFunc
	bundles []*bundle
}

// NewGroup returns a group of one line.
func (r *Runner) NewGroup() *Group {
	g, process := &Group{}, NewID() // the script keeps the results of the last call under this name
	g.decide = func(ctx context.Context, p *Policy, seq int64, requests []Request, args []any) (answers []Answer, err error) {
		err = r.call(ctx, p, "decide", process, seq, args, func(reply []any) (n int, err error) {
			answers, err = p.readAnswers(reply, requests)
			return len(answers), err
		})
		return answers, err
	}
	return g
}

// Do returns an answer to each of the requests, in order. If the context ends first it returns the
// context's error at once, and a later call cancels the grants. The answers have all other errors.
func (g *Group) Do(ctx context.Context, p *Policy, requests ...Request) (answers []Answer, err error) {
	if err := ctx.Err(); err != nil || len(requests) == 0 {
		return nil, err
	}
	var bundles []*bundle
	for part := range slices.Chunk(requests, p.callSize()) {
		bundles = append(bundles, newBundle(ctx, p, part...)) // not in send, where all others would wait for it
	}
	g.mu.Lock()
	if g.waiting = append(g.waiting, bundles...); !g.busy {
		g.next()
	}
	g.mu.Unlock()
	for _, b := range bundles {
		select {
		case <-b.done:
		case <-ctx.Done():
			if g.giveUp(bundles) { // else all have answers
				return nil, ctx.Err()
			}
		}
		answers = append(answers, b.answers...)
	}
	return answers, nil
}

// callSize returns how many requests one call may carry: 64, or with more than 8 windows fewer, such as 16 with 32.
func (p *Policy) callSize() int { return max(1, min(maxGroup, maxGroupWindows/max(1, len(p.Windows)))) }

func newBundle(ctx context.Context, p *Policy, requests ...Request) *bundle {
	args := make([]any, 0, len(requests)*p.argsEach())
	for i := range requests {
		args = requests[i].append(args, p.Leases)
	}
	return &bundle{ctx: ctx, policy: p, requests: requests, args: args, done: make(chan struct{})}
}

// next starts the next call, if any bundle waits. It carries as many as fit, of one version of the policy. It has a
// time limit, and the values of the first caller's context, such as a trace. The lock is held.
func (g *Group) next() {
	if g.busy = len(g.waiting) > 0; !g.busy {
		return
	}
	p := g.waiting[0].policy
	// A call by another version of the policy cannot carry them, and replaces the record that tells of the lost grants.
	g.undoLost = slices.DeleteFunc(g.undoLost, func(b *bundle) bool { return b.policy != p })
	c, room, full, all := &groupCall{}, p.callSize(), false, append(g.undoLost, g.waiting...)
	g.undoLost, g.waiting = nil, nil
	for _, b := range all {
		samePolicy := b.policy == p
		full = full || samePolicy && len(b.requests) > room // no bundle passes an earlier one of its version
		if full || !samePolicy {
			g.waiting = append(g.waiting, b)
			continue
		}
		c.bundles, b.call = append(c.bundles, b), c
		room -= len(b.requests)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.bundles[0].ctx), callTimeout)
	c.cancel = cancel
	go g.send(ctx, c)
}

// send makes one call, and starts the next one.
func (g *Group) send(ctx context.Context, c *groupCall) {
	defer c.cancel()
	first := c.bundles[0]
	requests, args := slices.Clip(first.requests), slices.Clip(first.args)
	for _, b := range c.bundles[1:] {
		requests, args = append(requests, b.requests...), append(args, b.args...)
	}
	answers := g.run(ctx, first.policy, requests, args)
	g.mu.Lock()
	for _, b := range c.bundles {
		n := len(b.requests)
		g.deliver(b, answers[:n:n])
		answers = answers[n:]
	}
	g.next()
	g.mu.Unlock()
}

// run makes one call to Redis. If the script fails, one request may be to blame: then each gets a call of its own.
func (g *Group) run(ctx context.Context, p *Policy, requests []Request, args []any) []Answer {
	seq := g.seq.Add(1)
	answers, err := g.decide(ctx, p, seq, requests, args)
	if err == nil {
		return answers
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("no answer within %v: %v", callTimeout, err) // not wrapped: the caller's own context has not ended
	}
	answers = make([]Answer, len(requests))
	repeatEach := len(requests) > 1 && ScriptFailed(err)
	for i := range answers {
		answers[i] = Answer{Err: err, failedSeq: seq, failedIndex: int64(i + 1)}
		if repeatEach {
			answers[i] = g.run(ctx, p, requests[i:i+1], args[i*p.argsEach():(i+1)*p.argsEach()])[0]
		}
	}
	return answers
}

// deliver hands a bundle its answers. Later calls cancel the grants that no caller learns of; of lost answers only as
// many as fit in half a call, and further grants stay charged. The lock is held.
func (g *Group) deliver(b *bundle, answers []Answer) {
	b.answers = answers
	for i, answer := range answers {
		if cancel, mayBeGranted := b.requests[i].cancelLost(answer); mayBeGranted && len(g.undoLost) < b.policy.callSize()/2 {
			g.undoLost = append(g.undoLost, newBundle(b.ctx, b.policy, cancel))
		}
	}
	if b.gone {
		g.cancelKnown(b)
	}
	close(b.done)
}

// giveUp lets a caller leave before all of its bundles have answers, or else returns false. What waits is not sent, and
// a call ends if nobody else needs it. Grants, known by now or by a later answer, are left to later calls to cancel.
func (g *Group) giveUp(bundles []*bundle) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if last := bundles[len(bundles)-1]; last.answers != nil { // the bundles are answered in order
		return false
	}
	stays := func(b *bundle) bool { return !b.gone }
	for _, b := range bundles {
		b.gone = true
		g.cancelKnown(b)
		if c := b.call; c != nil && !slices.ContainsFunc(c.bundles, stays) {
			c.cancel()
		}
	}
	g.waiting = slices.DeleteFunc(g.waiting, func(b *bundle) bool { return b.gone })
	return true
}

// cancelKnown lets a later call cancel the grants in the answers to a caller that gave up, if any came. The lock is held.
func (g *Group) cancelKnown(b *bundle) {
	for i, answer := range b.answers {
		if r := b.requests[i]; grants(r.Op) && answer.Status == Granted {
			g.waiting = append(g.waiting, newBundle(b.ctx, b.policy, r.cancel(answer.At)))
		}
	}
}

// cancel returns the request that gives back what a request was granted at a time.
func (r Request) cancel(at int64) Request {
	return Request{Op: Cancel, ID: r.ID, At: at, Settings: r.Settings, Keys: r.Keys, Cost: r.Cost}
}

// cancelLost returns the request that gives back what Redis may have granted, if the answer to r was lost.
func (r Request) cancelLost(a Answer) (cancel Request, mayBeGranted bool) {
	switch isLost := a.failedSeq > 0 && !isAnswer(a.Err); {
	case !isLost:
		return Request{}, false
	case r.Lost > 0: // r came from cancelLost itself: the next call repeats it
		return r, true
	}
	cancel = r.cancel(0) // the script takes the time from its record
	cancel.Lost, cancel.LostSeq = a.failedIndex, a.failedSeq
	return cancel, grants(r.Op)
}

// Gathered returns how many bundles wait until the call that is under way has ended.
func (g *Group) Gathered() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.waiting)
}

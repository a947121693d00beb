package throttle

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A result is what a waiting call gets: the ticket of its claim, or an error. If it is neither, the claim
// has to join again.
type result struct {
	ticket *script.TakenTicket
	err    error
}

// A waiter is one call that waits in place.
type waiter struct {
	limiter *Limiter
	request Request // its Deadline is that of the call

	id        string      // of its claim; empty if it has none
	result    chan result // holds one
	operation *operation  // by which it joined last
	last      Decision    // the newest denial

	// Under the lock of the claims.
	inLine bool
	joins  int // how often it joined
}

const (
	minTakeInterval  = time.Millisecond
	maxTakeInterval  = time.Second            // keeps the claims in line
	slotTakeInterval = 100 * time.Millisecond // for slots that other processes release

	// claimsLostAfter is shorter than the time after which other processes remove claims for which
	// nobody takes.
	claimsLostAfter = 1500 * time.Millisecond
)

// claims are the tickets of the calls of this process that wait in place for the policies of one line. A
// timer takes for all of them.
type claims struct {
	limiter *Limiter
	line    string
	queue   string
	taker   *script.Taker

	mu       sync.Mutex
	answered time.Time   // when the last take was answered
	next     time.Time   // when to take; zero: nobody waits
	taking   bool        // else the timer is set, unless next is zero
	timer    *time.Timer // nil until the first claim joins
	waiting  map[string]*waiter
}

func newClaims(l *Limiter, line string) *claims {
	taker, queue := l.runner.NewClaims()
	return &claims{limiter: l, line: line, queue: queue, taker: taker, waiting: map[string]*waiter{}}
}

// add gives a call a claim.
func (c *claims) add(w *waiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w.id, w.result, w.inLine, w.joins = script.NewID(), make(chan result, 1), false, 0
	c.waiting[w.id] = w
}

func (c *claims) drop(w *waiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, w.id)
}

// joined notes that a claim is in line, and schedules a take for when it is expected to fit.
func (c *claims) joined(w *waiter, leases bool) {
	now, interval := time.Now(), min(w.last.RetryIn, maxTakeInterval)
	if leases {
		interval = min(interval, slotTakeInterval)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	w.inLine = true
	w.joins++
	if c.timer == nil {
		c.timer = time.AfterFunc(interval, c.take)
	}
	if c.next.IsZero() {
		c.next, c.answered = now.Add(interval), now
	}
	c.takeBy(now.Add(interval))
}

// released schedules a take at once, as this process gave capacity back.
func (c *claims) released() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.next.IsZero() {
		c.takeBy(time.Now())
	}
}

// takeBy schedules a take for a time at the latest. A take that is under way does so at its end.
func (c *claims) takeBy(at time.Time) {
	if at.Before(c.next) {
		c.next = at
	}
	if !c.taking {
		c.timer.Reset(time.Until(c.next))
	}
}

// take takes for the claims, and hands them their tickets, or the error.
func (c *claims) take() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiting) == 0 {
		c.next = time.Time{}
		return
	}
	inLine := maps.Clone(c.waiting)
	maps.DeleteFunc(inLine, func(_ string, w *waiter) bool { return !w.inLine })
	most := min(len(c.waiting), MaxTake)
	c.taking, c.next = true, time.Now().Add(maxTakeInterval)
	c.mu.Unlock()
	cp, err := c.limiter.findLine(c.line, true)
	var reply script.Taken
	next := maxTakeInterval
	if err == nil {
		q := script.TakeRequest{Claims: c.queue, Max: most}
		reply, next, err = c.limiter.take(context.Background(), cp, c.taker, q)
	}
	c.mu.Lock()
	c.taking = false
	// Claims join again that may have been removed.
	again := err != nil || reply.Next == 0 || time.Since(c.answered) > claimsLostAfter
	if err != nil || next < 0 {
		next = maxTakeInterval
	}
	if err == nil {
		c.answered = time.Now()
	}
	for _, t := range reply.Tickets {
		if w := c.waiting[t.ID]; w != nil {
			delete(c.waiting, t.ID)
			w.deliver(result{ticket: &t})
		} else {
			c.limiter.refundLater(c.line, t)
		}
	}
	for id, w := range inLine {
		if again && c.waiting[id] == w {
			w.deliver(result{err: err})
		}
	}
	c.takeBy(time.Now().Add(max(next, minTakeInterval)))
}

// deliver replaces a result that the call has not read. The lock of its claims is held.
func (w *waiter) deliver(r result) {
	w.inLine = false
	select {
	case <-w.result:
	default:
	}
	w.result <- r
}

// refundLater gives back, in the background, what a claim got for which nobody waits.
func (l *Limiter) refundLater(line string, t script.TakenTicket) {
	cp, err := l.findLine(line, true)
	if err != nil {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
		defer cancel()
		_ = l.Line(line).Refund(ctx, []TakenTicket{cp.taken(t)}) // or it runs out
	}()
}

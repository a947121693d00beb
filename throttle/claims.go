package throttle

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A waiter is one call that waits in place. Its claim is its ticket.
type waiter struct {
	claims *claims           // nil if it has none
	id     string            // of its claim
	joins  int               // how often the claim joined
	taken  chan *TakenTicket // holds one: the ticket of its claim, or nil if the claim has to join again
}

const (
	minTakeInterval  = time.Millisecond
	maxTakeInterval  = time.Second            // keeps the claims in line
	slotTakeInterval = 100 * time.Millisecond // for slots that other processes release

	// claimsLostAfter is shorter than the time after which other processes remove claims for which
	// nobody takes.
	claimsLostAfter = 1500 * time.Millisecond
)

// claims are the tickets of this process's calls that wait in place, in one line. A timer takes for all of them.
type claims struct {
	limiter *Limiter
	line    string
	taker   *script.Taker

	mu       sync.Mutex
	answered time.Time   // when the last take was answered
	next     time.Time   // when to take; zero: nobody waits
	taking   bool        // else the timer is set, unless next is zero
	timer    *time.Timer // nil until the first claim joins
	waiting  map[string]*waiter
}

// add returns a call's claim.
func (c *claims) add() *waiter {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := &waiter{claims: c, id: script.NewID(), taken: make(chan *TakenTicket, 1)}
	c.waiting[w.id] = w
	return w
}

// end ends the claim. A ticket that the call has not read is given back.
func (w *waiter) end() {
	if w.claims == nil {
		return
	}
	w.claims.mu.Lock()
	delete(w.claims.waiting, w.id) // first: it gets nothing afterwards
	w.claims.mu.Unlock()
	select {
	case ticket := <-w.taken:
		if ticket != nil {
			w.claims.limiter.refundLater(w.claims.line, *ticket)
		}
	default:
	}
}

// joined notes that a claim is in line, and schedules a take for when it is expected to fit.
func (c *claims) joined(fitsIn time.Duration, leases bool) {
	now, interval := time.Now(), min(fitsIn, maxTakeInterval)
	if leases {
		interval = min(interval, slotTakeInterval)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
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

// takeBy schedules a take for this time at the latest. A take that is under way sets the timer at its end.
func (c *claims) takeBy(at time.Time) {
	if at.Before(c.next) {
		c.next = at
	}
	if !c.taking {
		c.timer.Reset(time.Until(c.next))
	}
}

// take takes for the claims, and hands them their tickets. After an error they join again, which tells
// them what is wrong.
func (c *claims) take() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiting) == 0 {
		c.next = time.Time{}
		return
	}
	most := min(len(c.waiting), MaxTake)
	c.taking, c.next = true, time.Now().Add(maxTakeInterval)
	c.mu.Unlock()
	cp, err := c.limiter.policyOfLine(c.line, true)
	var taken Taken
	if err == nil {
		q := script.TakeRequest{Claims: c.taker.Claims, Max: most}
		taken, err = c.limiter.take(context.Background(), cp, c.taker, q)
	}
	c.mu.Lock()
	c.taking = false
	// Claims that Redis may have dropped join again. One that joins just now keeps its place.
	again := err != nil || taken.Next < 0 || time.Since(c.answered) > claimsLostAfter
	if err != nil || taken.Next < 0 {
		taken.Next = maxTakeInterval
	}
	if err == nil {
		c.answered = time.Now()
	}
	for _, t := range taken.Tickets {
		if w := c.waiting[t.ID]; w != nil {
			delete(c.waiting, t.ID)
			w.deliver(&t)
		} else {
			c.limiter.refundLater(c.line, t)
		}
	}
	if again {
		for _, w := range c.waiting {
			w.deliver(nil)
		}
	}
	c.takeBy(time.Now().Add(max(taken.Next, minTakeInterval)))
}

// deliver hands over a ticket in place of one that the call has not read. The lock of its claims is held.
func (w *waiter) deliver(ticket *TakenTicket) {
	select {
	case <-w.taken:
	default:
	}
	w.taken <- ticket
}

// refundLater gives back, in the background, the ticket of a claim that nobody waits for any more.
func (l *Limiter) refundLater(line string, t TakenTicket) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
		defer cancel()
		_ = l.Line(line).Refund(ctx, []TakenTicket{t}) // or it runs out
	}()
}

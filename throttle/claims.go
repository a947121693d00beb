package throttle

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

const (
	maxTakeInterval  = time.Second            // keeps the claims in line
	slotTakeInterval = 100 * time.Millisecond // for slots that other processes release

	// Other processes remove claims for which nobody has taken for 2 s, and takes are up to 1 s apart. A take that
	// ends this long after it was due may be too late.
	takenTooLate = 500 * time.Millisecond
)

// claims are the tickets of this process's calls that wait in place, in one line. A timer takes for all of them. It is
// idle while next is zero. Otherwise it is set, or takes while timer is nil.
type claims struct {
	line  *Line
	taker *script.Taker

	mu      sync.Mutex
	waiting map[string]waiter // by the claim's ID
	next    time.Time         // when to take; during a take, when to take after it
	timer   *time.Timer       // takes at that time; a take sets a new one at its end
}

// A waiter is one call that waits in place.
type waiter struct {
	request Request
	taken   chan TakenTicket // gets the ticket of its claim; if closed without one, the claim has to join again
}

// add lets a call wait for the ticket of its claim.
func (c *claims) add(id string, r Request) (taken <-chan TakenTicket) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting[id] = waiter{r, make(chan TakenTicket, 1)}
	return c.waiting[id].taken
}

// remove ends a call's wait. A ticket that the call has not read is given back.
func (c *claims) remove(id string, taken <-chan TakenTicket) {
	c.mu.Lock()
	c.end(id)
	c.mu.Unlock()
	if t, isUnread := <-taken; isUnread { // the channel is closed: this does not block
		go c.refund(t)
	}
}

// end closes the channel of a call that still waits. The lock is held.
func (c *claims) end(id string) {
	if w, ok := c.waiting[id]; ok {
		delete(c.waiting, id)
		close(w.taken)
	}
}

// joined notes that a claim is in line, and schedules a take for when it is expected to fit.
func (c *claims) joined(fitsIn time.Duration, leases bool) {
	c.mu.Lock()
	if c.next.IsZero() {
		c.next, c.timer = time.Now().Add(maxTakeInterval), time.AfterFunc(maxTakeInterval, c.take)
	}
	c.mu.Unlock()
	if leases {
		fitsIn = min(fitsIn, slotTakeInterval)
	}
	c.takeIn(fitsIn)
}

// takeIn makes the next take come within d, if a claim is in line. Whoever gives capacity back calls it with 0.
func (c *claims) takeIn(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := time.Now().Add(d); at.Before(c.next) {
		c.next = at
		if c.timer != nil && c.timer.Stop() { // else a take is under way, or begins now
			c.timer.Reset(d)
		}
	}
}

// take takes for the claims, and hands them their tickets. After an error they join again, and learn what is wrong.
func (c *claims) take() {
	c.mu.Lock()
	q := script.TakeRequest{Claims: c.taker.Claims, Max: min(len(c.waiting), MaxTake)}
	if q.Max == 0 {
		c.next = time.Time{}
		c.mu.Unlock()
		return
	}
	due := c.next
	c.next, c.timer = time.Now().Add(maxTakeInterval), nil
	c.mu.Unlock()
	taken, err := c.line.take(context.Background(), c.taker, q)
	c.mu.Lock()
	for _, t := range taken.Tickets {
		if w, ok := c.waiting[t.ID]; ok && c.line.Matches(t, w.request) {
			w.taken <- t
		} else {
			go c.refund(t)
		}
		c.end(t.ID)
	}
	mayBeLost := err != nil || taken.Next < 0 || time.Since(due) > takenTooLate
	if mayBeLost { // all join again. Those that are still in line keep their positions
		for id := range c.waiting {
			c.end(id)
		}
	}
	c.timer = time.AfterFunc(time.Until(c.next), c.take)
	c.mu.Unlock()
	if !mayBeLost {
		c.takeIn(max(taken.Next, time.Millisecond))
	}
}

// refund gives back a ticket that nobody waits for any more.
func (c *claims) refund(t TakenTicket) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	t.untold = true
	_ = c.line.Refund(ctx, []TakenTicket{t}) // after an error its units count until they expire
}

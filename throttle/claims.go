package throttle

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A claim is the ticket of one call that waits in place.
type claim struct {
	id     string
	result chan result // holds one

	// Under the lock of its claims.
	inLine bool
	joins  int // how often it joined
}

// A result is a claim's ticket, or an error. If it is neither, the claim has to join again.
type result struct {
	ticket *script.TakenTicket
	err    error
}

const (
	minTakeInterval  = time.Millisecond
	maxTakeInterval  = time.Second            // keeps the claims in line
	slotTakeInterval = 100 * time.Millisecond // for slots that other processes release

	// claimsLostAfter is shorter than the time after which other processes remove claims for which
	// nobody takes.
	claimsLostAfter = 1500 * time.Millisecond
)

// claims are the claims of this process on the policies of one line. While there are any, one
// goroutine takes for all of them.
type claims struct {
	queue string
	taker *script.Taker
	woken chan struct{} // holds one

	mu       sync.Mutex
	answered time.Time // when the last take was answered
	running  bool      // the goroutine
	next     time.Time // when it takes
	waiting  map[string]*claim
}

func newClaims(r *script.Runner) *claims {
	taker, queue := r.NewClaims()
	return &claims{queue: queue, taker: taker, woken: make(chan struct{}, 1), waiting: map[string]*claim{}}
}

func (c *claims) add() *claim {
	added := &claim{id: script.NewID(), result: make(chan result, 1)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting[added.id] = added
	return added
}

func (c *claims) drop(dropped *claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, dropped.id)
	if c.running && len(c.waiting) == 0 {
		c.wake() // the goroutine ends
	}
}

// joined notes that a claim is in line, and schedules a take for when it is expected to fit.
func (c *claims) joined(of *claim, l *Limiter, cp *compiledPolicy, d Decision) {
	interval := min(d.RetryIn, maxTakeInterval)
	if cp.leases {
		interval = min(interval, slotTakeInterval)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	of.inLine = true
	of.joins++
	at := time.Now().Add(interval)
	if !c.running {
		c.running, c.next, c.answered = true, at, time.Now()
		go c.run(l, cp.line)
		return
	}
	if at.Before(c.next) {
		c.next = at
		c.wake()
	}
}

// released schedules a take at once, as this process gave capacity back.
func (c *claims) released() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running {
		c.next = time.Now()
		c.wake()
	}
}

func (c *claims) wake() {
	select {
	case c.woken <- struct{}{}:
	default:
	}
}

// run takes for the claims until there are none.
func (c *claims) run(l *Limiter, line string) {
	for {
		c.mu.Lock()
		n, pause := len(c.waiting), time.Until(c.next)
		if n == 0 {
			c.running = false
			c.mu.Unlock()
			return
		}
		if pause <= 0 {
			c.next = time.Now().Add(maxTakeInterval)
		}
		c.mu.Unlock()
		if pause <= 0 {
			c.take(l, line, min(n, MaxTake))
			continue
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-c.woken:
			timer.Stop()
		}
	}
}

// take takes once, and hands the tickets, or the error, to the claims.
func (c *claims) take(l *Limiter, line string, maxTickets int) {
	c.mu.Lock()
	var inLine []*claim
	for _, waiting := range c.waiting {
		if waiting.inLine {
			inLine = append(inLine, waiting)
		}
	}
	c.mu.Unlock()
	cp, err := l.findLine(line, true)
	var reply script.Taken
	var paused time.Duration
	if err == nil {
		if paused = l.paused(cp); paused > 0 {
			maxTickets = 0
		}
		ctx := context.Background()
		if reply, err = c.taker.Take(ctx, cp.script, script.TakeRequest{Claims: c.queue, Max: maxTickets}); err != nil {
			err = classify(ctx, cp.Name, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		for _, waiting := range inLine {
			waiting.deliver(result{err: err})
		}
		return
	}
	lost := reply.Next == 0 || time.Since(c.answered) > claimsLostAfter
	c.answered = time.Now()
	var abandoned []script.TakenTicket
	for _, t := range reply.Tickets {
		if owner := c.waiting[t.ID]; owner != nil {
			delete(c.waiting, t.ID)
			owner.deliver(result{ticket: &t})
		} else {
			abandoned = append(abandoned, t)
		}
	}
	l.refundLater(line, abandoned...)
	if lost {
		for _, waiting := range inLine {
			if c.waiting[waiting.id] == waiting {
				waiting.deliver(result{})
			}
		}
	}
	if reply.Next > 0 {
		if at := c.answered.Add(max(micros(reply.Next-reply.At), minTakeInterval, min(paused, maxTakeInterval))); at.Before(c.next) {
			c.next = at
		}
	}
}

// deliver replaces a result that the claim has not read. The lock of its claims is held.
func (c *claim) deliver(r result) {
	c.inLine = false
	select {
	case <-c.result:
	default:
	}
	c.result <- r
}

package throttle

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// A claim is the ticket of one call that waits in place.
type claim struct {
	id  string
	got chan outcome // holds one

	// Under the lock of its claims.
	inLine bool
	asked  int // how often it joined
}

// An outcome is what became of a claim: a ticket, or an error, or neither if it has to join anew.
type outcome struct {
	ticket *script.TakenTicket
	err    error
}

const (
	askAtLeast  = time.Second            // by which claims are kept
	askForSlots = 100 * time.Millisecond // between looks for slots of others
	askSoonest  = time.Millisecond

	// claimsAsLost is the time without an answer after which others may have removed claims.
	claimsAsLost = 1500 * time.Millisecond
)

// The claims of one policy name in this process. One goroutine asks for all of them, while there are
// any.
type claims struct {
	queue string
	taker *script.Taker
	woken chan struct{} // holds one

	mu       sync.Mutex
	answered time.Time // the last take
	asking   bool      // the goroutine runs
	next     time.Time // when it asks
	waiting  map[string]*claim
}

func newClaims(r *script.Runner) *claims {
	taker, queue := r.NewClaims()
	return &claims{queue: queue, taker: taker, woken: make(chan struct{}, 1), waiting: map[string]*claim{}}
}

func (c *claims) add() *claim {
	one := &claim{id: script.NewID(), got: make(chan outcome, 1)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting[one.id] = one
	return one
}

func (c *claims) drop(one *claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, one.id)
	if c.asking && len(c.waiting) == 0 {
		c.wake() // it ends
	}
}

// joined says that a claim is in line, and is asked for when it is expected to fit.
func (c *claims) joined(one *claim, l *Limiter, cp *compiledPolicy, d Decision) {
	soon := min(d.RetryIn, askAtLeast)
	if cp.leases {
		soon = min(soon, askForSlots)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	one.inLine = true
	one.asked++
	at := time.Now().Add(soon)
	if !c.asking {
		c.asking, c.next, c.answered = true, at, time.Now()
		go c.ask(l, cp.Name)
		return
	}
	if at.Before(c.next) {
		c.next = at
		c.wake()
	}
}

// freed has claims asked for at once: this process gave something back.
func (c *claims) freed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asking {
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

// ask asks for the claims until there are none.
func (c *claims) ask(l *Limiter, policy string) {
	for {
		c.mu.Lock()
		n, pause := len(c.waiting), time.Until(c.next)
		if n == 0 {
			c.asking = false
			c.mu.Unlock()
			return
		}
		if pause <= 0 {
			c.next = time.Now().Add(askAtLeast)
		}
		c.mu.Unlock()
		if pause <= 0 {
			c.take(l, policy, min(n, MaxTake))
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

// take takes once, and tells those whose claims it took, or that it cannot.
func (c *claims) take(l *Limiter, policy string, most int) {
	c.mu.Lock()
	lost := time.Since(c.answered) > claimsAsLost
	var inLine []*claim
	for _, one := range c.waiting {
		if one.inLine {
			inLine = append(inLine, one)
		}
	}
	c.mu.Unlock()
	cp, err := l.find(policy, true)
	var reply script.Taken
	if err == nil {
		ctx := context.Background()
		if reply, err = c.taker.Take(ctx, cp.script, script.TakeRequest{Claims: c.queue, Max: most}); err != nil {
			err = classify(ctx, policy, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		for _, one := range inLine {
			c.tell(one, outcome{err: err})
		}
		return
	}
	c.answered = time.Now()
	var nobodys []script.TakenTicket
	for _, t := range reply.Tickets {
		if one := c.waiting[t.ID]; one != nil {
			delete(c.waiting, t.ID)
			c.tell(one, outcome{ticket: &t})
		} else {
			nobodys = append(nobodys, t)
		}
	}
	l.giveBackLater(policy, nobodys...)
	if lost = lost || reply.Next == 0; lost {
		for _, one := range inLine {
			if c.waiting[one.id] == one {
				c.tell(one, outcome{})
			}
		}
	}
	if reply.Next > 0 {
		if at := c.answered.Add(max(micros(reply.Next-reply.At), askSoonest)); at.Before(c.next) {
			c.next = at
		}
	}
}

// tell tells a claim once what became of it, until it joins anew. The lock is held.
func (c *claims) tell(one *claim, what outcome) {
	one.inLine = false
	select {
	case <-one.got: // it has not read that it was to join anew, and may read it just now
	default:
	}
	one.got <- what
}

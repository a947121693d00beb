package linetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A bustle is all that callers of several processes do at once at one policy.
type bustle struct {
	*testing.T
	p        throttle.Policy
	limiters []*throttle.Limiter
	ends     time.Time
	faults   bool
	clock    *limitertest.Clock // nil: that of Redis

	mu             sync.Mutex
	grants         map[string][]limitertest.Grant // by tenant, what was kept
	kept           int64                          // units, as the ledger counts them
	errors         int64                          // calls that may have taken something all the same
	longest        time.Duration                  // that somebody waited without a deadline
	held, mostHeld int64                          // slots
	waits          int
	refused        int
}

func (b *bustle) limiter(client *redis.Client) *throttle.Limiter {
	if b.clock != nil {
		return limitertest.NewBy(b, client, b.clock, b.p)
	}
	return limitertest.New(b.T, client, b.p)
}

// tick moves the clock on, and sets it now and then, forward or back.
func (b *bustle) tick(stop <-chan struct{}) {
	last := time.Now()
	for {
		select {
		case <-stop:
			return
		case <-time.After(ms):
		}
		now, step := time.Now(), time.Duration(0)
		if now.Before(b.ends) {
			switch rand.N(200) {
			case 0:
				step = rand.N(s)
			case 1:
				step = -rand.N(300 * ms)
			}
		}
		b.clock.US.Add((now.Sub(last) + step).Microseconds())
		last = now
	}
}

func (b *bustle) anyLimiter() *throttle.Limiter { return b.limiters[rand.N(len(b.limiters))] }

func (b *bustle) request() throttle.Request {
	return throttle.Request{
		Policy: "p", Tenant: []string{"a", "b", "c"}[rand.N(3)], Attributes: map[string]string{"region": []string{"n", "s"}[rand.N(2)]},
		Cost: map[string]int64{throttle.Requests: []int64{1, 1, 1, 2, 3}[rand.N(5)]},
	}
}

func (b *bustle) failed(err error) bool {
	if err == nil {
		return false
	}
	if b.faults && errors.Is(err, throttle.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		b.mu.Lock()
		b.errors++
		b.mu.Unlock()
		return true
	}
	b.Error(err)
	return true
}

// use does with a reservation what handlers do, and notes what stays of it.
func (b *bustle) use(r throttle.Reservation) {
	ctx := context.Background()
	units := r.Cost[throttle.Requests]
	slots := units
	b.mu.Lock()
	b.held += slots
	b.mostHeld = max(b.mostHeld, b.held)
	b.mu.Unlock()
	time.Sleep(rand.N(3 * ms))
	free := sync.OnceFunc(func() {
		b.mu.Lock()
		b.held -= slots
		b.mu.Unlock()
	})
	switch rand.N(5) {
	case 0:
		free()
		if _, err := r.Cancel(ctx); !b.failed(err) {
			return
		}
	case 1:
		if settled, err := r.Settle(ctx, map[string]int64{throttle.Requests: 0}); !b.failed(err) {
			units, r = 0, settled
		}
	case 2:
		_, hold := r.Hold(ctx)
		time.Sleep(rand.N(20 * ms))
		free()
		b.failed(hold.Release(ctx))
	}
	free()
	b.failed(r.Release(ctx))
	b.mu.Lock()
	defer b.mu.Unlock()
	if units > 0 {
		b.kept += units
		b.grants[r.Tenant] = append(b.grants[r.Tenant], limitertest.Grant{At: r.At.UnixMicro(), Units: units})
	}
}

// wait waits in place, in one of several ways.
func (b *bustle) wait() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	patient := false
	var d throttle.Decision
	var err error
	start := time.Now()
	switch rand.N(5) {
	case 0:
		timeout, stop := context.WithTimeout(ctx, rand.N(200*ms))
		defer stop()
		d, err = b.anyLimiter().Wait(timeout, b.request())
	case 1:
		time.AfterFunc(rand.N(200*ms), cancel)
		d, err = b.anyLimiter().Wait(ctx, b.request())
	case 2:
		r := b.request()
		r.MaxWait = 1 + rand.N(200*ms)
		d, err = b.anyLimiter().Wait(ctx, r)
	default:
		patient = true
		d, err = b.anyLimiter().Wait(ctx, b.request())
	}
	took := time.Since(start)
	var denied *throttle.DeniedError
	b.mu.Lock()
	if b.waits++; patient {
		b.longest = max(b.longest, took)
	}
	b.mu.Unlock()
	switch {
	case err == nil:
		b.use(d.Reservation)
	case errors.As(err, &denied) && !patient:
		b.mu.Lock()
		b.refused++
		b.mu.Unlock()
	default:
		b.failed(err)
	}
}

// job joins the line as a task does, or reserves at once.
func (b *bustle) job(i int) {
	r := b.request()
	id := limitertest.Ticket(fmt.Sprint("job", i))
	l := b.anyLimiter()
	switch rand.N(4) {
	case 0:
		if rand.N(2) == 0 {
			r.Ticket = id
		}
		d, err := l.Reserve(context.Background(), r)
		if !b.failed(err) && d.Granted {
			b.use(d.Reservation)
		}
	default:
		r.Ticket = id
		_, err := l.Line("p").Join(context.Background(), []throttle.Request{r})
		b.failed(err)
		if rand.N(10) == 0 {
			time.Sleep(rand.N(20 * ms))
			b.failed(l.Line("p").Leave(context.Background(), id))
		}
	}
}

// serve takes jobs until nobody waits and all have come.
func (b *bustle) serve(l *throttle.Limiter, come <-chan struct{}, group *sync.WaitGroup) {
	line := l.Line("p")
	for {
		taken, err := line.Take(context.Background(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: 1 + rand.N(8)})
		if err != nil {
			b.failed(err)
			time.Sleep(10 * ms)
			continue
		}
		for _, ticket := range taken.Tickets {
			group.Go(func() { b.taken(line, ticket) })
		}
		if taken.Next < 0 {
			select {
			case <-come:
				b.failed(line.Acknowledge(context.Background()))
				return
			default:
			}
		}
		time.Sleep(min(max(taken.Next, ms), 20*ms))
	}
}

func (b *bustle) taken(line *throttle.Line, ticket throttle.TakenTicket) {
	ctx := context.Background()
	switch rand.N(8) {
	case 0:
		b.failed(line.PutBack(ctx, []throttle.TakenTicket{ticket}))
	case 1:
		b.failed(line.Refund(ctx, []throttle.TakenTicket{ticket}))
	case 2:
		r := ticket.Decision.Reservation.Request
		d, err := line.ReserveAgain(ctx, ticket, r)
		if !b.failed(err) && d.Granted {
			b.use(d.Reservation)
		}
	default:
		b.use(ticket.Decision.Reservation)
	}
}

// drain takes what was put back in the end.
func (b *bustle) drain(line *throttle.Line) {
	for range 10_000 {
		taken, err := line.Take(context.Background(), throttle.TakeOptions{Queues: map[string]int{"q": 1}, Max: throttle.MaxTake})
		if b.failed(err) {
			continue
		}
		for _, ticket := range taken.Tickets {
			b.use(ticket.Decision.Reservation)
		}
		if taken.Next < 0 {
			b.failed(line.Acknowledge(context.Background()))
			return
		}
		time.Sleep(ms)
	}
	b.Error("some are never taken")
}

func (b *bustle) change() {
	for time.Now().Before(b.ends) {
		time.Sleep(rand.N(100 * ms))
		p := b.p
		p.Windows = append([]throttle.Window{}, p.Windows...)
		for i := range p.Windows {
			if p.Windows[i].Name != "ledger" && rand.N(3) == 0 {
				p.Windows[i].Limit = (p.Windows[i].Limit + 1) / 2
			}
		}
		p.Tenants = map[string]throttle.Tenant{"a": {Weight: 1 + float64(rand.N(4))}}
		if err := b.anyLimiter().SetPolicies([]throttle.Policy{p}); err != nil {
			b.Error(err)
		}
	}
	for _, l := range b.limiters {
		if err := l.SetPolicies([]throttle.Policy{b.p}); err != nil {
			b.Error(err)
		}
	}
}

// upstream pauses and resumes.
func (b *bustle) upstream() {
	for time.Now().Before(b.ends) {
		time.Sleep(rand.N(200 * ms))
		r := b.request()
		if rand.N(2) == 0 {
			b.failed(b.anyLimiter().Resume(context.Background(), r))
		} else {
			_, err := b.anyLimiter().Attach(throttle.Reservation{Request: r}).Pause(context.Background(), rand.N(50*ms), "")
			b.failed(err)
		}
	}
}

// cuts loses replies, and has scripts forgotten.
func (b *bustle) cuts(proxies []*limitertest.Proxy, client *redis.Client) {
	for time.Now().Before(b.ends) {
		time.Sleep(rand.N(100 * ms))
		if rand.N(3) == 0 {
			client.ScriptFlush(context.Background())
		} else if proxies != nil {
			proxies[rand.N(len(proxies))].Lose.Store(1)
		}
	}
}

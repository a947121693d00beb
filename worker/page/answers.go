package page

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
)

const (
	freshFor     = time.Second                       // how long an answer is shown to others, too
	askTimeout   = 5 * time.Second                   // of one question to Redis
	viewWithin   = 1500 * time.Millisecond           // how long a page waits for all its answers
	maxAnswers   = 1000                              // kept of one Redis
	changeWithin = viewWithin + 400*time.Millisecond // for an action, and the page after it
)

// answers caches what a Redis answered. However many browsers follow the page, each question is asked at most once a
// second, and not while an answer is under way: callers wait for that, and get the previous one if it comes too late.
type answers struct {
	mu       sync.Mutex
	byKey    map[string]*answer
	failing  time.Time // since when nothing is answered; zero while Redis answers
	lastGood time.Time // when Redis answered last
}

// An answer to one question may be under way. Values are nil if there are none.
type answer struct {
	asked    time.Time     // zero once it is forgotten
	previous any           // the value of the answer before this one
	done     chan struct{} // closed when value and err are set
	value    any           // previous, if err is set
	err      error
}

var errSilent = errors.New("redis does not answer")

// isSilent reports whether a call failed because Redis did not answer, cannot serve now, or refuses its user.
func isSilent(err error) bool {
	return errors.Is(err, throttle.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, io.EOF) || errors.As(err, new(net.Error))
}

// cached returns the answer to the question with a key, which it asks unless an answer is fresh or under way. With an
// error it returns the previous answer.
func cached[T any](ctx context.Context, cache *answers, key string, ask func(context.Context) (T, error)) (T, error) {
	begun := time.Now()
	a, mustAsk := cache.lookUp(key)
	if mustAsk {
		go func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout) // others wait for it too
			defer cancel()
			value, err := ask(ctx)
			cache.put(a, value, err)
		}()
	}
	select {
	case <-a.done:
		value, _ := a.value.(T)
		return value, a.err
	case <-ctx.Done():
		hadTime := time.Since(begun) > viewWithin/2 // a question late in a view gets little, which tells nothing of Redis
		if hadTime && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			cache.fails()
		}
		value, _ := a.previous.(T)
		return value, errSilent
	}
}

// lookUp returns the answer with a key, and whether the caller must ask for it: then it is new.
func (c *answers) lookUp(key string) (a *answer, mustAsk bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	last := c.byKey[key]
	if last != nil && now.Sub(last.asked) < freshFor {
		return last, false
	}
	a = &answer{asked: now, done: make(chan struct{})}
	if last != nil {
		select {
		case <-last.done:
			a.previous = last.value
		default:
			return last, false // it is still under way
		}
	}
	if c.byKey == nil {
		c.byKey = map[string]*answer{}
	}
	for anyKey := range c.byKey {
		if len(c.byKey) < maxAnswers {
			break
		}
		delete(c.byKey, anyKey)
	}
	c.byKey[key] = a
	return a, true
}

// put completes an answer.
func (c *answers) put(a *answer, value any, err error) {
	if err != nil {
		if isSilent(err) {
			c.fails()
		}
		value = a.previous
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.failing, c.lastGood = time.Time{}, time.Now()
	}
	a.value, a.err = value, err
	close(a.done)
}

func (c *answers) fails() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failing.IsZero() {
		c.failing = time.Now()
	}
}

// outage returns since when Redis does not answer, zero if it does, and when it answered last.
func (c *answers) outage() (since, lastGood time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failing, c.lastGood
}

// forget makes later callers ask anew, after a change. A question under way is asked again once it is answered.
func (c *answers) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.byKey {
		a.asked = time.Time{}
	}
}

// state asks for the state of a policy. If like is not empty, only tenants are in it whose names contain that.
func (p *Page) state(ctx context.Context, q inspect.Query, like string) (inspect.PolicyState, error) {
	key := strings.Join([]string{"state", q.Policy, q.After, q.Tenant, like}, "\x00")
	return cached(ctx, &p.limiterAnswers, key, func(ctx context.Context) (inspect.PolicyState, error) {
		if like == "" {
			return inspect.Of(p.config.Limiter).State(ctx, q)
		}
		return p.searchTenants(ctx, q, like)
	})
}

// searchTenants reads the tenants of a policy from q.After on, until it has found a list of them, or searched enough.
func (p *Page) searchTenants(ctx context.Context, q inspect.Query, like string) (inspect.PolicyState, error) {
	q.Limit = 0 // pages as large as can be
	var found []inspect.State
	for searched := 0; ; {
		state, err := inspect.Of(p.config.Limiter).State(ctx, q)
		if err != nil {
			return state, err
		}
		searched += len(state.Tenants)
		for _, t := range state.Tenants {
			if strings.Contains(t.Tenant, like) {
				found = append(found, t)
			}
		}
		if q.After = state.Next; q.After == "" || len(found) >= tenantsAtOnce || searched >= tenantsSearched {
			state.Tenants = found
			return state, nil
		}
	}
}

// inForce asks for what operators have put in force, if there is a store of it.
func (p *Page) inForce(ctx context.Context) controlled {
	if p.config.Control == nil {
		return controlled{}
	}
	got, _ := cached(ctx, &p.limiterAnswers, "control", func(ctx context.Context) (c controlled, err error) {
		if c.InForce, err = p.config.Control.State(ctx); err == nil {
			c.Changes, err = p.config.Control.Changes(ctx, changesAtOnce)
		}
		if err == nil {
			c.processes, err = p.config.Control.Processes(ctx)
		}
		return c, err
	})
	return got
}

// workers asks for the servers of asynq: nil without an Inspector.
func (p *Page) workers(ctx context.Context) (*workers, error) {
	if p.config.Inspector == nil {
		return nil, nil
	}
	return cached(ctx, &p.asynqAnswers, "workers", func(context.Context) (*workers, error) {
		servers, err := p.config.Inspector.Servers()
		all := &workers{Servers: int64(len(servers))}
		for _, s := range servers {
			all.Slots, all.Busy = all.Slots+int64(s.Concurrency), all.Busy+int64(len(s.ActiveWorkers))
		}
		return all, err
	})
}

// isPaused reports whether asynq's tools have paused a queue: no server takes from it.
func (p *Page) isPaused(ctx context.Context, queue string) bool {
	if p.config.Inspector == nil {
		return false
	}
	info, err := cached(ctx, &p.asynqAnswers, "paused\x00"+queue, func(context.Context) (*asynq.QueueInfo, error) {
		return p.config.Inspector.GetQueueInfo(queue)
	})
	return err == nil && info.Paused
}

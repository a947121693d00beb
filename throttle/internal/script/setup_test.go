package script

import (
	"cmp"
	"context"
	"strings"
	"testing"
	"testing/synctest"
)

// A fakeRedis decides as its answer says, one call at a time.
type fakeRedis struct {
	t      *testing.T
	calls  []fakeCall
	answer func(fakeCall) ([]Answer, error) // instead of granting all
	gate   chan struct{}                    // if not nil, each call waits for a value
	under  int                              // calls under way
}

type fakeCall struct {
	ctx      context.Context
	policy   *Policy
	seq      int64
	requests []Request
}

func (c fakeCall) ids() string {
	var ids []string
	for _, r := range c.requests {
		id := r.ID
		if r.Op != Reserve {
			id = r.Op + " " + id
		}
		ids = append(ids, id)
	}
	return strings.Join(ids, ",")
}

func (f *fakeRedis) decide(ctx context.Context, p *Policy, seq int64, requests []Request, _ []any) ([]Answer, error) {
	c := fakeCall{ctx, p, seq, requests}
	if f.under++; f.under > 1 {
		f.t.Error("two calls are under way at once")
	}
	defer func() { f.under-- }()
	f.calls = append(f.calls, c)
	if f.gate != nil {
		select {
		case <-f.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if f.answer != nil {
		return f.answer(c)
	}
	return f.grant(c), nil
}

// grant grants all, the first at 1, the second at 2.
func (f *fakeRedis) grant(c fakeCall) []Answer {
	var answers []Answer
	for i := range c.requests {
		answers = append(answers, Answer{Status: Granted, At: int64(i + 1)})
	}
	return answers
}

func (f *fakeRedis) log() (log []string) {
	for _, c := range f.calls {
		log = append(log, c.ids())
	}
	return log
}

func reserveAs(id string) Request {
	return Request{Op: Reserve, ID: id, Keys: []string{"w:" + id}, Cost: "requests=1"}
}

// inBubble runs a test on a group whose calls wait for the gate.
func inBubble(t *testing.T, test func(t *testing.T, f *fakeRedis, g *Group)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{t: t, gate: make(chan struct{})}
		test(t, f, &Group{decide: f.decide})
	})
}

// A caller asks in a goroutine of its own.
type caller struct {
	answers []Answer
	err     error
	done    bool
	giveUp  context.CancelFunc
}

func askIn(t *testing.T, g *Group, p *Policy, requests ...Request) *caller {
	ctx, cancel := context.WithCancel(t.Context())
	c := &caller{giveUp: cancel}
	go func() {
		c.answers, c.err = g.Do(ctx, p, requests...)
		for _, a := range c.answers {
			c.err = cmp.Or(c.err, a.Err)
		}
		c.done = true
	}()
	synctest.Wait()
	return c
}

func (f *fakeRedis) open() {
	f.gate <- struct{}{}
	synctest.Wait()
}

package script

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestRequestsDuringACallAreSentTogether(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
		p := &Policy{}
		type key struct{}
		alone := make(chan struct{})
		go func() {
			defer close(alone)
			_, err := g.Do(context.WithValue(t.Context(), key{}, "mine"), p, reserveAs("first"))
			expect.That(t, err == nil, err)
		}()
		synctest.Wait()
		var callers []*caller
		for i := range 150 {
			callers = append(callers, askIn(t, g, p, reserveAs(fmt.Sprint(i))))
		}
		expect.Require(t, len(f.calls) == 1 && f.calls[0].ctx.Value(key{}) == "mine", len(f.calls), "calls")
		for range 4 {
			f.open()
		}
		<-alone
		want, at := []int{1, 64, 64, 22}, 0
		for i, c := range f.calls {
			expect.That(t, len(c.requests) == want[i] && c.seq == int64(i+1),
				"call", i, len(c.requests), "requests, sequence number", c.seq)
			if i == 0 {
				continue
			}
			for j, r := range c.requests {
				expect.Equal(t, r.ID, fmt.Sprint(at), "call", i, "request", j)
				got := callers[at]
				expect.That(t, got.done && got.err == nil && got.answers[0].At == int64(j+1), "caller", at, got.answers, got.err)
				at++
			}
		}
		go func() { f.gate <- struct{}{} }()
		_, err := g.Do(t.Context(), p, reserveAs("last"))
		expect.That(t, err == nil && len(f.calls) == 5, "after all that", len(f.calls), "calls", err)
	})
}

func TestManyRequestsOfOneCaller(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
		var requests []Request
		for i := range 130 {
			requests = append(requests, reserveAs(fmt.Sprint(i)))
		}
		p := &Policy{}
		many, few := askIn(t, g, p, requests...), askIn(t, g, p, requests[:3]...)
		for range 3 {
			f.open()
		}
		expect.That(t, many.done && many.err == nil && len(many.answers) == 130 && many.answers[129].At == 2, many.answers, many.err)
		expect.That(t, few.done && few.answers[2].At == 5, few.answers)
		n := len(f.calls)
		expect.That(t, n == 3 && len(f.calls[2].requests) == 5, n, "calls")
		answers, err := g.Do(t.Context(), p)
		expect.That(t, len(answers) == 0 && err == nil && len(f.calls) == 3, "nothing asked", answers, err)
	})
}

func TestACallerThatGaveUpIsNotInTheGroup(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
		p := &Policy{}
		first, second, third := askIn(t, g, p, reserveAs("a")), askIn(t, g, p, reserveAs("b")), askIn(t, g, p, reserveAs("c"))
		second.giveUp()
		synctest.Wait()
		expect.That(t, second.done && errors.Is(second.err, context.Canceled), "the caller that gave up", second.err)
		f.open()
		f.open()
		got := f.log()
		expect.That(t, slices.Equal(got, []string{"a", "c"}) && first.done && third.done, "calls", got)
		ended, end := context.WithCancel(t.Context())
		end()
		_, err := g.Do(ended, p, reserveAs("d"))
		expect.That(t, errors.Is(err, context.Canceled) && len(f.calls) == 2, err, len(f.calls), "calls")
	})
}

func TestAGrantToACallerThatGaveUpIsCancelled(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
		p := &Policy{}
		askIn(t, g, p, reserveAs("a"))
		var gone []*caller
		for _, r := range []Request{reserveAs("granted"), reserveAs("granted too"), reserveAs("denied"), {Op: Join, ID: "join"}, {Op: Exempt, ID: "exempt"}, {Op: Observe, ID: "observed"}} {
			gone = append(gone, askIn(t, g, p, r))
		}
		stays := askIn(t, g, p, reserveAs("stays"))
		statuses := map[string]string{"granted": Granted, "granted too": Granted, "denied": Denied, "join": Joined, "exempt": Granted, "observed": Granted}
		f.answer = func(c fakeCall) ([]Answer, error) {
			answers := f.grant(c)
			for i, r := range c.requests {
				if status, ok := statuses[r.ID]; ok && r.Op != Cancel {
					answers[i].Status = status
				}
			}
			return answers, nil
		}
		f.open() // and the call is under way
		for _, c := range gone {
			c.giveUp()
		}
		synctest.Wait()
		f.open() // they were granted, and it is cancelled
		expect.That(t, stays.done && stays.err == nil && stays.answers[0].At == 7, "the caller that stayed", stays.answers, stays.err)
		next := askIn(t, g, p, reserveAs("next"))
		f.open()
		f.open()
		got := f.log()
		expect.Require(t, len(got) == 4 &&
			got[2] == "cancel granted,cancel granted too,cancel exempt,cancel observed" && next.done,
			"calls", got)
		undo := f.calls[2].requests[1]
		expect.That(t, undo.At == 2 && slices.Equal(undo.Keys, []string{"w:granted too"}) &&
			undo.Cost == "requests=1" && undo.LinePart == nil && undo.Ticket == "", "cancelled by", undo)
		for _, c := range gone {
			expect.That(t, c.done && errors.Is(c.err, context.Canceled) && c.answers == nil,
				"the caller that gave up", c.answers, c.err)
		}
	})
}

func TestACallEndsWhenAllItsCallersGiveUp(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
		p := &Policy{}
		askIn(t, g, p, reserveAs("a"))
		second, third := askIn(t, g, p, reserveAs("b")), askIn(t, g, p, reserveAs("c"), reserveAs("d"))
		f.open()
		second.giveUp()
		synctest.Wait()
		expect.Equal(t, f.calls[1].ctx.Err(), nil, "one of two gave up, and the call ended")
		third.giveUp()
		synctest.Wait()
		expect.That(t, f.calls[1].ctx.Err() != nil && third.done, "all gave up, and the call goes on")
		fourth := askIn(t, g, p, reserveAs("e"))
		f.open()
		expect.That(t, fourth.done && fourth.err == nil, "the next caller", fourth.err)
	})
}

func TestACallIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
		p := &Policy{}
		askIn(t, g, p, reserveAs("a"))
		c := askIn(t, g, p, reserveAs("b"))
		f.open()
		begin := time.Now()
		time.Sleep(callTimeout)
		synctest.Wait()
		isOwn := errors.Is(c.err, context.DeadlineExceeded) || errors.Is(c.err, context.Canceled)
		expect.That(t, c.done && c.err != nil && !isOwn, c.err, "the caller's own context has not ended after", time.Since(begin))
	})
}

// A replyError is what go-redis returns of an error reply.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

func TestAGroupWhoseScriptFailsIsRepeatedOneByOne(t *testing.T) {
	scriptFails := replyError("ERR Error running script: nil value")
	for name, tc := range map[string]struct {
		err  error
		want string // the calls
	}{
		"a script":  {scriptFails, "a b,c,d b c d"},
		"a network": {errors.New("connection refused"), "a b,c,d"},
		"memory":    {replyError("OOM command not allowed when used memory > 'maxmemory'. script: 1"), "a b,c,d"},
		"memory, of Redis 6": {replyError("ERR Error running script (call to f_2bbe): @user_script:556: " +
			"@user_script: 556: -OOM command not allowed when used memory > 'maxmemory'."), "a b,c,d"},
		"a reply": {&ReplyError{"shape"}, "a b,c,d"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
				p := &Policy{}
				askIn(t, g, p, reserveAs("a"))
				callers := []*caller{askIn(t, g, p, reserveAs("b")), askIn(t, g, p, reserveAs("c")), askIn(t, g, p, reserveAs("d"))}
				f.answer = func(c fakeCall) ([]Answer, error) {
					if strings.Contains(c.ids(), "c") {
						return nil, tc.err
					}
					return f.grant(c), nil
				}
				close(f.gate)
				synctest.Wait()
				got := strings.Join(f.log(), " ")
				expect.Require(t, got == tc.want, "calls", got, "want", tc.want)
				alone := strings.HasSuffix(tc.want, " d")
				for i, c := range callers {
					fails := !alone || i == 1
					expect.That(t, c.done && fails == (c.err != nil) &&
						(!fails || errors.Is(c.err, tc.err)) && (fails || c.answers[0].Status == Granted),
						"caller", i, c.answers, c.err)
				}
				for i, c := range f.calls {
					expect.Equal(t, c.seq, int64(i+1), "call", i, "has the sequence number")
				}
			})
		})
	}
}

func TestAGroupIsOfOneCompiledPolicy(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
		before, after := &Policy{}, &Policy{}
		askIn(t, g, before, reserveAs("a"))
		for _, id := range []string{"b1", "c2", "d1", "e2"} {
			p := before
			if id[1] == '2' {
				p = after
			}
			askIn(t, g, p, reserveAs(id))
		}
		close(f.gate)
		synctest.Wait()
		got := f.log()
		expect.That(t, slices.Equal(got, []string{"a", "b1,d1", "c2,e2"}) && f.calls[1].policy == before &&
			f.calls[2].policy == after, "calls", got)
	})
}

// Calls at random: every caller is answered once, with the answer to its own request.
func TestGroupsUnderRace(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	g := &Group{decide: func(_ context.Context, _ *Policy, _ int64, requests []Request, _ []any) ([]Answer, error) {
		mu.Lock()
		defer mu.Unlock()
		var answers []Answer
		for _, r := range requests {
			seen[r.Op+r.ID]++
			answers = append(answers, Answer{Status: Granted, At: r.At})
		}
		return answers, nil
	}}
	policies := []*Policy{{}, {}}
	var group sync.WaitGroup
	for i := range 32 {
		group.Go(func() {
			for j := range 200 {
				ctx, cancel := t.Context(), context.CancelFunc(func() {})
				if j%7 == 0 {
					ctx, cancel = context.WithTimeout(ctx, time.Duration(j)*time.Microsecond)
				}
				r := Request{Op: Reserve, ID: fmt.Sprint(i, " ", j), At: int64(i*1000 + j)}
				answers, err := g.Do(ctx, policies[j%2], r)
				expect.That(t, (err != nil || answers[0].At == r.At) && (err == nil || j%7 == 0), r.ID, answers, err)
				cancel()
				if err == nil {
					mu.Lock()
					expect.Equal(t, seen[Cancel+r.ID], 0, r.ID, "was answered and cancelled")
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	mu.Lock()
	defer mu.Unlock()
	for id, n := range seen {
		expect.Equal(t, n, 1, id, "was sent", "times")
	}
}

// The more windows a policy has, the fewer requests go in one call.
func TestGroupsOfManyWindowsAreSmall(t *testing.T) {
	for _, c := range []struct{ windows, requests, calls, most int }{
		{1, 64, 1, 64}, {8, 64, 1, 64}, {9, 64, 2, 56}, {32, 64, 4, 16}, {1000, 3, 3, 1},
	} {
		inBubble(t, func(t *testing.T, f *fakeRedis, g *Group) {
			f.gate = nil
			p := &Policy{Windows: make([]Window, c.windows)}
			requests := make([]Request, c.requests)
			for i := range requests {
				requests[i] = reserveAs(fmt.Sprint(i))
			}
			answers, err := g.Do(t.Context(), p, requests...)
			expect.That(t, err == nil && len(answers) == c.requests, len(answers), "answers", err)
			expect.That(t, len(f.calls) == c.calls && len(f.calls[0].requests) == c.most,
				c.windows, "windows:", len(f.calls), "calls, the first of", len(f.calls[0].requests))
		})
	}
}

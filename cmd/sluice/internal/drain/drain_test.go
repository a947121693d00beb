package drain

import (
	"bytes"
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// While jobs wait for minutes, Redis loses everything: they are still called, once each.
func TestDrainOutlivesALossOfRedis(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		w := throttle.Window{Name: "w", Limit: 2, Period: 2 * time.Minute, Shared: true}
		var calls atomic.Int64
		time.AfterFunc(30*time.Second, m.FlushAll)
		start := time.Now()
		s, results := drained(t.Context(), t, m, publishedPolicy(w), 5, 0, func(*http.Request) (int, string) {
			calls.Add(1)
			return http.StatusOK, ""
		})
		expect.That(t, s.Succeeded == 5 && len(results) == 5 && calls.Load() == 5, s, results, calls.Load(), "calls")
		took := time.Since(start)
		expect.That(t, took >= 150*time.Second && took <= 155*time.Second, "it took", took, "2 jobs at once, 2 after the loss, 1 two minutes later")
	})
}

// Calls that take long have so many slots, and each begins by a grant of that moment.
func TestSlotsAreFewerThanGrants(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := throttle.Window{Name: "w", Limit: 5, Period: 10 * time.Second, Shared: true}
		var now, most atomic.Int64
		start := time.Now()
		var begun []time.Duration
		var mu sync.Mutex
		s, _ := drained(t.Context(), t, throttletest.InMemory(t), publishedPolicy(w), 20, 0, func(*http.Request) (int, string) {
			mu.Lock()
			begun = append(begun, time.Since(start))
			mu.Unlock()
			most.Store(max(most.Load(), now.Add(1)))
			time.Sleep(20 * time.Second)
			now.Add(-1)
			return http.StatusOK, ""
		})
		expect.That(t, s.Succeeded == 20 && most.Load() == 8, s, "at most", most.Load(), "calls at a time")
		for i := range begun[5:] {
			span := begun[i+5] - begun[i]
			expect.That(t, span >= 9*time.Second, "6 calls within", span)
		}
	})
}

// An interrupted run that begins anew, with another log, makes all calls.
func TestARunWithAnotherLogBeginsAnew(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, p := throttletest.InMemory(t), publishedPolicy(throttle.Window{Name: "w", Limit: 5, Period: 10 * time.Second, Shared: true})
		succeeds := func(*http.Request) (int, string) { return http.StatusOK, "" }
		ctx, interrupt := context.WithCancel(t.Context())
		time.AfterFunc(15*time.Second, interrupt)
		s, _ := drained(ctx, t, m, p, 12, 0, succeeds)
		expect.Equal(t, s.Succeeded, 10, "before the interrupt")
		s, _ = drained(t.Context(), t, m, p, 12, 0, succeeds)
		expect.Equal(t, s.Succeeded, 12, "anew")
	})
}

// A call that loses its slot may have been made: it is made again only as long as it has retries.
func TestACallThatLosesItsSlotIsNotRepeated(t *testing.T) {
	t.Parallel()
	for retries := range 2 {
		synctest.Test(t, func(t *testing.T) {
			m, p := throttletest.InMemory(t), publishedPolicy(throttle.Window{
				Name: "slots", Algorithm: throttle.AlgorithmConcurrency, Limit: 1, Lease: 3 * time.Second, Shared: true,
			})
			other := expect.Got(throttle.New(throttle.Config{Client: m.Client(t), Policies: []throttle.Policy{p}}))(t)
			s, results := drained(t.Context(), t, m, p, 1, retries, func(*http.Request) (int, string) {
				m.FlushAll()
				expect.Must(t, expect.ErrOf(other.Reserve(t.Context(), throttle.Request{Policy: "p"})))
				time.Sleep(10 * time.Second)
				return http.StatusOK, ""
			})
			expect.Require(t, s.Failed == 1 && results[0].Attempts == 1+retries, s, results)
			expect.Contains(t, results[0].Error, "no retry is left: the call may have been made")
		})
	}
}

func TestProgressLooksAhead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := NewProgress(&out, time.Second)
		p.Begin(Counts{Jobs: 100, Succeeded: 10}) // were done before: the rate is that of this run
		time.Sleep(10 * time.Second)
		p.Show(Counts{Jobs: 100, Succeeded: 10})
		p.Show(Counts{Jobs: 100, Succeeded: 55, Failed: 5}) // too soon for another line
		time.Sleep(10 * time.Second)
		p.Show(Counts{Jobs: 100, Succeeded: 55, Failed: 5})
		p.End(Counts{Jobs: 100, Succeeded: 95, Failed: 5})
		p.Begin(Counts{Jobs: 200_000})
		time.Sleep(100_000 * time.Second)
		p.Show(Counts{Jobs: 200_000, Succeeded: 100_000})
		want := "   10s  10 of 100 jobs done, 0 failed\n" +
			"   20s  60 of 100 jobs done, 5 failed, 2.5 a second, done in about 16s\n" +
			"   20s  100 of 100 jobs done, 5 failed, 4.5 a second\n" +
			"100000s  100000 of 200000 jobs done, 0 failed, 1 a second, done in about 1d3h\n"
		expect.That(t, out.String() == want, "got", out.String(), "want", want)
	})
}

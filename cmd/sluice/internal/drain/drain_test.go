package drain

import (
	"bytes"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// While jobs wait for minutes, Redis loses everything: they are still called, once each.
func TestDrainFindsLostTickets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		w := throttle.Window{Name: "w", Limit: 2, Period: 2 * time.Minute, Scope: throttle.ScopeShared}
		var calls atomic.Int64
		time.AfterFunc(30*time.Second, m.FlushAll)
		start := time.Now()
		s, results := drained(t, m, publishedPolicy(w), 5, func(*http.Request) (int, string) {
			calls.Add(1)
			return http.StatusOK, ""
		})
		if s.Succeeded != 5 || len(results) != 5 || calls.Load() != 5 {
			t.Errorf("%+v, %+v, %d calls", s, results, calls.Load())
		}
		// Their loss is seen a minute after the last take.
		if took := time.Since(start); took < 3*time.Minute || took > 3*time.Minute+5*time.Second {
			t.Errorf("it took %v: 2 jobs at once, 2 when their loss was seen, 1 two minutes later", took)
		}
	})
}

func TestProgressLooksAhead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := NewProgress(&out, time.Second)
		// 10 were done before: the rate is that of this run. The windows say more than the rate.
		p.Begin(Counts{Jobs: 100, Succeeded: 10})
		p.Expect(Outlook{At: time.Now().Add(5 * time.Minute)}, Counts{Jobs: 100, Succeeded: 10})
		time.Sleep(10 * time.Second)
		p.Show(Counts{Jobs: 100, Succeeded: 10})
		p.Show(Counts{Jobs: 100, Succeeded: 55, Failed: 5}) // too soon for another line
		time.Sleep(10 * time.Second)
		p.Show(Counts{Jobs: 100, Succeeded: 55, Failed: 5})
		time.Sleep(280 * time.Second)
		p.Show(Counts{Jobs: 100, Succeeded: 80, Failed: 5})
		p.Expect(Outlook{At: time.Now().Add(30 * time.Second), AtLeast: true}, Counts{Jobs: 100, Succeeded: 80, Failed: 5})
		time.Sleep(10 * time.Second)
		p.Show(Counts{Jobs: 100, Succeeded: 80, Failed: 5})
		p.End(Counts{Jobs: 100, Succeeded: 95, Failed: 5})
		want := "    0s  10 of 100 jobs done, 0 failed, done in about 5m\n" +
			"   10s  10 of 100 jobs done, 0 failed, done in about 4m50s\n" +
			"   20s  60 of 100 jobs done, 5 failed, 2.5 a second, done in about 4m40s\n" +
			"  300s  85 of 100 jobs done, 5 failed, 0.25 a second, done in about 0s\n" +
			"  310s  85 of 100 jobs done, 5 failed, 0.242 a second, done in about 1m2s\n" +
			"  310s  100 of 100 jobs done, 5 failed, 0.29 a second\n"
		if out.String() != want {
			t.Errorf("got\n%s\nwant\n%s", out.String(), want)
		}
	})
}

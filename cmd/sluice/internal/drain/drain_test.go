package drain

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// answers calls inside the process.
type answers func(path string) int

func (a answers) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: a(r.URL.Path), Body: http.NoBody, Header: http.Header{}, Request: r}, nil
}

// While jobs wait for minutes, Redis loses everything: they are still called, once each.
func TestDrainFindsLostTasks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := throttletest.InMemory(t)
		client := m.Client(t)
		w := throttle.Window{Name: "w", Limit: 2, Period: 2 * time.Minute, Scope: throttle.ScopeShared}
		p := throttle.Policy{Name: "p", Match: []string{"*"}, Windows: []throttle.Window{w}}
		limiter, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{p}})
		if err != nil {
			t.Fatal(err)
		}
		var lines strings.Builder
		for i := range 5 {
			fmt.Fprintf(&lines, `{"id":"/%d","tenant":"t%d","url":"http://x/%d"}`+"\n", i, i%2, i)
		}
		list, err := jobs.Source{}.Read("jobs", strings.NewReader(lines.String()))
		if err != nil {
			t.Fatal(err)
		}
		calls := make(chan string, 100)
		caller, err := call.New(call.Config{Concurrency: 1, Timeout: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		caller.Client.Transport = answers(func(path string) int { calls <- path; return http.StatusOK })
		var out bytes.Buffer
		drain := &Drain{
			Caller: caller, Client: client, Concurrency: 2, Jobs: list, Limiter: limiter, Progress: NewProgress(io.Discard, time.Minute),
			Queue: "q", Redis: m, Results: jobs.NewLog(&out),
		}
		time.AfterFunc(30*time.Second, m.FlushAll)
		start := time.Now()
		s, err := drain.Run(t.Context())
		if err != nil || s.Succeeded != 5 || bytes.Count(out.Bytes(), []byte("\n")) != 5 || len(calls) != 5 {
			t.Errorf("%v: %+v, %s, %d calls", err, s, out.String(), len(calls))
		}
		// Their loss is seen after a minute without any event. Each look, of which there are a few, is up
		// to 200 ms late. At the end the server waits for its listener, which takes up to 2 s.
		if took := time.Since(start); took < 3*time.Minute || took > 3*time.Minute+3*time.Second {
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
		want := "    0s  10 of 100 jobs done, 0 failed, 0 denials, done in about 5m\n" +
			"   10s  10 of 100 jobs done, 0 failed, 0 denials, done in about 4m50s\n" +
			"   20s  60 of 100 jobs done, 5 failed, 0 denials, 2.5 a second, done in about 4m40s\n" +
			"  300s  85 of 100 jobs done, 5 failed, 0 denials, 0.25 a second, done in about 0s\n" +
			"  310s  85 of 100 jobs done, 5 failed, 0 denials, 0.242 a second, done in about 1m2s\n" +
			"  310s  100 of 100 jobs done, 5 failed, 0 denials, 0.29 a second\n"
		if out.String() != want {
			t.Errorf("got\n%s\nwant\n%s", out.String(), want)
		}
	})
}

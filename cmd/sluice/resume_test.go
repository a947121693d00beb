package main

import (
	"bytes"
	"context"
	"io"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// What failed runs again if that is asked for, and nothing else does.
func TestRunRetriesFailed(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newDesk(t, roomy, manyJobs(3, r.URL, "")+strings.ReplaceAll(`{"id":"flaky","tenant":"a","url":"URL/flaky","max_retry":0}
{"id":"missing","tenant":"a","url":"URL/missing"}
`, "URL", r.URL))
		args := d.args("--redis", "redis://"+client.Options().Addr)
		e := runMain(t.Context(), "", args...).want(t, exitFailed, "5 jobs: 3 succeeded, 2 failed")
		that(t, !strings.Contains(e.stderr, "done before"), "something was done before the first run", e.stderr)
		runMain(t.Context(), "", args...).
			want(t, exitFailed, "5 of 5 jobs were done before, 2 of them failed: --retry-failed runs those again")

		runMain(t.Context(), "", append(args, "--retry-failed")...).want(t, exitFailed,
			"2 failed jobs run again", "3 of 5 jobs were done before\n", "5 jobs: 4 succeeded, 1 failed")
		called := map[string]int{"/0": 1, "/1": 1, "/2": 1, "/flaky": 2, "/missing": 2}
		that(t, maps.Equal(r.calls, called), "calls", r.calls, "want", called)
		known, err := jobs.ReadLog(d.path("out.jsonl"))
		if err != nil || len(known) != 5 || known["flaky"].Error != "" || known["missing"].Error != "404 Not Found" {
			t.Errorf("%v: %+v", err, known)
		}
	})
}

// Without Redis, what is in -out is known, and a torn line is not.
func TestRunGoesOnFromOut(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, roomy, manyJobs(4, r.URL, ""))
	d.write("out.jsonl", `{"id":"/0","tenant":"t0","status":200,"attempts":1,"waited_ms":0,"error":""}
{"id":"/1","tenant":"t1","status":500,"attempts":4,"waited_ms":0,"error":"500 Internal Server Error"}
{"id":"/2","tenant":"t0","stat`)
	runMain(t.Context(), "", d.args()...).
		want(t, exitFailed, "2 of 4 jobs were done before, 1 of them failed", "4 jobs: 3 succeeded, 1 failed")
	results := d.results("out.jsonl")
	that(t, len(results) == 4 && results["/1"].Status == 500, results)
	that(t, maps.Equal(r.calls, map[string]int{"/2": 1, "/3": 1}), "calls", r.calls)
}

// A call that had begun when an earlier run was killed is made again if the job has a retry left.
func TestRunTakesOver(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newDesk(t, roomy, strings.ReplaceAll(`{"id":"/once","tenant":"a","url":"URL/once","max_retry":0}
{"id":"/twice","tenant":"a","url":"URL/twice","max_retry":1}
`, "URL", r.URL))
		begun := "sluice:{run:" + (&RunCommand{Jobs: d.path("jobs.jsonl")}).name() + "}:begun"
		must(t, client.HSet(t.Context(), begun, "/once", 1, "/twice", 1).Err())
		runMain(t.Context(), "", d.args("--redis", "redis://"+client.Options().Addr)...).
			want(t, exitFailed, "2 jobs: 1 succeeded, 1 failed")
		want := "an earlier run ended during the call, and no retry is left: the call may have been made"
		equal(t, d.results("out.jsonl")["/once"].Error, want)
		if !maps.Equal(r.calls, map[string]int{"/twice": 1}) || client.Exists(t.Context(), begun).Val() != 0 {
			t.Errorf("calls %v", r.calls)
		}
	})
}

// Two processes must not work on the same jobs.
func TestRunWaitsToBeAlone(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	answer := make(chan struct{})
	r.onCall = func(string) { <-answer }
	d := newDesk(t, roomy, manyJobs(1, r.URL, ""))
	args := d.args("--redis", "redis://"+throttletest.Miniredis(t).Addr())
	var first sync.WaitGroup
	first.Go(func() { runMain(t.Context(), "", args...).want(t, exitDone) })
	waitFor(t, "the first run", func() bool { return r.total() == 1 })

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	told := &interrupter{cancel: cancel, on: "waiting until it is known to be gone"}
	code := (&Main{Env: noEnv, Stdout: io.Discard, Stderr: told}).Run(ctx, args)
	close(answer)
	first.Wait()
	if code != exitInterrupted || r.total() != 1 {
		t.Errorf("exit code %d, %d calls, stderr:\n%s", code, r.total(), told.String())
	}
}

// An interrupter is a stderr that cancels when it is told something.
type interrupter struct {
	bytes.Buffer
	cancel context.CancelFunc
	on     string
}

func (i *interrupter) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(i.on)) {
		i.cancel()
	}
	return i.Buffer.Write(b)
}

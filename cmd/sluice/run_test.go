package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/sluice/internal/drain"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/internal/servers"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestRunCallsWhatTheFileSays(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newWorkspace(t, roomy, strings.ReplaceAll(`
{"id":"plain","tenant":"a","url":"URL/plain"}
{"id":"post","tenant":"b","url":"URL/post","method":"POST","body":"hello",`+
			`"headers":{"X-Own":"yes","Host":"example.org"},"cost":{"tokens":7}}
{"id":"redirect","tenant":"a","url":"URL/redirect"}
{"id":"missing","tenant":"a","url":"URL/missing"}
{"id":"flaky","tenant":"a","url":"URL/flaky","max_retry":1}
{"id":"busy","tenant":"a","url":"URL/busy","max_retry":0}
{"id":"broken","tenant":"b","url":"URL/broken","max_retry":1}
{"id":"nobody","tenant":"b","url":"http://`+closed+`/","max_retry":0}
`, "URL", r.URL))
		e := runMain(t.Context(), "", d.args("--redis", "redis://"+client.Options().Addr, "--json")...)
		e.want(t, exitFailed, "8 of 8 jobs done, 3 failed", "8 jobs: 5 succeeded, 3 failed, in ")

		got := d.results("out.jsonl")
		for _, want := range []jobs.Result{
			{ID: "plain", Tenant: "a", Status: 200, Attempts: 1},
			{ID: "post", Tenant: "b", Status: 200, Attempts: 1},
			{ID: "redirect", Tenant: "a", Status: 302, Attempts: 1},
			{ID: "missing", Tenant: "a", Status: 404, Attempts: 1, Error: "404 Not Found"},
			{ID: "flaky", Tenant: "a", Status: 200, Attempts: 2},
			{ID: "busy", Tenant: "a", Status: 200, Attempts: 2},
			{ID: "broken", Tenant: "b", Status: 503, Attempts: 2, Error: "503 Service Unavailable"},
			{ID: "nobody", Tenant: "b", Attempts: 1},
		} {
			r, ok := got[want.ID]
			that(t, ok && r.WaitedMS >= 0 && !r.StartedAt.IsZero(), r)
			if want.ID == "nobody" && strings.Contains(r.Error, "connection refused") {
				r.Error = ""
			}
			r.WaitedMS, r.StartedAt = 0, (time.Time{})
			that(t, reflect.DeepEqual(r, want), "got", r, "want", want)
		}
		post := r.last["/post"]
		that(t, post.Method == "POST" && post.Host == "example.org" && post.Header.Get("X-Own") == "yes", post)
		equal(t, r.body["/post"], "hello")
		that(t, r.total() == 10 && r.called("/elsewhere") == 0, "calls", r.calls)

		s := decoded[drain.Summary](t, e)
		that(t, s.Jobs == 8 && s.Succeeded == 5 && s.Failed == 3 && s.Seconds > 0, s)
	})
}

// closed is an address where no test listens, unlike a free port: a test beside this one may get that.
const closed = "127.0.0.1:1"

// freePort is the address of a port for a server.
func freePort(t *testing.T) string {
	t.Helper()
	port := valueOf(servers.FreePort())(t)
	return fmt.Sprint("127.0.0.1:", port)
}

// manyJobs are n lines for two tenants, whose ids and paths are /0, /1, ...
func manyJobs(n int, url, more string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `{"id":"/%d","tenant":"t%d","url":"%s/%d"%s}`+"\n", i, i%2, url, i, more)
	}
	return b.String()
}

func TestRunKeepsBodies(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	r.answer = "answered é"
	d := newWorkspace(t, roomy, `{"id":"missing","tenant":"a","url":"`+r.URL+`/missing"}`)
	runMain(t.Context(), "", d.args("--keep-body", "10")...).want(t, exitFailed, "1 jobs: 0 succeeded, 1 failed")
	missing := d.results("out.jsonl")["missing"]
	that(t, missing.Body == "answered " && missing.BodyCut, missing)
	runMain(t.Context(), "", d.args("--keep-body", "1048577")...).want(t, exitBadInput, "--keep-body 1048577: must be 0 to 1048576")
}

func TestRunOfNoJobsSucceeds(t *testing.T) {
	t.Parallel()
	d := newWorkspace(t, roomy, "\n")
	runMain(t.Context(), "", d.args("--json")...).want(t, exitDone, "0 jobs: 0 succeeded, 0 failed").says(t, `"jobs": 0,`)
}

// With --json the summary goes to stdout, and the results must go elsewhere.
func TestRunPrintsItsSummaryAsJSON(t *testing.T) {
	t.Parallel()
	d := newWorkspace(t, roomy, manyJobs(3, newRemote(t).URL, ""))
	d.write("out.jsonl", `{"id":"/0","tenant":"t0","status":200,"attempts":1,"waited_ms":0,"error":""}`+"\n")
	s := decoded[drain.Summary](t, runMain(t.Context(), "", d.args("--json")...).want(t, exitDone))
	that(t, s.Jobs == 3 && s.Succeeded == 3 && s.DoneBefore == 1, s)
	runMain(t.Context(), "", d.args("--json", "--out", "")...).
		want(t, exitBadInput, "--json goes to stdout, as the results do: --out must name a file for these")
}

func TestADryRunCallsNobody(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	two := strings.Replace(roomy, "{name: all, limit: 900", "{name: all, limit: 2", 1)
	d := newWorkspace(t, two, manyJobs(9, r.URL, `,"cost":{"tokens":50}`))
	earlier := `{"id":"/0","tenant":"t0","status":200,"attempts":1,"waited_ms":0,"error":""}
{"id":"/1","tenant":"t1","status":500,"attempts":4,"waited_ms":0,"error":"500 Internal Server Error"}
`
	d.write("out.jsonl", earlier)
	// The Redis does not exist: it is not asked.
	args := d.args("--redis", "redis://"+closed, "--dry-run")
	equal(t, runMain(t.Context(), "", args...).want(t, exitDone).stdout, `9 jobs, 2 of them done before.
The others take 3s at best: the last one waits for window all.
`)
	e := runMain(t.Context(), "", append(args, "--json", "--retry-failed")...).want(t, exitDone)
	report := decoded[dryRunReport](t, e)
	that(t, report.Jobs == 8 && report.Done == 1 && *report.AtBestSeconds == 3 && report.Window == "all", e.stdout)
	equal(t, r.total(), 0)
	equal(t, d.read("out.jsonl"), earlier)
	d.write("jobs.jsonl", manyJobs(1, r.URL, `,"type":"mail:send"`))
	runMain(t.Context(), "", args...).want(t, exitBadInput, "no policy in ")
}

// A result that cannot be written ends the run: it would call on and on for nothing.
func TestRunEndsWhenResultsCannotBeWritten(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newWorkspace(t, roomy, "")
	var stderr strings.Builder
	reader, disk := io.Pipe()
	reader.CloseWithError(errors.New("disk is full"))
	m := &Main{Env: noEnv, Stdin: strings.NewReader(manyJobs(3, r.URL, "")), Stdout: disk, Stderr: &stderr}
	equal(t, m.Run(t.Context(), []string{"run", "--jobs", "-", "--policies", d.path("policies.yml")}), exitFailed)
	contains(t, stderr.String(), "sluice: writing a result: disk is full\n")
}

// What failed runs again if that is asked for, and nothing else does.
func TestRunRetriesFailed(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newWorkspace(t, roomy, manyJobs(3, r.URL, "")+strings.ReplaceAll(`{"id":"flaky","tenant":"a","url":"URL/flaky","max_retry":0}
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
		that(t, err == nil && len(known) == 5 && known["flaky"].Error == "" && known["missing"].Error == "404 Not Found", err, known)
	})
}

// A call that had begun when an earlier run was killed is made again if the job has a retry left.
func TestRunTakesOver(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newWorkspace(t, roomy, strings.ReplaceAll(`{"id":"/once","tenant":"a","url":"URL/once","max_retry":0}
{"id":"/twice","tenant":"a","url":"URL/twice","max_retry":1}
`, "URL", r.URL))
		begun := "sluice:{run:" + (&RunCommand{Jobs: d.path("jobs.jsonl")}).jobsName() + "}:begun"
		must(t, client.HSet(t.Context(), begun, "/once", 1, "/twice", 1).Err())
		runMain(t.Context(), "", d.args("--redis", "redis://"+client.Options().Addr)...).
			want(t, exitFailed, "2 jobs: 1 succeeded, 1 failed")
		want := "an earlier run ended during the call, and no retry is left: the call may have been made"
		equal(t, d.results("out.jsonl")["/once"].Error, want)
		that(t, maps.Equal(r.calls, map[string]int{"/twice": 1}) && client.Exists(t.Context(), begun).Val() == 0, r.calls)
	})
}

// Two processes must not work on the same jobs.
func TestRunWaitsToBeAlone(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	answer := make(chan struct{})
	r.onCall = func(string) { <-answer }
	args := newWorkspace(t, roomy, manyJobs(1, r.URL, "")).args("--redis", "redis://"+throttletest.Miniredis(t).Addr())
	var first sync.WaitGroup
	first.Go(func() { runMain(t.Context(), "", args...).want(t, exitDone) })
	waitFor(t, "the first run", func() bool { return r.total() == 1 })

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	told := &commandOutput{onWrite: func(text string) {
		if strings.Contains(text, "waiting until it is known to be gone") {
			cancel()
		}
	}}
	code := (&Main{Env: noEnv, Stdout: io.Discard, Stderr: told}).Run(ctx, args)
	close(answer)
	first.Wait()
	that(t, code == exitInterrupted && r.total() == 1, code, r.total(), told.String())
}

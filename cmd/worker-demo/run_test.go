package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/drain"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

func TestRunCalls(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newDesk(t, roomy, strings.ReplaceAll(`
{"id":"plain","tenant":"a","url":"URL/plain"}
{"id":"post","tenant":"b","url":"URL/post","method":"POST","body":"hello","headers":{"X-Own":"yes","Host":"example.org"},"cost":{"tokens":7}}
{"id":"redirect","tenant":"a","url":"URL/redirect"}
{"id":"missing","tenant":"a","url":"URL/missing"}
{"id":"flaky","tenant":"a","url":"URL/flaky","max_retry":1}
{"id":"busy","tenant":"a","url":"URL/busy","max_retry":1}
{"id":"broken","tenant":"b","url":"URL/broken","max_retry":1}
{"id":"nobody","tenant":"b","url":"http://`+closedPort(t)+`/","max_retry":0}
`, "URL", r.URL))
		args := d.args("--redis", "redis://"+client.Options().Addr, "--summary", d.path("summary.json"))
		runMain(t.Context(), "", args...).want(t, exitFailed, "8 of 8 jobs done, 3 failed", "8 jobs: 5 succeeded, 3 failed, in ")

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
			// What is refused to one pauses all, and whoever was on its way comes once more.
			if !ok || r.Wakes < r.Attempts || r.Wakes > r.Attempts+1 || r.WaitedMS < 0 || r.StartedAt.IsZero() {
				t.Errorf("%+v", r)
			}
			if want.ID == "nobody" && strings.Contains(r.Error, "connection refused") {
				r.Error = ""
			}
			if r.Wakes, r.WaitedMS, r.StartedAt = 0, 0, (time.Time{}); !reflect.DeepEqual(r, want) {
				t.Errorf("got  %+v\nwant %+v", r, want)
			}
		}
		if post := r.last["/post"]; post.Method != "POST" || r.body["/post"] != "hello" || post.Header.Get("X-Own") != "yes" || post.Host != "example.org" {
			t.Errorf("post was %v %q", post, r.body["/post"])
		}
		if r.total() != 10 || r.called("/elsewhere") != 0 {
			t.Errorf("calls %v", r.calls)
		}

		var s drain.Summary
		if err := json.Unmarshal([]byte(d.read("summary.json")), &s); err != nil {
			t.Fatal(err)
		}
		if s.Jobs != 8 || s.Succeeded != 5 || s.Failed != 3 || s.Archived != 3 || s.Denials > 3 || s.Dequeues != 11+s.Denials || s.WakesPerJob != float64(s.Dequeues)/8 || s.DrainSeconds <= 0 {
			t.Errorf("%+v", s)
		}
		if measured := s.RedisCallsPerJob != nil; measured != strings.HasSuffix(t.Name(), "/redis") || measured && *s.RedisCallsPerJob < 5 {
			t.Errorf("Redis calls per job: %v", s.RedisCallsPerJob)
		}
		spend := drain.WindowUse{Policy: "api", Window: "spend", Scope: "tenant=b", Limit: 100, PeriodMS: 1000, MaxUsed: 7}
		if len(s.Windows) != 5 || s.Windows[4] != spend || s.Windows[2].Scope != "shared" {
			t.Errorf("%+v", s.Windows)
		}

		// All of it is known from Redis alone: nothing is called again.
		os.Remove(d.path("out.jsonl"))
		runMain(t.Context(), "", args...).want(t, exitFailed, "8 jobs: 5 succeeded, 3 failed, in ")
		if again := d.results("out.jsonl"); !maps.EqualFunc(got, again, sameResult) || r.total() != 10 {
			t.Errorf("%d calls; got\n%+v\nwant\n%+v", r.total(), again, got)
		}
	})
}

func sameResult(a, b jobs.Result) bool {
	started := a.StartedAt.Equal(b.StartedAt)
	a.StartedAt, b.StartedAt = time.Time{}, time.Time{}
	return started && reflect.DeepEqual(a, b)
}

func closedPort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// manyJobs are n lines for two tenants, whose ids and paths are /0, /1, ...
func manyJobs(n int, url, more string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `{"id":"/%d","tenant":"t%d","url":"%s/%d"%s}`+"\n", i, i%2, url, i, more)
	}
	return b.String()
}

// What of an answer is kept, and which codes are a success, is said by flags.
func TestRunKeepsAndJudges(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		r.answer = "answered é"
		d := newDesk(t, roomy, strings.ReplaceAll(`{"id":"missing","tenant":"a","url":"URL/missing"}
{"id":"broken","tenant":"a","url":"URL/broken"}
{"id":"redirect","tenant":"a","url":"URL/redirect","max_retry":1}
`, "URL", r.URL))
		args := d.args("--redis", "redis://"+client.Options().Addr, "--success", "2xx,404", "--retry", "302", "--keep-body", "10", "--keep-headers", "X-Remote,Date", "--keep-time")
		runMain(t.Context(), "", args...).want(t, exitFailed, "3 jobs: 1 succeeded, 2 failed")
		got := d.results("out.jsonl")
		for id, want := range map[string]struct {
			attempts int
			error    string
		}{"missing": {1, ""}, "broken": {1, "503 Service Unavailable"}, "redirect": {2, "302 Found"}} {
			r := got[id]
			if r.Attempts != want.attempts || r.Error != want.error || r.Body != "answered " || !r.BodyCut || r.TookMS <= 0 ||
				len(r.Headers) != 2 || r.Headers["X-Remote"][0] != "yes" {
				t.Errorf("%+v", r)
			}
		}
		// It is all in Redis, too.
		os.Remove(d.path("out.jsonl"))
		runMain(t.Context(), "", args...).want(t, exitFailed)
		if again := d.results("out.jsonl"); !maps.EqualFunc(got, again, sameResult) {
			t.Errorf("got\n%+v\nwant\n%+v", again, got)
		}
	})
	d := newDesk(t, roomy, manyJobs(1, "http://127.0.0.1:9", ""))
	runMain(t.Context(), "", d.args("--keep-body", "1048577")...).want(t, exitBadInput, "--keep-body 1048577: must be 0 to 1048576")
	runMain(t.Context(), "", d.args("--retry", "x")...).want(t, exitBadInput, `--retry "x": must be codes`)
}

// Jobs that have to wait wake once or little more, are called once, and no window is exceeded. Jobs come from
// stdin and results go to stdout.
func TestRunThrottles(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, `
policies:
  - name: api
    match: ["http:*"]
    windows:
      - {name: burst, limit: 4, period: 1s}
      - {name: all, limit: 6, period: 1s, per: []}
`, "")
	e := runMain(t.Context(), manyJobs(10, r.URL, `,"max_retry":0`), "run", "--jobs", "-", "--policies", d.path("policies.yml"), "--summary", d.path("summary.json"))
	e.want(t, exitDone, "10 jobs: 10 succeeded, 0 failed, in ", "WINDOW")
	results := parseResults(t, e.stdout)
	wakes := 0
	for id, res := range results {
		wakes += res.Wakes
		if res.Error != "" || res.Attempts != 1 || r.called(id) != 1 {
			t.Errorf("called %d times: %+v", r.called(id), res)
		}
	}
	var s drain.Summary
	if err := json.Unmarshal([]byte(d.read("summary.json")), &s); err != nil {
		t.Fatal(err)
	}
	if len(results) != 10 || wakes != s.Dequeues || s.Dequeues != 10+s.Denials || s.WakesPerJob > 2 || s.Archived != 0 {
		t.Errorf("%d results, %d wakes, %+v", len(results), wakes, s)
	}
	for _, w := range s.Windows { // more jobs than fit at once fill the shared window
		if w.MaxUsed > w.Limit || w.MaxUsed < 1 || w.Scope == "shared" && w.MaxUsed < w.Limit {
			t.Errorf("%+v", w)
		}
	}
}

func TestRunRefusesBadInput(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	job := func(more string) string { return `{"tenant":"a","url":"` + r.URL + `/x"` + more + "}\n" }
	for _, c := range []struct {
		name, jobs, policies string
		args                 []string
		want                 string // JOBS, POLICIES and DIR stand for the paths
	}{
		{"job", job("") + `{"tenat":"a"}`, roomy, nil, `JOBS:2: unknown field "tenat": did you mean "tenant"?`},
		{"no policy for a type", job("") + job(`,"type":"mail:send"`), roomy, nil, `JOBS:2: type "mail:send": no policy in POLICIES matches it: must match one`},
		{"cost too large", job("") + job(`,"cost":501`), roomy, nil, `JOBS:2: throttle: policy "api", window "burst": cost of 501 requests never fits: the window holds 500 at most`},
		{"unknown unit", job(`,"cost":{"tonnes":1}`), roomy, nil, `JOBS:1: throttle: policy "api": cost tonnes 1: no window counts this unit, but requests, tokens`},
		{"attribute", job(""), strings.Replace(roomy, "per: []", "per: [user]", 1), nil, `JOBS:1: throttle: policy "api": attribute user "": must be 1 to 512 bytes: a window is counted by it`},
		{"policies", job(""), strings.Replace(roomy, "limit: 500", "limit: 0", 1), nil, `policyfile: POLICIES:6: policy "api", window "burst": limit 0: must be `},
		{"no jobs file", "", roomy, []string{"--jobs", "DIR/nope"}, `--jobs: open DIR/nope: no such file or directory`},
		{"no policy file", job(""), roomy, []string{"--policies", "DIR/nope"}, `policies: open DIR/nope: no such file or directory`},
		{"-out is the jobs file", job(""), roomy, []string{"--out", "JOBS"}, `--out: JOBS:1: is not a result: json: unknown field "url": name another file, or correct the line`},
		{"-out in no directory", job(""), roomy, []string{"--out", "DIR/nope/out"}, `--out: open DIR/nope/out: no such file or directory`},
		{"-summary in no directory", job(""), roomy, []string{"--summary", "DIR/nope/s"}, `--summary: open DIR/nope/s: no such file or directory`},
		{"--redis is no URL", job(""), roomy, []string{"--redis", "redis://:secret@x:y"}, `--redis: is not a URL: must be such as redis://localhost:6379/0, `},
		{"--redis of another kind", job(""), roomy, []string{"--redis", "http://:secret@x"}, `--redis: scheme "http": must be redis, rediss, unix, or redis or rediss with -sentinel or -cluster`},
		{"--redis does not answer", job(""), roomy, []string{"--redis", "redis://:secret@" + closedPort(t)}, `connect: connection refused: must be a Redis that answers`},
		{"--redis twice", job(""), roomy, []string{"--redis", "redis://x", "--redis-file", "DIR/f"}, `--redis and --redis-file: must not be given together`},
		{"no --redis-file", job(""), roomy, []string{"--redis-file", "DIR/f"}, `--redis-file: open DIR/f: no such file or directory`},
		{"--redis of no variable", job(""), roomy, []string{"--redis", "redis://:${PW}@x"}, `--redis: ${PW}: the environment has no such variable: it must be set`},
		{"TLS files without TLS", job(""), roomy, []string{"--redis", "redis://x", "--redis-ca", "JOBS"}, `--redis-ca JOBS: holds no certificate: must be a PEM file`},
		{"TLS files without Redis", job(""), roomy, []string{"--redis-ca", "JOBS"}, `there are TLS files, but no Redis: --redis must tell its URL`},
		{"half a client certificate", job(""), roomy, []string{"--redis", "rediss://x", "--redis-cert", "JOBS"}, `--redis-cert and --redis-key: one is missing: must be given together`},
		{"--prefix", job(""), roomy, []string{"--prefix", "a{b"}, `--prefix "a{b": must be at most 63 of the characters A-Z a-z 0-9 _ . -`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := newDesk(t, c.policies, c.jobs)
			paths := strings.NewReplacer("JOBS", d.path("jobs.jsonl"), "POLICIES", d.path("policies.yml"), "DIR", d.dir)
			args := d.args()
			for _, a := range c.args {
				args = append(args, paths.Replace(a))
			}
			e := runMain(t.Context(), "", args...)
			e.want(t, exitBadInput, paths.Replace(c.want))
			if strings.Contains(e.stderr, "secret") || e.stdout != "" {
				t.Errorf("stdout %q, stderr %q", e.stdout, e.stderr)
			}
			if out, err := os.ReadFile(d.path("out.jsonl")); len(out) > 0 {
				t.Errorf("-out holds %q, %v", out, err)
			}
			if d.read("jobs.jsonl") != c.jobs {
				t.Errorf("the jobs became %q", d.read("jobs.jsonl"))
			}
		})
	}
	t.Cleanup(func() {
		if r.total() > 0 {
			t.Errorf("calls %v", r.calls)
		}
	})
}

func TestRunNothing(t *testing.T) {
	t.Parallel()
	d := newDesk(t, roomy, "\n")
	runMain(t.Context(), "", d.args("--summary", d.path("summary.json"))...).want(t, exitDone, "0 jobs: 0 succeeded, 0 failed")
	if s := d.read("summary.json"); !strings.Contains(s, `"jobs":0,`) || !strings.Contains(s, `"windows":[]`) {
		t.Error(s)
	}
}

// What failed runs again if that is asked for, whether --out or only Redis knows of it, and
// nothing else does.
func TestRunRetriesFailed(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newDesk(t, roomy, manyJobs(3, r.URL, "")+strings.ReplaceAll(`{"id":"flaky","tenant":"a","url":"URL/flaky","max_retry":0}
{"id":"missing","tenant":"a","url":"URL/missing"}
`, "URL", r.URL))
		args := d.args("--redis", "redis://"+client.Options().Addr)
		e := runMain(t.Context(), "", args...)
		e.want(t, exitFailed, "5 jobs: 3 succeeded, 2 failed")
		if strings.Contains(e.stderr, "done before") {
			t.Errorf("something was done before the first run:\n%s", e.stderr)
		}
		runMain(t.Context(), "", args...).want(t, exitFailed, "5 of 5 jobs were done before, 2 of them failed: --retry-failed runs those again")

		runMain(t.Context(), "", append(args, "--retry-failed")...).want(t, exitFailed,
			"2 failed jobs run again", "3 of 5 jobs were done before\n", "5 jobs: 4 succeeded, 1 failed")
		if want := map[string]int{"/0": 1, "/1": 1, "/2": 1, "/flaky": 2, "/missing": 2}; !maps.Equal(r.calls, want) {
			t.Errorf("calls %v, want %v", r.calls, want)
		}
		known, err := jobs.ReadLog(d.path("out.jsonl"))
		if err != nil || len(known) != 5 || known["flaky"].Error != "" || known["missing"].Error != "404 Not Found" {
			t.Errorf("%v: %+v", err, known)
		}

		os.Remove(d.path("out.jsonl"))
		runMain(t.Context(), "", append(args, "--retry-failed")...).want(t, exitFailed, "1 failed jobs run again", "5 jobs: 4 succeeded, 1 failed")
		if r.called("/flaky") != 2 || r.called("/missing") != 3 {
			t.Errorf("calls %v", r.calls)
		}
	})
}

// With --json the summary goes to stdout, and the results must go elsewhere.
func TestRunJSON(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, roomy, manyJobs(3, r.URL, ""))
	d.write("out.jsonl", `{"id":"/0","tenant":"t0","status":200,"attempts":1,"wakes":1,"waited_ms":0,"error":""}`+"\n")
	e := runMain(t.Context(), "", d.args("--json")...)
	e.want(t, exitDone)
	var s drain.Summary
	if err := json.Unmarshal([]byte(e.stdout), &s); err != nil || s.Jobs != 3 || s.Succeeded != 3 || s.DoneBefore != 1 {
		t.Errorf("%v: %s", err, e.stdout)
	}
	runMain(t.Context(), "", d.args("--json", "--out", "")...).want(t, exitBadInput, "--json goes to stdout, as the results do: --out must name a file for these")
}

func TestDryRun(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, strings.Replace(roomy, "{name: all, limit: 900", "{name: all, limit: 2", 1), manyJobs(9, r.URL, `,"cost":{"tokens":60}`))
	before := `{"id":"/0","tenant":"t0","status":200,"attempts":1,"wakes":1,"waited_ms":0,"error":""}
{"id":"/1","tenant":"t1","status":500,"attempts":4,"wakes":4,"waited_ms":0,"error":"500 Internal Server Error"}
`
	d.write("out.jsonl", before)
	// The Redis does not exist: it is not asked.
	args := d.args("--redis", "redis://"+closedPort(t), "--dry-run")
	e := runMain(t.Context(), "", args...)
	e.want(t, exitDone)
	if want := `9 jobs, 2 of them done before.
The others take 3s at best: api/all has 2 requests per 1s, and shared needs 7.

WINDOW      LIMIT                 MOST TO DO   UNITS   AT BEST
api/burst   500 requests per 1s   tenant=t0    4       0s
api/all     2 requests per 1s     shared       7       3s
api/spend   100 tokens per 1s     tenant=t0    240     3s
`; e.stdout != want {
		t.Errorf("got\n%s\nwant\n%s", e.stdout, want)
	}
	e = runMain(t.Context(), "", append(args, "--json", "--retry-failed")...)
	e.want(t, exitDone)
	var report dryRunReport
	if err := json.Unmarshal([]byte(e.stdout), &report); err != nil || report.Jobs != 9 || report.Done != 1 || report.AtBestSeconds != 3 ||
		report.BoundBy == nil || report.BoundBy.Window != "all" || len(report.Windows) != 3 {
		t.Errorf("%v: %s", err, e.stdout)
	}
	if r.total() != 0 || d.read("out.jsonl") != before {
		t.Errorf("%d calls; --out is %q", r.total(), d.read("out.jsonl"))
	}
	d.write("jobs.jsonl", manyJobs(1, r.URL, `,"type":"mail:send"`))
	runMain(t.Context(), "", args...).want(t, exitBadInput, "no policy in ")
}

// Without Redis, what is in -out is known, and a torn line is not.
func TestRunGoesOnFromOut(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, roomy, manyJobs(4, r.URL, ""))
	d.write("out.jsonl", `{"id":"/0","tenant":"t0","status":200,"attempts":1,"wakes":1,"waited_ms":0,"error":""}
{"id":"/1","tenant":"t1","status":500,"attempts":4,"wakes":4,"waited_ms":0,"error":"500 Internal Server Error"}
{"id":"/2","tenant":"t0","stat`)
	runMain(t.Context(), "", d.args()...).want(t, exitFailed, "2 of 4 jobs were done before, 1 of them failed", "4 jobs: 3 succeeded, 1 failed")
	if results := d.results("out.jsonl"); len(results) != 4 || results["/1"].Status != 500 {
		t.Errorf("%+v", results)
	}
	if want := map[string]int{"/2": 1, "/3": 1}; !maps.Equal(r.calls, want) {
		t.Errorf("calls %v, want %v", r.calls, want)
	}
}

// What a task and its result hold in Redis.
type (
	payload struct {
		jobs.Job
		EnqueuedAt time.Time `json:"enqueued_at"`
	}
	record struct {
		jobs.Result
		Done bool `json:"done"`
	}
)

// What an earlier run left in Redis: tasks of a worker that died, tasks that were removed or
// changed in the jobs file, and results whose line is missing.
func TestRunTakesOver(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		// asynq by itself would take the tasks back after a minute at the earliest.
		ctx, cancel := context.WithTimeout(t.Context(), 45*time.Second)
		defer cancel()
		r := newRemote(t)
		const queue = "taken"
		d := newDesk(t, roomy, manyJobs(6, r.URL, `,"max_retry":0`)+strings.ReplaceAll(`{"id":"changed","tenant":"t0","url":"URL/new"}
{"id":"known","tenant":"t0","url":"URL/known"}
`, "URL", r.URL))
		d.write("out.jsonl", `{"id":"known","tenant":"t0","status":200,"attempts":1,"wakes":1,"waited_ms":0,"error":""}`+"\n")
		list, err := jobs.Source{}.Read("before", strings.NewReader(manyJobs(7, r.URL, `,"max_retry":0`)+strings.ReplaceAll(`{"id":"changed","tenant":"t0","url":"URL/old"}
{"id":"known","tenant":"t0","url":"URL/known"}
`, "URL", r.URL)))
		if err != nil {
			t.Fatal(err)
		}
		enqueuer := asynq.NewClientFromRedisClient(client)
		for _, job := range list {
			body, _ := json.Marshal(payload{job, time.Now()})
			task := worker.NewTask(worker.Identity{Tenant: job.Tenant}, job.Type, body)
			if _, err := enqueuer.Enqueue(task, asynq.MaxRetry(job.MaxRetry), asynq.Queue(queue), asynq.Retention(time.Hour), asynq.TaskID(job.ID)); err != nil {
				t.Fatal(err)
			}
		}
		key := "asynq:{" + queue + "}:"
		strand := func(id string, kept *record) { // as a worker leaves a task that dies with it
			client.LRem(ctx, key+"pending", 1, id)
			client.LPush(ctx, key+"active", id)
			client.ZAdd(ctx, key+"lease", redis.Z{Member: id, Score: float64(time.Now().Add(30 * time.Second).Unix())})
			client.HSet(ctx, key+"t:"+id, "state", "active")
			if kept != nil {
				data, _ := json.Marshal(kept)
				client.HSet(ctx, key+"t:"+id, "result", data)
			}
		}
		once := jobs.Result{ID: "/1", Tenant: "t1", Attempts: 1, Wakes: 2}
		done := jobs.Result{ID: "/2", Tenant: "t0", Attempts: 1, Wakes: 3, Status: 200}
		strand("/0", nil)                   // before its only call
		strand("/1", &record{Result: once}) // during it
		strand("/2", &record{done, true})   // after it, before its line
		strand("known", nil)                // after its line

		e := runMain(ctx, "", d.args("--queue", queue, "--redis", "redis://"+client.Options().Addr)...)
		e.want(t, exitFailed, "8 jobs: 7 succeeded, 1 failed", `removed 2 jobs of an earlier run from queue "taken"`)
		results := d.results("out.jsonl")
		if len(results) != 8 || results["/0"].Error != "" || results["/2"].Wakes != 3 {
			t.Errorf("%+v", results)
		}
		if got := results["/1"]; got.Error != "asynq: task lease expired, and no retry is left: the call may have been made" || got.Attempts != 1 || got.Wakes != 2 {
			t.Errorf("%+v", got)
		}
		if want := map[string]int{"/0": 1, "/3": 1, "/4": 1, "/5": 1, "/new": 1}; !maps.Equal(r.calls, want) {
			t.Errorf("calls %v, want %v", r.calls, want)
		}
	})
}

// A result that cannot be written ends the run: it would call on and on for nothing.
func TestRunEndsWhenResultsCannotBeWritten(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, roomy, "")
	var stderr strings.Builder
	m := &Main{Env: noEnv, Stdin: strings.NewReader(manyJobs(3, r.URL, "")), Stdout: full{}, Stderr: &stderr}
	if code := m.Run(t.Context(), []string{"run", "--jobs", "-", "--policies", d.path("policies.yml")}); code != exitFailed {
		t.Errorf("exit code %d", code)
	}
	if !strings.Contains(stderr.String(), "worker-demo: writing a result: disk is full\n") {
		t.Error(stderr.String())
	}
}

// Two processes must not work on the same jobs.
func TestRunWaitsToBeAlone(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, roomy, manyJobs(1, r.URL, ""))
	addr := throttletest.Miniredis(t).Addr()
	other := asynq.NewServer(asynq.RedisClientOpt{Addr: addr}, asynq.Config{Queues: map[string]int{"shared": 1}, LogLevel: asynq.FatalLevel})
	if err := other.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return nil })); err != nil {
		t.Fatal(err)
	}
	defer other.Shutdown()
	inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: addr})
	defer inspector.Close()
	for {
		if servers, err := inspector.Servers(); err != nil {
			t.Fatal(err)
		} else if len(servers) == 1 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	told := &interrupter{cancel: cancel, on: "waiting until it is known to be gone"}
	code := (&Main{Env: noEnv, Stdout: io.Discard, Stderr: told}).Run(ctx, d.args("--queue", "shared", "--redis", "redis://"+addr))
	if code != exitInterrupted || !strings.Contains(told.String(), fmt.Sprintf("process %d on ", os.Getpid())) {
		t.Errorf("exit code %d, stderr:\n%s", code, told.String())
	}
	if r.total() > 0 {
		t.Errorf("calls %v", r.calls)
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

func TestQueueName(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	name := func(c RunCommand) string {
		name, err := c.queueName()
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	names := []string{
		name(RunCommand{Jobs: "a.jsonl"}), name(RunCommand{Jobs: "b.jsonl"}), name(RunCommand{Jobs: "sub/a.jsonl"}),
		name(RunCommand{Jobs: "-"}), name(RunCommand{Jobs: "a.jsonl", Queue: "own"}),
		name(RunCommand{Jobs: "a.jsonl", Prefix: "staging"}), name(RunCommand{Jobs: "-", Prefix: "staging"}), name(RunCommand{Queue: "own", Prefix: "staging"}),
	}
	if abs := name(RunCommand{Jobs: filepath.Join(dir, "a.jsonl")}); abs != names[0] || !strings.HasPrefix(abs, "worker-demo:a.jsonl:") {
		t.Errorf("%q by its absolute path, %q by its relative one", abs, names[0])
	}
	if odd := name(RunCommand{Jobs: "{x y}"}); !strings.HasPrefix(odd, "worker-demo:_x_y_:") {
		t.Error(odd)
	}
	slices.Sort(names)
	if len(slices.Compact(names)) != 8 {
		t.Errorf("%q", names)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("disk is full") }

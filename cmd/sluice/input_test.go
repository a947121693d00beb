package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Who types what stdin is to hold may change his mind.
func TestReadingStdinIsInterrupted(t *testing.T) {
	t.Parallel()
	silent, _ := io.Pipe()
	ctx, interrupt := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer interrupt()
	m := &Main{Env: noEnv, Stdin: silent, Stdout: io.Discard, Stderr: io.Discard}
	that(t, m.Run(ctx, []string{"check", "-"}) == exitInterrupted, "another exit code")
}

// All that makes a call can be said: headers for all and for one, secrets of the environment, text and JSON bodies.
func TestRunSendsWhatWasSaid(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newWorkspace(t, strings.Replace(roomy, "limit: 500", "limit: ${LIMIT}", 1)+"# ${NOT_SET}\n", "")
		d.write("jobs.jsonl", strings.ReplaceAll(`{"id":"json","tenant":"a","url":"URL/json","method":"POST","body":{"n": 8}}
{"id":"other-json","tenant":"a","url":"URL/other-json","method":"POST","body":{"n": 8},"headers":{"content-type":"application/x"}}
{"id":"own","tenant":"a","url":"URL/own","headers":{"Authorization":"Basic ${OWN}"}}
`, "URL", r.URL))
		runWith(t.Context(), []string{"LIMIT", "400", "TOKEN", "s3cret", "OWN", "0wn"},
			d.args("--redis", "redis://"+client.Options().Addr,
				"--header", "Authorization: Bearer ${TOKEN}", "--header", "X-List: a, b")...).want(t, exitDone, "3 jobs: 3 succeeded")
		for path, want := range map[string][3]string{ // body, type, authorization
			"/json":       {`{"n":8}`, "application/json", "Bearer s3cret"},
			"/other-json": {`{"n":8}`, "application/x", "Bearer s3cret"},
			"/own":        {"", "", "Basic 0wn"},
		} {
			h := r.last[path].Header
			equal(t, [3]string{r.body[path], h.Get("Content-Type"), h.Get("Authorization")}, want, path)
			equal(t, h.Get("X-List"), "a, b", path)
		}
	})
}

func TestBadHeadersAndVariables(t *testing.T) {
	t.Parallel()
	d := newWorkspace(t, roomy, manyJobs(1, "http://127.0.0.1:9", ""))
	env := []string{"TWO", "1\n2", "SECRET", "s3cret"}
	for want, args := range map[string][]string{
		`--header: must be such as "Accept: text/html"`:                              {"--header", "s3cret"},
		`--header: name "a b": must be one word such as Accept`:                      {"--header", "a b: c"},
		`--header: A: ${NONE}: the environment has no such variable: it must be set`: {"--header", "A: ${SECRET} ${NONE}"},
	} {
		e := runWith(t.Context(), env, d.args(args...)...).want(t, exitBadInput, want)
		that(t, !strings.Contains(e.stderr, "s3cret"), "a secret is told", e.stderr)
	}
	for policies, want := range map[string]string{
		strings.Replace(roomy, "500", "${NONE}", 1):      "policies.yml:6: ${NONE}: the environment has no such variable: it must be set",
		strings.Replace(roomy, "500", "${TWO}", 1):       "policies.yml:6: ${TWO}: its value must be one line",
		strings.Replace(roomy, "500", "${SECRET}", 1):    `limit "s3cret": must be `,
		strings.Replace(roomy, "500", "'$${SECRET}'", 1): `limit "${SECRET}": must be `,
		strings.Replace(roomy, "name: api", "${NO}", 1):  "policies.yml:3: ${NO}: the environment has no such variable: it must be set",
	} {
		d.write("policies.yml", policies)
		runWith(t.Context(), env, d.args()...).want(t, exitBadInput, want)
		runWith(t.Context(), env, "check", d.path("policies.yml")).want(t, exitBadInput, want)
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
		{"no policy for a type", job("") + job(`,"type":"mail:send"`), roomy, nil,
			`JOBS:2: type "mail:send": no policy in POLICIES matches it: must match one`},
		{"cost too large", job("") + job(`,"cost":501`), roomy, nil,
			`JOBS:2: throttle: policy "api", window "burst": cost requests 501: never fits: the window grants 500 at most`},
		{"unknown unit", job(`,"cost":{"tonnes":1}`), roomy, nil,
			`JOBS:1: throttle: policy "api": cost tonnes 1: no window counts this unit, but requests, tokens`},
		{"attribute", job(""), strings.Replace(roomy, "shared: true", "per: [user]", 1), nil,
			`JOBS:1: throttle: policy "api": attribute user "": must be 1 to 512 bytes: a window is counted by it`},
		{"policies", job(""), strings.Replace(roomy, "limit: 500", "limit: 0", 1), nil,
			`policyfile: POLICIES:6: policy "api", window "burst": limit 0: must be `},
		{"no jobs file", "", roomy, []string{"--jobs", "DIR/nope"}, `--jobs: open DIR/nope: no such file or directory`},
		{"no policy file", job(""), roomy, []string{"--policies", "DIR/nope"}, `policies: open DIR/nope: no such file or directory`},
		{"-out is the jobs file", job(""), roomy, []string{"--out", "JOBS"},
			`--out: JOBS:1: is not a result: json: unknown field "url": name another file, or correct the line`},
		{"-out is no file", job(""), roomy, []string{"--out", os.DevNull}, "--out " + os.DevNull + ": must be a regular file, as"},
		{"-out in no directory", job(""), roomy, []string{"--out", "DIR/nope/out"}, `--out: open DIR/nope/out: no such file or directory`},
		{"--redis is no URL", job(""), roomy, []string{"--redis", "redis://:secret@x:y"},
			`--redis: is not a URL: must be such as redis://localhost:6379/0, `},
		{"--redis of another kind", job(""), roomy, []string{"--redis", "http://:secret@x"},
			`--redis: scheme "http": must be redis, rediss, unix, or redis or rediss with -sentinel or -cluster`},
		{"--redis does not answer", job(""), roomy, []string{"--redis", "redis://:secret@" + closed},
			`connect: connection refused: must be a Redis that answers`},
		{"--redis twice", job(""), roomy, []string{"--redis", "redis://x", "--redis-file", "DIR/f"},
			`--redis and --redis-file: must not be given together`},
		{"no --redis-file", job(""), roomy, []string{"--redis-file", "DIR/f"}, `--redis-file: open DIR/f: no such file or directory`},
		{"TLS files without TLS", job(""), roomy, []string{"--redis", "redis://x", "--redis-ca", "JOBS"},
			`--redis-ca JOBS: holds no certificate: must be a PEM file`},
		{"TLS files without Redis", job(""), roomy, []string{"--redis-ca", "JOBS"},
			`there are TLS files, but no Redis: --redis must be its URL`},
		{"stdin twice", job(""), roomy, []string{"--jobs", "-", "--policies", "-"}, `--jobs and --policies: only one of them can be stdin`},
		{"half a client certificate", job(""), roomy, []string{"--redis", "rediss://x", "--redis-cert", "JOBS"},
			`--redis-cert and --redis-key: one is missing: must be given together`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := newWorkspace(t, c.policies, c.jobs)
			paths := strings.NewReplacer("JOBS", d.path("jobs.jsonl"), "POLICIES", d.path("policies.yml"), "DIR", d.dir)
			args := d.args()
			for _, a := range c.args {
				args = append(args, paths.Replace(a))
			}
			e := runMain(t.Context(), "", args...).want(t, exitBadInput, paths.Replace(c.want))
			that(t, !strings.Contains(e.stderr, "secret") && e.stdout == "", "stdout", e.stdout, "stderr", e.stderr)
			out, err := os.ReadFile(d.path("out.jsonl"))
			that(t, len(out) == 0, "-out holds", out, err)
			equal(t, d.read("jobs.jsonl"), c.jobs, "the jobs became")
		})
	}
	t.Cleanup(func() { that(t, r.total() == 0, "calls", r.calls) })
}

func TestJobsAreNamedByTheirFile(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	name := func(file string) string { return (&RunCommand{Jobs: file}).jobsName() }
	names := []string{name("a.jsonl"), name("b.jsonl"), name("sub/a.jsonl"), name("-")}
	abs := name(filepath.Join(dir, "a.jsonl"))
	that(t, abs == names[0] && strings.HasPrefix(abs, "a.jsonl:"), abs, names[0])
	slices.Sort(names)
	equal(t, len(slices.Compact(names)), 4, names)
}

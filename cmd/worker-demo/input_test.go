package main

import (
	"os"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/throttletest"
)

// Everything that a call is made of can be said: headers for all and for one, secrets from the
// environment, bodies as text, as JSON and from a file.
func TestRunSendsWhatWasSaid(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newDesk(t, strings.Replace(roomy, "limit: 500", "limit: ${LIMIT}", 1)+"# ${NOT_SET}\n", "")
		d.write("file.bin", "from a file")
		d.write("jobs.jsonl", strings.ReplaceAll(`{"id":"json","tenant":"a","url":"URL/json","method":"POST","body":{"n": 8}}
{"id":"other-json","tenant":"a","url":"URL/other-json","method":"POST","body":{"n": 8},"headers":{"content-type":"application/x"}}
{"id":"file","tenant":"a","url":"URL/file","method":"PUT","body_file":"file.bin"}
{"id":"own","tenant":"a","url":"URL/own","headers":{"Authorization":"Basic ${OWN}"}}
`, "URL", r.URL))
		e := runWith(t.Context(), []string{"LIMIT", "400", "TOKEN", "s3cret", "OWN", "0wn"},
			d.args("--redis", "redis://"+client.Options().Addr, "--header", "Authorization: Bearer ${TOKEN}", "--header", "X-List: a, b", "--summary", d.path("s"))...)
		e.want(t, exitDone, "4 jobs: 4 succeeded")
		for path, want := range map[string][3]string{ // body, type, authorization
			"/json":       {`{"n":8}`, "application/json", "Bearer s3cret"},
			"/other-json": {`{"n":8}`, "application/x", "Bearer s3cret"},
			"/file":       {"from a file", "", "Bearer s3cret"},
			"/own":        {"", "", "Basic 0wn"},
		} {
			got := r.last[path]
			if r.body[path] != want[0] || got.Header.Get("Content-Type") != want[1] || got.Header.Get("Authorization") != want[2] || got.Header.Get("X-List") != "a, b" {
				t.Errorf("%s: body %q, headers %v", path, r.body[path], got.Header)
			}
		}
		if r.last["/file"].ContentLength != int64(len("from a file")) {
			t.Errorf("the file's length is %d", r.last["/file"].ContentLength)
		}
		if s := d.read("s"); !strings.Contains(s, `"limit":400,`) {
			t.Errorf("the policy's variable is not in %s", s)
		}
		// No secret is kept.
		for _, key := range client.Keys(t.Context(), "asynq:*:t:*").Val() {
			for field, value := range client.HGetAll(t.Context(), key).Val() {
				if strings.Contains(value, "s3cret") || strings.Contains(value, "0wn") {
					t.Errorf("%s of %s holds a secret: %q", field, key, value)
				}
			}
		}
	})
}

func TestRunReadsCSV(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, roomy, "")
	text := "id,tenant,url\none,a," + r.URL + "/one\ntwo,b," + r.URL + "/two\n"
	d.write("jobs.csv", text)
	runMain(t.Context(), "", d.args("--jobs", d.path("jobs.csv"))...).want(t, exitDone, "2 jobs: 2 succeeded")
	os.Remove(d.path("out.jsonl"))
	runMain(t.Context(), text, d.args("--jobs", "-", "--format", "csv")...).want(t, exitDone, "2 jobs: 2 succeeded")
	if r.called("/one") != 2 || r.called("/two") != 2 {
		t.Errorf("calls %v", r.calls)
	}
	runMain(t.Context(), "", d.args("--jobs", d.path("jobs.csv"), "--format", "jsonl")...).want(t, exitBadInput, d.path("jobs.csv")+":1: is not JSON")
}

func TestBadHeadersAndVariables(t *testing.T) {
	t.Parallel()
	d := newDesk(t, roomy, manyJobs(1, "http://127.0.0.1:9", ""))
	env := []string{"TWO", "1\n2", "SECRET", "s3cret"}
	for want, args := range map[string][]string{
		`--header: must be such as "Accept: text/html"`:                              {"--header", "s3cret"},
		`--header: name "a b": must be one word such as Accept`:                      {"--header", "a b: c"},
		`--header: A: ${NONE}: the environment has no such variable: it must be set`: {"--header", "A: ${SECRET} ${NONE}"},
		`--format "xml": must be jsonl, csv or auto`:                                 {"--format", "xml"},
	} {
		e := runWith(t.Context(), env, d.args(args...)...)
		e.want(t, exitBadInput, want)
		if strings.Contains(e.stderr, "s3cret") {
			t.Errorf("a secret is told:\n%s", e.stderr)
		}
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

// A body's file is read when the call is made.
func TestRunBodyFileGone(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, "policies:\n  - name: api\n    match: [\"http:*\"]\n    windows:\n      - {name: w, limit: 1, period: 1s}\n", "")
	d.write("body", "x")
	d.write("jobs.jsonl", `{"id":"first","tenant":"a","url":"`+r.URL+`/first"}`+"\n"+`{"id":"second","tenant":"a","url":"`+r.URL+`/second","body_file":"body"}`+"\n")
	r.onCall = func(path string) {
		if path == "/first" {
			os.Remove(d.path("body"))
		}
	}
	runMain(t.Context(), "", d.args()...).want(t, exitFailed, "2 jobs: 1 succeeded, 1 failed")
	if got := d.results("out.jsonl")["second"]; !strings.HasPrefix(got.Error, "body_file: ") || r.called("/second") != 0 {
		t.Errorf("%+v", got)
	}
}

package jobs

import (
	"bytes"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// ownJob is a line with every field.
const ownJob = `{"id":"own","tenant":"b","method":"POST","url":"https://x/y?z","headers":{"Accept":"text/html"},` +
	`"body":"hello","cost":{"tokens":3},"max_retry":0,"type":"http:post"}`

func TestJobsAreReadFromLines(t *testing.T) {
	t.Parallel()
	jobs := expect.Got(Read("jobs.jsonl", strings.NewReader(`{"tenant":"a","url":"http://x/"}

  `+ownJob+`
{"tenant":"a","url":"http://x/"}
{"tenant":"a","url":"http://x/","cost":2,"id":null}`), nil))(t)
	for i := range jobs {
		expect.That(t, jobs[i].ID != "", "job", i, "has no id")
	}
	full := Job{
		ID: "own", Tenant: "b", Method: "POST", URL: "https://x/y?z", Headers: map[string]string{"Accept": "text/html"},
		Body: "hello", Cost: Cost{"tokens": 3}, MaxRetry: 0, Type: "http:post", At: "jobs.jsonl:3",
	}
	short := Job{ID: jobs[0].ID, Tenant: "a", Method: "GET", URL: "http://x/", MaxRetry: 3, Type: "http:call", At: "jobs.jsonl:1"}
	again := short
	again.ID, again.At = jobs[2].ID, "jobs.jsonl:4"
	dear := short
	dear.ID, dear.At, dear.Cost = jobs[3].ID, "jobs.jsonl:5", Cost{"requests": 2}
	want := []Job{short, full, again, dear}
	expect.That(t, reflect.DeepEqual(jobs, want), "got", jobs, "want", want)

	// The same line has the same id in the next run, and no other line has it.
	once := expect.Got(Read("other", strings.NewReader(`{"tenant":"a","url":"http://x/"}`), nil))(t)[0].ID
	ids := []string{jobs[0].ID, jobs[2].ID, jobs[3].ID}
	expect.That(t, once == ids[0] && ids[0] != ids[1] && ids[1] != ids[2], "ids", once, ids)
}

func TestBadJobsAreRefusedByLineAndField(t *testing.T) {
	t.Parallel()
	const good = `"tenant":"a","url":"http://x/"`
	for _, c := range []struct{ lines, want string }{
		{`{"tenat":"a","url":"http://x/"}`, `j:1: unknown field "tenat": did you mean "tenant"?`},
		{`{"URL":"http://x/"}`, `j:1: unknown field "URL": did you mean "url"?`},
		{`{"colour":"red"}`,
			`j:1: unknown field "colour": must be one of id, tenant, method, url, headers, body, cost, max_retry, type`},
		{`{` + good + `,"headers":{"X-a":"1","x-A":""}}`, `j:1: headers: X-A: is there twice: must be there once`},
		{`{` + good + `,"url":"http://y/"}`, `j:1: field "url": is there twice: must be there once`},
		{"\n\n{", `j:3: is not JSON: unexpected end of JSON input: must be one object on one line`},
		{`[1]`, `j:1: [1]: must be an object such as {"tenant": "acme", "url": "https://example.com/"}`},
		{`null`, `j:1: null: must be an object such as {"tenant": "acme", "url": "https://example.com/"}`},
		{`{` + good + `} {}`, `j:1: is not JSON: invalid character '{' after top-level value: must be one object on one line`},
		{`{"url":"http://x/"}`, `j:1: tenant is missing: must name for whom the call is made`},
		{`{"tenant":null,"url":"http://x/"}`, `j:1: tenant is missing: must name for whom the call is made`},
		{`{"tenant":"a"}`, `j:1: url is missing: must be what to call`},
		{`{"tenant":"a","url":"x.org/y"}`, `j:1: url "x.org/y": must be absolute, with http:// or https://`},
		{`{"tenant":"a","url":"ftp://x.org/y"}`, `j:1: url "ftp://x.org/y": must be absolute, with http:// or https://`},
		{`{"tenant":"a","url":"http:///y"}`, `j:1: url "http:///y": must be absolute, with http:// or https://`},
		{`{"tenant":7,"url":"http://x/"}`, `j:1: tenant 7: must be a string`},
		{`{` + good + `,"max_retry":"three"}`, `j:1: max_retry "three": must be a whole number`},
		{`{` + good + `,"max_retry":-1}`, `j:1: max_retry -1: must be 0 or more`},
		{`{` + good + `,"cost":1.5}`, `j:1: cost 1.5: must be a whole number, or an object of whole numbers such as {"tokens": 1500}`},
		{`{` + good + `,"cost":{"tokens":"9"}}`,
			`j:1: cost {"tokens":"9"}: must be a whole number, or an object of whole numbers such as {"tokens": 1500}`},
		{`{` + good + `,"headers":["a"]}`, `j:1: headers ["a"]: must be an object of strings, such as {"Accept": "text/html"}`},
		{`{` + good + `,"headers":{"a b":"c"}}`, `j:1: headers: name "a b": must be one word such as Accept`},
		{`{` + good + `,"headers":{"a":"b\nc"}}`, `j:1: headers: a "b\nc": must not contain control characters`},
		{`{` + good + `,"method":"GET IT"}`, `j:1: method "GET IT": must be one word such as GET`},
		{`{` + good + `,"type":" "}`, `j:1: type " ": must not be blank`},
		{`{` + good + `,"id":""}`, `j:1: id "": must be 1 to 512 bytes, not only blanks`},
		{`{` + good + `,"id":"` + strings.Repeat("x", 513) + `"}`,
			`j:1: id "` + strings.Repeat("x", 80) + `...": must be 1 to 512 bytes, not only blanks`},
		{`{` + good + `,"id":"one"}` + "\n" + `{` + good + `,"id":"one"}`,
			`j:2: id "one": is taken by j:1: every job has an id of its own`},
		{strings.Repeat("{}\n", 13), strings.TrimSuffix(func() (s string) {
			for n := range 10 {
				s += fmt.Sprintf("j:%d: tenant is missing: must name for whom the call is made\n", n+1)
			}
			return s
		}()+"and 3 more bad lines\n", "\n")},
	} {
		_, err := Read("j", strings.NewReader(c.lines), nil)
		expect.That(t, err != nil && err.Error() == c.want, c.lines, "got", err, "want", c.want)
	}
}

// Whatever a jobs file holds: jobs that can be called, or an error for every bad line.
func FuzzReadJobs(f *testing.F) {
	for _, lines := range []string{
		`{"tenant":"a","url":"http://x/"}`, ownJob,
		"\r\n\n{\n", `[1]`, `[1,2]`, `null`, `7`, `"x"`, `{} {}`, `{"":0}`, `{"URL":1}`, "\xff",
		"{\"tenant\":\"\xff\",\"url\":\"http://x/\"}", `{"tenant":"\u0000\ud800","url":"http://x/"}`,
		`{"tenant":"a","url":"http://x/","cost":1e3}`, `{"tenant":"a","url":"http://x/","cost":-1}`,
		`{"tenant":"a","url":"http://x/","cost":9223372036854775808}`,
		`{"tenant":"a","url":"http://x/","cost":{"requests":-9223372036854775808}}`,
		`{"tenant":"a","url":"http://x/","cost":null}`, `{"tenant":"a","url":"http://[::1/"}`,
		`{"tenant":"a","url":"http://x:port/"}`, `{"tenant":"a","url":"http://x/%zz"}`,
		`{"tenant":"a","url":"http:// /"}`, `{"tenant":"a","url":"http:///y"}`,
		`{"tenant":"a","url":"http://x/","headers":{"Host":"\u007f"}}`,
		`{"tenant":"a","url":"http://x/","headers":{"a":"\ud83d"}}`,
		`{"tenant":"a","url":"http://x/","method":"\u00e9"}`,
		strings.Repeat("[", 20_000), strings.Repeat(`{"tenant":`, 5_000), strings.Repeat("{}\n", 20),
	} {
		f.Add([]byte(lines))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		jobs, err := Read("j", bytes.NewReader(data), func(string) (string, bool) { return "", false })
		if err != nil {
			lines := strings.Split(err.Error(), "\n")
			expect.That(t, len(lines) <= mostErrors+1, len(lines), "lines of errors")
			for i, line := range lines {
				expect.That(t, strings.HasPrefix(line, "j:") || i >= mostErrors && strings.HasPrefix(line, "and "),
					"a message that is not ours", line)
			}
			return
		}
		ids := map[string]bool{}
		for _, job := range jobs {
			expect.That(t, !ids[job.ID] && job.ID != "" && job.Tenant != "" && job.MaxRetry >= 0, job)
			ids[job.ID] = true
			r, err := http.NewRequest(job.Method, job.URL, strings.NewReader(job.Body))
			expect.That(t, err == nil && r.URL.Host != "", job, err)
		}
	})
}

package jobs

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
)

func TestJobsAreReadFromCSV(t *testing.T) {
	t.Parallel()
	const text = "\ufefftenant,url,id,max_retry,cost.tokens,cost.requests,headers.Accept,body\r\n" +
		"acme,http://x/1,one,0,15,2,text/html,\"two\nlines, \"\"quoted\"\"\"\n" +
		"acme,http://x/2,,,,,,\n" +
		"acme,http://x/2,7,,,,,{}\n"
	got, err := Source{CSV: true}.Read("j.csv", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	one := Job{
		ID: "one", Tenant: "acme", Method: "GET", URL: "http://x/1", Type: "http:call", Headers: map[string]string{"Accept": "text/html"},
		Cost: Cost{"tokens": 15, "requests": 2}, Body: "two\nlines, \"quoted\"", At: "j.csv:2",
	}
	two := Job{ID: got[1].ID, Tenant: "acme", Method: "GET", URL: "http://x/2", Type: "http:call", MaxRetry: 3, At: "j.csv:4"}
	three := two
	three.ID, three.At, three.Body = "7", "j.csv:5", "{}"
	if want := []Job{one, two, three}; !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if nothing, err := (Source{CSV: true}).Read("j", strings.NewReader("")); err != nil || len(nothing) > 0 {
		t.Errorf("an empty file: %v, %v", nothing, err)
	}
}

func TestBadRowsAreRefusedByLineAndColumn(t *testing.T) {
	t.Parallel()
	const quotes = ": must have a value for each column, " +
		"with quotes around one that holds a quote, a comma or a line's end"
	for _, c := range []struct{ text, want string }{
		{"tenat,url\n", `j:1: unknown column "tenat": did you mean "tenant"?`},
		{"tenant,url,tenant\n", `j:1: column "tenant": is there twice: must be there once`},
		{"tenant,headers\n", `j:1: column "headers": must be a field, or such as headers.Accept or cost.tokens`},
		{"tenant,url.x\n", `j:1: column "url.x": must be a field, or such as headers.Accept or cost.tokens`},
		{"tenant,cost,cost.tokens\n", `j:1: columns "cost" and "cost.UNIT": must not be there together`},
		{"tenant,url\na,http://x/,3\nb,http://x/\nc\n",
			"j:2: is not CSV: wrong number of fields" + quotes + "\nj:4: is not CSV: wrong number of fields" + quotes},
		{"tenant,url\na,\"http://x/\nb,http://x/\n",
			"j:2: is not CSV: extraneous or missing \" in quoted-field" + quotes},
		{"tenant,url\na\xff,http://x/\n,http://x/\n",
			"j:2: is not UTF-8: must be saved as UTF-8\nj:3: tenant is missing: must name for whom the call is made"},
		{"tenant,url,max_retry\na,http://x/,many\n", `j:2: max_retry "many": must be a whole number`},
		{"tenant,url,cost.tokens\na,http://x/,1.5\n",
			`j:2: cost {"tokens":"1.5"}: must be a whole number, or an object of whole numbers such as {"tokens": 1500}`},
		{"tenant,url,id\na,http://x/,1\na,http://x/,1\n", `j:3: id "1": is taken by j:2: every job has an id of its own`},
	} {
		if _, err := (Source{CSV: true}).Read("j", strings.NewReader(c.text)); err == nil || err.Error() != c.want {
			t.Errorf("%q\n got %v\nwant %s", c.text, err, c.want)
		}
	}
}

// A body can be JSON, or a file beside the jobs file; headers can name variables.
func TestBodiesAreJSONOrFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "b.bin"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	var env environ.Lookup = func(name string) (string, bool) {
		value, found := map[string]string{"TOKEN": "t0p", "TWO": "a\nb"}[name]
		return value, found
	}
	source := Source{Dir: dir, Env: env}
	job := func(more string) string { return `{"tenant":"a","url":"http://x/",` + more + "}\n" }
	got, err := source.Read("j", strings.NewReader(
		job(`"body": {"n": [1, 2]}`)+
			job(`"body": [ ]`)+
			job(`"body_file":"b.bin"`)+
			job(`"headers":{"Authorization":"Bearer ${TOKEN}"}`)))
	if err != nil {
		t.Fatal(err)
	}
	if got[0].Body != `{"n":[1,2]}` || !got[0].BodyJSON || got[1].Body != "[]" || !got[1].BodyJSON ||
		got[2].BodyFile != filepath.Join(dir, "b.bin") || got[2].BodyJSON {
		t.Errorf("%+v", got)
	}
	if h := got[3].Headers["Authorization"]; h != "Bearer ${TOKEN}" {
		t.Errorf("the job holds the secret: %q", h)
	}
	for line, want := range map[string]string{
		job(`"body":7`):                       "j:1: body 7: must be a string, or an object or a list that is sent as JSON",
		job(`"body":"x","body_file":"b.bin"`): "j:1: body and body_file: must not be there together",
		job(`"body_file":"none"`):             "j:1: body_file: open " + filepath.Join(dir, "none") + ": no such file or directory",
		job(`"body_file":"."`):                `j:1: body_file ".": must be a file`,
		job(`"headers":{"A":"${NONE}"}`):      "j:1: headers: A: ${NONE}: the environment has no such variable: it must be set",
		job(`"headers":{"A":"${TWO}"}`):       "j:1: headers: A: ${TWO}: its value must not contain control characters",
	} {
		if _, err := source.Read("j", strings.NewReader(line)); err == nil || err.Error() != want {
			t.Errorf("%s\n got %v\nwant %s", line, err, want)
		}
	}
}

package jobs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

func TestALogGoesOnWhereItEnded(t *testing.T) {
	t.Parallel()
	const a = `{"id":"a","tenant":"t","status":200,"attempts":1,"waited_ms":3,` +
		`"started_at":"2026-01-02T03:04:05Z","error":""}` + "\n"
	b := strings.Replace(a, `"a"`, `"b"`, 1)
	for _, c := range []struct{ name, before, after, known string }{
		{"no file", "", "", ""},
		{"whole lines", a + b, a + b, "ab"},
		{"a torn line", a + b[:len(b)/2], a, "a"},
		{"only a torn line", "{", "", ""},
		{"a whole line without its end", a + b[:len(b)-1], a + b, "ab"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "out.jsonl")
			if c.before != "" {
				os.WriteFile(path, []byte(c.before), 0o644)
			}
			l := expect.Got(OpenLog(path))(t)
			defer l.Close()
			for _, id := range []string{"a", "b"} {
				_, known := l.Known[id]
				expect.That(t, known == strings.Contains(c.known, id), id, "is known", known)
			}
			r := Result{ID: "c", Tenant: "t", Status: 404, Attempts: 1, StartedAt: time.Unix(0, 0).UTC(), Error: "404 Not Found"}
			err := l.Add(r)
			expect.That(t, err == nil, err)
			want := c.after + `{"id":"c","tenant":"t","status":404,"attempts":1,"waited_ms":0,` +
				`"started_at":"1970-01-01T00:00:00Z","error":"404 Not Found"}` + "\n"
			got, _ := os.ReadFile(path)
			expect.That(t, string(got) == want, "got", got, "want", want)
		})
	}
}

// A jobs file named as -out by mistake must not be written to.
func TestLogRefusesOtherFiles(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		`{"tenant":"a","url":"http://x/"}` + "\n", "# notes\n", `{"tenant":"a"}` + "\n",
		`{"id":"a"}{"id":"b"}` + "\n", `{"tenant":"a","url":"http://x/"}`, `{"id":"a","url":"http://x/"}`, "token",
	} {
		path := filepath.Join(t.TempDir(), "out.jsonl")
		os.WriteFile(path, []byte(text), 0o644)
		_, err := OpenLog(path)
		expect.That(t, err != nil && strings.HasPrefix(err.Error(), path+":1: is not a result: "), text, err)
		got, _ := os.ReadFile(path)
		expect.That(t, string(got) == text, text, "became", got)
	}
}

// wholeLines fails at anything that is not one whole line in one call.
type wholeLines struct {
	mu    sync.Mutex
	lines int
	bad   []string
}

func (w *wholeLines) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines++
	if strings.Count(string(b), "\n") != 1 || b[len(b)-1] != '\n' {
		w.bad = append(w.bad, string(b))
	}
	return len(b), nil
}

func TestLogWritesWholeLines(t *testing.T) {
	t.Parallel()
	w := &wholeLines{}
	l := NewLog(w)
	var wg sync.WaitGroup
	for n := range 4 {
		wg.Go(func() {
			for i := range 50 {
				l.Add(Result{ID: fmt.Sprint(n, i), Error: "two\nlines"})
			}
		})
	}
	wg.Wait()
	expect.That(t, w.lines == 200 && len(w.bad) == 0, w.lines, "writes; not whole lines:", w.bad)
}

// The last result of a job counts. Whoever only looks changes nothing, also where the last line is torn.
func TestTheLastResultOfAJobCounts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "out.jsonl")
	l := expect.Got(OpenLog(path))(t)
	defer l.Close()
	for _, r := range []Result{{ID: "good"}, {ID: "bad", Error: "500"}, {ID: "bad", Status: 201}} {
		expect.Must(t, l.Add(r))
	}
	whole, _ := os.ReadFile(path)
	torn := string(whole) + `{"id":"b`
	os.WriteFile(path, []byte(torn), 0o644)
	known, err := ReadLog(path)
	left, _ := os.ReadFile(path)
	expect.That(t, err == nil && len(known) == 2 && known["bad"].Status == 201 && string(left) == torn, err, known, "the file is", left)
	known, err = ReadLog(path + "none")
	expect.That(t, err == nil && len(known) == 0, "no file", known, err)
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/environ"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A runResult is all that a run of the program left behind, its files aside.
type runResult struct {
	code           int
	stdout, stderr string
}

// A commandOutput is written to by a command and by what it logs meanwhile, as a file may be.
type commandOutput struct {
	mu      sync.Mutex
	text    bytes.Buffer
	onWrite func(text string) // called with all that was written; may be nil
}

func (o *commandOutput) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text.Write(p)
	if o.onWrite != nil {
		o.onWrite(o.text.String())
	}
	return len(p), nil
}

func (o *commandOutput) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// runMain runs the program in this process.
func runMain(ctx context.Context, stdin string, args ...string) runResult {
	return runIn(ctx, noEnv, stdin, args...)
}

// runWith is runMain in an environment: names and values in turn.
func runWith(ctx context.Context, env []string, args ...string) runResult {
	return runIn(ctx, environment(env...), "", args...)
}

func runIn(ctx context.Context, env environ.Lookup, stdin string, args ...string) runResult {
	var stdout, stderr commandOutput
	m := &Main{Env: env, Stdin: strings.NewReader(stdin), Stdout: &stdout, Stderr: &stderr}
	code := m.Run(ctx, args)
	return runResult{code, stdout.String(), stderr.String()}
}

func environment(pairs ...string) environ.Lookup {
	return func(name string) (string, bool) {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1], true
			}
		}
		return "", false
	}
}

var noEnv = environment()

// want fails unless the run ended with the code, and stderr has the texts.
func (e runResult) want(t *testing.T, code int, stderr ...string) runResult {
	t.Helper()
	require(t, e.code == code, "exit code", e.code, "want", code, "stderr", e.stderr)
	for _, text := range stderr {
		contains(t, e.stderr, text)
	}
	return e
}

// says fails unless stdout has the texts, with or without the padding of its tables.
func (e runResult) says(t *testing.T, stdout ...string) runResult {
	t.Helper()
	for _, text := range stdout {
		that(t, strings.Contains(e.stdout, text) || strings.Contains(columns(e.stdout), text), text, "is not in", e.stdout)
	}
	return e
}

// decoded is stdout, which is JSON.
func decoded[V any](t *testing.T, e runResult) (v V) {
	t.Helper()
	require(t, json.Unmarshal([]byte(e.stdout), &v) == nil, "no JSON:", e.stdout)
	return v
}

// A remote is the far side of the jobs: it answers by what the path says, and remembers every call.
type remote struct {
	*httptest.Server
	delay  time.Duration
	onCall func(path string) // may be nil
	answer string            // what missing, broken and redirect answer

	mu    sync.Mutex
	at    []time.Time    // of the calls
	calls map[string]int // by path
	last  map[string]*http.Request
	body  map[string]string
}

func newRemote(t *testing.T) *remote {
	r := &remote{calls: map[string]int{}, last: map[string]*http.Request{}, body: map[string]string{}}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)
	return r
}

func (r *remote) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var body bytes.Buffer
	body.ReadFrom(req.Body)
	r.mu.Lock()
	r.at = append(r.at, time.Now())
	r.calls[req.URL.Path]++
	n := r.calls[req.URL.Path]
	r.last[req.URL.Path], r.body[req.URL.Path] = req, body.String()
	r.mu.Unlock()
	if r.onCall != nil {
		r.onCall(req.URL.Path)
	}
	time.Sleep(r.delay)
	w.Header().Set("X-Remote", "yes")
	switch {
	case strings.HasPrefix(req.URL.Path, "/missing"):
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, r.answer)
	case strings.HasPrefix(req.URL.Path, "/redirect"):
		w.Header().Set("Location", "/elsewhere")
		w.WriteHeader(http.StatusFound)
		io.WriteString(w, r.answer)
	case strings.HasPrefix(req.URL.Path, "/broken"):
		w.WriteHeader(http.StatusServiceUnavailable)
		io.WriteString(w, r.answer)
	case strings.HasPrefix(req.URL.Path, "/flaky") && n == 1:
		w.WriteHeader(http.StatusBadGateway)
	case strings.HasPrefix(req.URL.Path, "/busy") && n == 1:
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
	}
}

func (r *remote) called(path string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls[path]
}

func (r *remote) total() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.calls {
		n += c
	}
	return n
}

// A workspace is a directory with the files of one run.
type workspace struct {
	dir string
	t   *testing.T
}

const roomy = `
policies:
  - name: api
    match: ["http:*"]
    windows:
      - {name: burst, limit: 500, period: 1s}
      - {name: all, limit: 900, period: 1s, shared: true}
      - {name: spend, limit: 100, period: 1s, unit: tokens}
`

func newWorkspace(t *testing.T, policies, jobs string) workspace {
	d := workspace{t.TempDir(), t}
	d.write("policies.yml", policies)
	d.write("jobs.jsonl", jobs)
	return d
}

func (d workspace) path(name string) string { return filepath.Join(d.dir, name) }

func (d workspace) write(name, text string) {
	d.t.Helper()
	must(d.t, os.WriteFile(d.path(name), []byte(text), 0o644))
}

func (d workspace) read(name string) string {
	d.t.Helper()
	return string(valueOf(os.ReadFile(d.path(name)))(d.t))
}

// args are those of a run with all files of the workspace.
func (d workspace) args(more ...string) []string {
	files := []string{"--jobs", d.path("jobs.jsonl"), "--policies", d.path("policies.yml"), "--out", d.path("out.jsonl")}
	return slices.Concat([]string{"run"}, files, more)
}

// results reads a result log; a job that is in it twice fails the test.
func (d workspace) results(name string) map[string]jobs.Result {
	d.t.Helper()
	results := map[string]jobs.Result{}
	for line := range strings.Lines(d.read(name)) {
		r, err := jobs.ParseResult([]byte(line))
		expect.Require(d.t, err == nil, "line", line, err)
		_, twice := results[r.ID]
		that(d.t, !twice, "job", r.ID, "has two results")
		results[r.ID] = r
	}
	return results
}

func TestHelpTeachesByExample(t *testing.T) {
	t.Parallel()
	pages := map[string][][]string{"": {{}, {"help"}, {"-h"}, {"-help"}, {"--help"}}, "batch": {{"batch", "run", "-h"}}}
	for _, c := range (&Main{}).command().Commands {
		pages[c.Name] = append(pages[c.Name], []string{"help", c.Name}, []string{c.Name, "-h"}, []string{c.Name, "--help"})
	}
	for page, same := range pages {
		for _, args := range same {
			e := runMain(t.Context(), "", args...)
			// It teaches by example, and says what the exit codes mean.
			that(t, e.code == 0 && e.stderr == "" && !strings.Contains(e.stdout, "{{") &&
				strings.HasPrefix(e.stdout, strings.TrimSpace("sluice "+page)+" ") &&
				strings.Contains(e.stdout, "\n  sluice "+page) && strings.Contains(e.stdout, "\nExit code"), args,
				"exit code", e.code, "stderr", e.stderr, "stdout:", e.stdout)
			for line := range strings.Lines(e.stdout) {
				width := len([]rune(strings.TrimSuffix(line, "\n")))
				that(t, width <= 120, args, "a line is too wide for a terminal", line)
			}
		}
	}
	help := runMain(t.Context(), "", "run", "-h").stdout
	for _, f := range (&Main{}).runCommand().Flags {
		contains(t, help, "\n  --"+f.Names()[0]+" ", "run -h does not tell of --", f.Names()[0])
	}
}

// docs/reference/sluice.md is the reference: it knows every command, flag and field of a job.
func TestDocsKnowEveryFlag(t *testing.T) {
	t.Parallel()
	docs := string(valueOf(os.ReadFile("../../docs/reference/sluice.md"))(t))
	var know func(commands []*cli.Command)
	know = func(commands []*cli.Command) {
		for _, c := range commands {
			for _, f := range c.Flags {
				expect.That(t, regexp.MustCompile("--"+f.Names()[0]+"[` ]").MatchString(docs),
					"it does not tell of --", f.Names()[0], "of", c.Name)
			}
			know(c.Commands)
		}
	}
	root := (&Main{}).command().Commands
	know(root)
	for _, c := range root {
		contains(t, docs, "`sluice "+c.Name, "it does not tell of", c.Name)
	}
	for _, field := range jobs.Fields() {
		contains(t, docs, "`"+field+"`", "it does not tell of the field", field)
	}
}

func TestEveryShellHasACompletion(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "zsh", "fish", "pwsh"} {
		runMain(t.Context(), "", "completion", shell).want(t, exitDone).says(t, "--generate-shell-completion")
	}
	e := runMain(t.Context(), "", "run", "--po", "--generate-shell-completion")
	that(t, e.code == 0 && strings.HasPrefix(e.stdout, "--policies"), "exit code", e.code, "stdout", e.stdout)
}

func TestVersionIsPrinted(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"--version"}} {
		e := runMain(t.Context(), "", args...).want(t, exitDone).says(t, runtime.Version())
		that(t, strings.HasPrefix(e.stdout, "sluice "), args, e.stdout)
	}
	runMain(t.Context(), "", "version", "--json").want(t, exitDone).says(t, `"version":`)
}

// The jobs and policies that the help shows must be good ones.
func TestHelpShowsWhatWorks(t *testing.T) {
	t.Parallel()
	for _, page := range []string{"run", "batch", "check"} {
		text := valueOf(helpTexts.ReadFile("help/" + page + ".txt"))(t)
		_, policies, _ := strings.Cut(string(text), "\n  policies:\n")
		policies, _, _ = strings.Cut(policies, "\n\n")
		d := newWorkspace(t, "policies:\n"+strings.ReplaceAll(policies, "\n  ", "\n")[2:], "")
		d.write("addresses.jsonl", "") // one of them reads it
		runMain(t.Context(), "", "check", d.path("policies.yml")).want(t, exitDone)
	}
	text := valueOf(helpTexts.ReadFile("help/run.txt"))(t)
	between := func(begin, end string) string {
		_, rest, _ := strings.Cut(string(text), begin)
		part, _, found := strings.Cut(rest, end)
		require(t, found, "run.txt has nothing between", begin, end)
		return part
	}
	lines := regexp.MustCompile(`\((all of|a body).*\)`).ReplaceAllString(between("are required:\n\n", "\n\n  id "), "")
	lines = strings.ReplaceAll(strings.ReplaceAll(lines, "\n", ""), "  {\"", "\n{\"")
	read, err := jobs.Read("help", strings.NewReader(lines), environment("TOKEN", "x"))
	that(t, err == nil && len(read) == 3, len(read), "jobs", err, lines)
}

func TestUnknownCommands(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"chek"}, `sluice: unknown command "chek": did you mean "check"?`},
		{[]string{"dance"}, `sluice: unknown command "dance": must be one of status, explain, simulate, page, ` +
			`limits, pause, resume, reset, front, drop, doctor, check, batch, run, version, completion: ` +
			`see "sluice -h"`},
		{[]string{"help", "dance"}, `sluice: No help topic for 'dance'`},
		{[]string{"-jsn"}, `sluice: unknown flag --jsn: did you mean --json?`},
		{[]string{"run", "--jbos", "x"}, `sluice: unknown flag --jbos: see "sluice run -h"`},
		{[]string{"run", "--polices", "x"}, `sluice: unknown flag --polices: did you mean --policies?`},
		{[]string{"run", "jobs.jsonl"}, `sluice: unexpected argument "jobs.jsonl": every input has a flag: see "sluice run -h"`},
		{[]string{"batch"}, `sluice: batch needs one of plan, run, status, pause, resume, retry, cancel: see "sluice batch -h"`},
		{[]string{"batch", "puase"}, `sluice: unknown command "puase": did you mean "pause"?`},
		{[]string{"batch", "run"},
			`sluice: --policies is missing: must be a policy file with batches: see "sluice batch run -h"`},
		{[]string{"batch", "run", "--policies", "p", "--tick", "today"},
			`sluice: --tick "today": must be a time such as 2026-01-02T02:00:00Z: see "sluice batch run -h"`},
		{[]string{"batch", "run", "--policies", "p", "--tick", "2026-01-02T02:00:00Z"},
			`sluice: --tick: run fires now: leave it out: see "sluice batch run -h"`},
		{[]string{"check"}, `sluice: check needs the arguments FILE: see "sluice check -h"`},
		{[]string{"check", "a", "b"}, `sluice: check needs the arguments FILE: see "sluice check -h"`},
		{[]string{"run"}, `sluice: --jobs is missing: must be a file of jobs, or - for stdin: see "sluice run -h"`},
		{[]string{"run", "-jobs", "-"}, `sluice: --policies is missing: must be a policy file: see "sluice run -h"`},
		{[]string{"run", "-jobs"}, `sluice: flag needs an argument: -jobs: see "sluice run -h"`},
		{[]string{"run", "--jobs", "-", "--policies", "p", "--concurrency", "0"},
			`sluice: --concurrency 0: must be 1 to 10000: see "sluice run -h"`},
		{[]string{"run", "--concurrency", "many"},
			`sluice: invalid value "many" for flag -concurrency: must be a whole number: see "sluice run -h"`},
		{[]string{"limits", "override", "--weight", "x"}, `sluice: invalid value "x" for flag -weight: must be a number: see "sluice limits override -h"`},
		{[]string{"run", "--jobs", "-", "--policies", "p", "--timeout", "0s"},
			`sluice: --timeout 0s: must be 1ms to 1h: see "sluice run -h"`},
		{[]string{"run", "--timeout", "30"},
			`sluice: invalid value "30" for flag -timeout: ` +
				`must be a duration such as 500ms, 30s or 1m30s: see "sluice run -h"`},
		{[]string{"run", "--timeout", "soon"},
			`sluice: invalid value "soon" for flag -timeout: ` +
				`must be a duration such as 500ms, 30s or 1m30s: see "sluice run -h"`},
	} {
		e := runMain(t.Context(), "", c.args...)
		that(t, e.code == exitBadInput && e.stderr == c.want+"\n" && e.stdout == "",
			c.args, "exit code", e.code, "stderr", e.stderr, "want", c.want)
	}
}

// columns takes the padding out of a table.
func columns(s string) string { return strings.Join(strings.Fields(s), " ") }

// valueOf is expect.Got.
func valueOf[V any](v V, err error) func(expect.TB) V { return expect.Got(v, err) }

var (
	contains = expect.Contains
	errOf    = expect.ErrOf
	must     = expect.Must
	require  = expect.Require
	that     = expect.That
)

func equal[V any](t testing.TB, got, want V, about ...any) {
	t.Helper()
	expect.Equal(t, got, want, about...)
}

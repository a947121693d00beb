package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle/throttletest"
)

// asProgram makes this test binary the program.
const asProgram = "SLUICE_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

func program(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	return cmd
}

// TestTheProgramEndsCleanlyBySignals runs the real program, as a shell does, and ends it by signals.
func TestTheProgramEndsCleanlyBySignals(t *testing.T) {
	t.Parallel()
	const tight = `
policies:
  - name: api
    match: ["http:*"]
    windows:
      - {name: burst, limit: 15, period: 1s}
`
	// stop runs the program until some results are there, and signals it. It returns jobs that were called without
	// result.
	stop := func(t *testing.T, r *remote, d workspace, signal os.Signal, args []string) (underWay map[string]bool, e runResult) {
		cmd := program(args...)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		must(t, cmd.Start())
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if out, _ := os.ReadFile(d.path("out.jsonl")); bytes.Count(out, []byte("\n")) >= 12 {
				break
			}
			if time.Now().After(end) {
				cmd.Process.Kill()
				cmd.Wait()
				t.Fatalf("no results after a minute; stderr:\n%s", stderr.String())
			}
		}
		cmd.Process.Signal(signal)
		var exit *exec.ExitError
		err := cmd.Wait()
		require(t, errors.As(err, &exit), "it ended by itself:", err, "stderr:", stderr.String())
		r.CloseClientConnections() // no call is still on its way
		underWay = map[string]bool{}
		out, _ := os.ReadFile(d.path("out.jsonl"))
		r.mu.Lock()
		defer r.mu.Unlock()
		for id := range r.calls {
			underWay[id] = !bytes.Contains(out, []byte(`"id":"`+id+`",`))
		}
		return underWay, runResult{exit.ExitCode(), stdout.String(), stderr.String()}
	}

	t.Run("killed", func(t *testing.T) {
		t.Parallel()
		r := newRemote(t)
		r.delay = 150 * time.Millisecond
		// Half of the jobs must not be called twice, whatever happens.
		d := newWorkspace(t, tight, manyJobs(60, r.URL, ""))
		d.write("jobs.jsonl", oncePerOdd(d.read("jobs.jsonl")))
		args := d.args("--concurrency", "6", "--redis", "redis://"+throttletest.Redis(t))
		underWay, _ := stop(t, r, d, syscall.SIGKILL, args)

		cmd := program(args...)
		out, err := cmd.CombinedOutput()
		code := cmd.ProcessState.ExitCode()
		require(t, code == exitDone || code == exitFailed, err, out)
		results := d.results("out.jsonl")
		equal(t, len(results), 60, "results")
		for id, res := range results {
			once := strings.Contains(d.read("jobs.jsonl"), `"id":"`+id+`",`+`"max_retry":0`)
			calls := r.called(id)
			lost := strings.HasSuffix(res.Error, "no retry is left: the call may have been made")
			// It may have been killed after it noted that it calls, and before it did.
			that(t, res.Error == "" || once && lost && (underWay[id] || calls == 0), res)
			that(t, calls <= 1 || calls == 2 && !once && underWay[id], calls, "calls of", res,
				"under way at the kill:", underWay[id], "may be repeated:", !once)
			that(t, res.Error != "" || calls >= 1, "it has a result, and was not called", res)
		}
	})

	t.Run("interrupted", func(t *testing.T) {
		t.Parallel()
		r := newRemote(t)
		r.delay = 100 * time.Millisecond
		d := newWorkspace(t, tight, manyJobs(60, r.URL, ""))
		args := d.args("--concurrency", "6", "--json")
		underWay, e := stop(t, r, d, os.Interrupt, args)
		e.want(t, exitInterrupted, "of 60 jobs done: the same command goes on from here")
		for id, open := range underWay {
			that(t, !open, id, "was called and has no result")
		}
		e.says(t, `"jobs": 60,`)
		out, err := program(args...).CombinedOutput()
		require(t, err == nil, err, string(out))
		results := d.results("out.jsonl")
		that(t, len(results) == 60 && r.total() == 60, len(results), r.total())
	})
}

// Wherever an operator is, times are those of the log and of the page.
func TestTimesAreUTC(t *testing.T) {
	t.Parallel()
	cmd := program("pause", "api", "--for", "1h", "--by", "anna", "--why", "x", "--redis", "redis://"+throttletest.Miniredis(t).Addr())
	cmd.Env = append(cmd.Env, "TZ=Asia/Tokyo")
	out := valueOf(cmd.Output())(t)
	until, err := time.Parse("api is paused until 2006-01-02 15:04:05 UTC\n", string(out))
	that(t, err == nil && time.Until(until).Round(time.Minute) == time.Hour, string(out), err)
}

// oncePerOdd puts "max_retry": 0 behind the id of every other job.
func oncePerOdd(jobs string) string {
	lines := strings.SplitAfter(jobs, "\n")
	for i := 1; i < len(lines); i += 2 {
		lines[i] = strings.Replace(lines[i], `","tenant"`, `","max_retry":0,"tenant"`, 1)
	}
	return strings.Join(lines, "")
}

package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/call"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
)

// RunCommand is a durable, throttled bulk HTTP caller.
type RunCommand struct {
	*Main
	redisFlags

	Concurrency int
	DryRun      bool
	Format      string // of Jobs
	Headers     []string
	Jobs        string // file, or "-" for stdin
	Keep        call.Keep
	KeepHeaders string // names, with commas between them
	Out         string // file, or "" for stdout
	Policies    string // file, or "-" for stdin
	Prefix      string // of everything in Redis, or ""
	Queue       string // "" for one named after the jobs file
	Retry       string // codes, or "" for the default
	RetryFailed bool
	Success     string // codes, or "" for the default
	Summary     string // file, or ""
	Timeout     time.Duration
}

func (m *Main) runCommand() *cli.Command {
	c := &RunCommand{Main: m}
	return &cli.Command{
		Name: "run", Usage: "make HTTP calls of your own, throttled and once each", Action: c.Run,
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "jobs", Usage: "the jobs, one a line of `FILE`; - reads stdin", Destination: &c.Jobs, TakesFile: true},
			&cli.StringFlag{Name: "policies", Usage: "the limits, a policy `FILE`; - reads stdin", Destination: &c.Policies, TakesFile: true},
			&cli.StringFlag{Name: "format", Usage: "the jobs are `FORMAT`: jsonl, csv, or auto: csv if the file's name ends so", Value: formatAuto, Destination: &c.Format},
			&cli.StringSliceFlag{Name: "header", Usage: "send `HEADER`, such as 'Accept: text/html', with all calls; may be given several times", Destination: &c.Headers},
			&cli.StringFlag{Name: "out", Usage: "append results to `FILE`; by default they go to stdout", Destination: &c.Out, TakesFile: true},
			&cli.IntFlag{Name: "keep-body", Usage: "keep up to `BYTES` of each answer's body in its result", Destination: &c.Keep.Body},
			&cli.StringFlag{Name: "keep-headers", Usage: "keep the answer's headers of `NAMES`, such as ETag,Content-Type, or all", Destination: &c.KeepHeaders},
			&cli.BoolFlag{Name: "keep-time", Usage: "keep how long the last call took", Destination: &c.Keep.Time},
			&cli.StringFlag{Name: "success", Usage: "`CODES` that count as success, such as 2xx,404", DefaultText: call.DefaultSuccess, Destination: &c.Success},
			&cli.StringFlag{Name: "retry", Usage: "`CODES` that are tried again, such as 409,500-503", DefaultText: call.DefaultRetry, Destination: &c.Retry},
			&cli.BoolFlag{Name: "retry-failed", Usage: "run jobs again that failed in an earlier run", Destination: &c.RetryFailed},
			&cli.BoolFlag{Name: "dry-run", Usage: "check all input and say how long it takes at best; nothing is called or written", Destination: &c.DryRun},
			&cli.StringFlag{Name: "prefix", Usage: "begin queue, windows and lines in Redis with `NAME`, such as staging", Destination: &c.Prefix},
			&cli.StringFlag{Name: "summary", Usage: "write one JSON object to `FILE` that says how it went", Destination: &c.Summary, TakesFile: true},
			&cli.IntFlag{Name: "concurrency", Usage: "make at most `N` calls at a time", Value: 16, Destination: &c.Concurrency},
			&cli.DurationFlag{Name: "timeout", Usage: "a call may take `DURATION`, its body included", Value: 30 * time.Second, Destination: &c.Timeout},
			&cli.StringFlag{Name: "queue", Usage: "use the queue `NAME`; by default one named after the absolute path of the jobs file", Destination: &c.Queue},
		}, c.redisFlags.flags("keep queue and counts in the Redis of `URL`; by default $SLUICE_REDIS_URL, or this process")...),
	}
}

var prefixShape = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,63}$`)

// validate checks what the flags alone can show.
func (c *RunCommand) validate() error {
	switch {
	case c.Jobs == "":
		return errors.New("--jobs is missing: must be a file of jobs, or - for stdin")
	case c.Policies == "":
		return errors.New("--policies is missing: must be a policy file")
	case c.Queue != "" && strings.TrimSpace(c.Queue) == "":
		return fmt.Errorf("--queue %q: must not be blank", c.Queue)
	case c.json && !c.DryRun && c.Out == "":
		return errors.New("--json goes to stdout, as the results do: --out must name a file for these")
	case c.Format != formatAuto && c.Format != formatCSV && c.Format != formatJSONL:
		return fmt.Errorf("--format %q: must be jsonl, csv or auto", jobs.Shorten(c.Format))
	case c.Keep.Body < 0 || c.Keep.Body > call.MaxKeptBody:
		return fmt.Errorf("--keep-body %d: must be 0 to %d", c.Keep.Body, call.MaxKeptBody)
	case !prefixShape.MatchString(c.Prefix):
		return fmt.Errorf("--prefix %q: must be at most 63 of the characters A-Z a-z 0-9 _ . -", jobs.Shorten(c.Prefix))
	case c.Jobs == "-" && c.Policies == "-":
		return errors.New("--jobs and --policies: only one of them can be stdin")
	case c.Concurrency < 1 || c.Concurrency > 10_000:
		return fmt.Errorf("--concurrency %d: must be 1 to 10000", c.Concurrency)
	case c.Timeout < time.Millisecond || c.Timeout > time.Hour:
		return fmt.Errorf("--timeout %v: must be 1ms to 1h", c.Timeout)
	}
	for name := range strings.SplitSeq(c.KeepHeaders, ",") {
		if name = strings.TrimSpace(name); name != "" {
			c.Keep.Headers = append(c.Keep.Headers, name)
		}
	}
	return nil
}

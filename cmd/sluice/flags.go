package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
)

// RunCommand is a durable, throttled bulk HTTP caller.
type RunCommand struct {
	*Main
	redisFlags

	Concurrency int
	DryRun      bool
	Headers     []string
	Jobs        string // file, or "-" for stdin
	Keep        int    // bytes of a body
	Out         string // file, or "" for stdout
	Policies    string // file, or "-" for stdin
	Prefix      string // of everything in Redis, or ""
	Queue       string // "" for one named after the jobs file
	Retry       string // codes, or "" for the default
	RetryFailed bool
	Success     string // codes, or "" for the default
	Timeout     time.Duration
}

func (m *Main) runCommand() *cli.Command {
	c := &RunCommand{Main: m}
	return &cli.Command{
		Name: "run", Usage: "make HTTP calls of your own, throttled and once each", Action: c.Run,
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "jobs", Destination: &c.Jobs, TakesFile: true,
				Usage: "the jobs, one a line of `FILE`; - reads stdin"},
			&cli.StringFlag{Name: "policies", Destination: &c.Policies, TakesFile: true,
				Usage: "the limits, a policy `FILE`; - reads stdin"},
			&cli.StringSliceFlag{Name: "header", Destination: &c.Headers,
				Usage: "send `HEADER`, such as 'Accept: text/html', with all calls; may be given several times"},
			&cli.StringFlag{Name: "out", Destination: &c.Out, TakesFile: true,
				Usage: "append results to `FILE`; by default they go to stdout"},
			&cli.IntFlag{Name: "keep-body", Destination: &c.Keep,
				Usage: "keep up to `BYTES` of each answer's body in its result"},
			&cli.StringFlag{Name: "success", DefaultText: call.DefaultSuccess, Destination: &c.Success,
				Usage: "`CODES` that count as success, such as 2xx,404"},
			&cli.StringFlag{Name: "retry", DefaultText: call.DefaultRetry, Destination: &c.Retry,
				Usage: "`CODES` that are tried again, such as 409,500-503"},
			&cli.BoolFlag{Name: "retry-failed", Destination: &c.RetryFailed,
				Usage: "run jobs again that failed in an earlier run"},
			&cli.BoolFlag{Name: "dry-run", Destination: &c.DryRun,
				Usage: "check all input and say how long it takes at best; nothing is called or written"},
			&cli.StringFlag{Name: "prefix", Destination: &c.Prefix,
				Usage: "begin queue, windows and lines in Redis with `NAME`, such as staging"},
			&cli.IntFlag{Name: "concurrency", Value: 16, Destination: &c.Concurrency,
				Usage: "make at most `N` calls at a time"},
			&cli.DurationFlag{Name: "timeout", Value: 30 * time.Second, Destination: &c.Timeout,
				Usage: "a call may take `DURATION`, its body included"},
			&cli.StringFlag{Name: "queue", Destination: &c.Queue,
				Usage: "use the queue `NAME`; by default one named after the absolute path of the jobs file"},
		}, c.redisFlags.flags("keep line and counts in the Redis of `URL`; "+
			"by default $SLUICE_REDIS_URL, or this process")...),
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
	case c.Keep < 0 || c.Keep > call.MaxKeptBody:
		return fmt.Errorf("--keep-body %d: must be 0 to %d", c.Keep, call.MaxKeptBody)
	case !prefixShape.MatchString(c.Prefix):
		return fmt.Errorf("--prefix %q: must be at most 63 of the characters A-Z a-z 0-9 _ . -", jobs.Shorten(c.Prefix))
	case c.Jobs == "-" && c.Policies == "-":
		return errors.New("--jobs and --policies: only one of them can be stdin")
	case c.Concurrency < 1 || c.Concurrency > 10_000:
		return fmt.Errorf("--concurrency %d: must be 1 to 10000", c.Concurrency)
	case c.Timeout < time.Millisecond || c.Timeout > time.Hour:
		return fmt.Errorf("--timeout %v: must be 1ms to 1h", c.Timeout)
	}
	return nil
}

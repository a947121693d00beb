package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/sluice/internal/call"
)

// RunCommand makes the HTTP calls of a file, throttled. If it is interrupted, the next run continues.
type RunCommand struct {
	*Main
	redisFlags

	Concurrency int
	DryRun      bool
	Headers     []string
	Jobs        string // file, or "-" for stdin
	Keep        int    // bytes of each answer's body
	Out         string // file, or "" for stdout
	Policies    string // file, or "-" for stdin
	Prefix      string // of the limiter
	RetryFailed bool
	Timeout     time.Duration
}

func (m *Main) runCommand() *cli.Command {
	c := &RunCommand{Main: m}
	return &cli.Command{
		Name: "run", Usage: "make HTTP calls of your own, throttled, until each has its result", Action: c.Run,
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
			&cli.BoolFlag{Name: "retry-failed", Destination: &c.RetryFailed,
				Usage: "run jobs again that failed in an earlier run"},
			&cli.BoolFlag{Name: "dry-run", Destination: &c.DryRun,
				Usage: "check all input and say how long it takes at best; nothing is called or written"},
			&cli.StringFlag{Name: "prefix", Destination: &c.Prefix,
				Usage: "begin all keys in Redis with `TEXT`, such as staging:"},
			&cli.IntFlag{Name: "concurrency", Value: 16, Destination: &c.Concurrency,
				Usage: "make at most `N` calls at a time"},
			&cli.DurationFlag{Name: "timeout", Value: 30 * time.Second, Destination: &c.Timeout,
				Usage: "a call may take `DURATION`, its body included"},
		}, c.redisFlags.flags("keep counts in the Redis of `URL`; "+
			"by default $SLUICE_REDIS_URL, or this process")...),
	}
}

// within returns a check of a flag's value.
func within[T cmp.Ordered](least, most T) func(T) error {
	return func(value T) error {
		if value < least || value > most {
			return fmt.Errorf("must be %v to %v", least, most)
		}
		return nil
	}
}

// validate checks the flags, without reading any file.
func (c *RunCommand) validate() error {
	out, _ := os.Stat(c.Out)
	switch {
	case c.Jobs == "":
		return errors.New("--jobs is missing: must be a file of jobs, or - for stdin")
	case c.Policies == "":
		return errors.New("--policies is missing: must be a policy file")
	case c.json && !c.DryRun && c.Out == "":
		return errors.New("--json goes to stdout, as the results do: --out must name a file for these")
	case out != nil && !out.Mode().IsRegular():
		return fmt.Errorf("--out %s: must be a regular file, as earlier results are read from it", c.Out)
	case c.Keep < 0 || c.Keep > call.MaxKeptBody:
		return fmt.Errorf("--keep-body %d: must be 0 to %d", c.Keep, call.MaxKeptBody)
	case c.Jobs == "-" && c.Policies == "-":
		return errors.New("--jobs and --policies: only one of them can be stdin")
	case c.Concurrency < 1 || c.Concurrency > 10_000:
		return fmt.Errorf("--concurrency %d: must be 1 to 10000", c.Concurrency)
	case c.Timeout < time.Millisecond || c.Timeout > time.Hour:
		return fmt.Errorf("--timeout %v: must be 1ms to 1h", c.Timeout)
	}
	return nil
}

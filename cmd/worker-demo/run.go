package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/urfave/cli/v3"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/call"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/drain"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/redisconn"
	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
	"github.com/sluice-go/sluice/throttle"
)

// RunCommand is a durable, throttled bulk HTTP caller.
type RunCommand struct {
	*Main

	Concurrency int
	DryRun      bool
	Format      string // of Jobs
	Headers     []string
	Jobs        string // file, or "-" for stdin
	Keep        call.Keep
	KeepHeaders string // names, with commas between them
	Out         string // file, or "" for stdout
	Policies    string // file
	Queue       string // "" for one named after the jobs file
	Prefix      string // of everything in Redis, or ""
	Redis       string // URL, or "" for an embedded one
	RedisFile   string // that holds the URL
	RedisTLS    redisconn.TLS
	RetryFailed bool
	Retry       string // codes, or "" for the default
	Success     string // codes, or "" for the default
	Summary     string // file, or ""
	Timeout     time.Duration
}

func (c *RunCommand) flags() []cli.Flag {
	c.Timeout = 30 * time.Second
	return []cli.Flag{
		&cli.StringFlag{Name: "jobs", Usage: "the jobs, one a line of `FILE`; - reads stdin", Destination: &c.Jobs, TakesFile: true},
		&cli.StringFlag{Name: "policies", Usage: "the limits, a policy `FILE`", Destination: &c.Policies, TakesFile: true},
		&cli.StringFlag{Name: "format", Usage: "the jobs are `FORMAT`: jsonl, csv, or auto: csv if the file's name ends so", Value: formatAuto, Destination: &c.Format},
		&cli.StringSliceFlag{Name: "header", Usage: "send `HEADER`, such as 'Accept: text/html', with all calls; may be given several times", Destination: &c.Headers},
		&cli.StringFlag{Name: "out", Usage: "append results to `FILE`; by default they go to stdout", Destination: &c.Out, TakesFile: true},
		&cli.IntFlag{Name: "keep-body", Usage: "keep up to `BYTES` of each answer's body in its result", Destination: &c.Keep.Body},
		&cli.StringFlag{Name: "keep-headers", Usage: "keep the answer's headers of `NAMES`, such as ETag,Content-Type, or all", Destination: &c.KeepHeaders},
		&cli.BoolFlag{Name: "keep-time", Usage: "keep how long the last call took", Destination: &c.Keep.Time},
		&cli.StringFlag{Name: "success", Usage: "`CODES` that count as success, such as 2xx,404", DefaultText: call.DefaultSuccess, Destination: &c.Success},
		&cli.StringFlag{Name: "retry", Usage: "`CODES` that are tried again, such as 409,500-503", DefaultText: call.DefaultRetry, Destination: &c.Retry},
		&cli.BoolFlag{Name: "retry-failed", Usage: "run jobs again that failed in an earlier run", Destination: &c.RetryFailed},
		&cli.BoolFlag{Name: "dry-run", Usage: "check all input and tell how long it takes at best; nothing is called or written", Destination: &c.DryRun},
		&cli.StringFlag{Name: "redis", Usage: "keep queue and counts in the Redis of `URL`; by default $SLUICE_REDIS_URL, or this process", Destination: &c.Redis},
		&cli.StringFlag{Name: "redis-file", Usage: "read that URL from `FILE`", Destination: &c.RedisFile, TakesFile: true},
		&cli.StringFlag{Name: "redis-ca", Usage: "trust the certificates of `FILE` alone, in place of the system's", Destination: &c.RedisTLS.CA, TakesFile: true},
		&cli.StringFlag{Name: "redis-cert", Usage: "show Redis the client certificate of `FILE`", Destination: &c.RedisTLS.Cert, TakesFile: true},
		&cli.StringFlag{Name: "redis-key", Usage: "its key is in `FILE`", Destination: &c.RedisTLS.Key, TakesFile: true},
		&cli.StringFlag{Name: "prefix", Usage: "begin queue, windows and lines in Redis with `NAME`, such as staging", Destination: &c.Prefix},
		&cli.StringFlag{Name: "summary", Usage: "write one JSON object to `FILE` that says how it went", Destination: &c.Summary, TakesFile: true},
		&cli.IntFlag{Name: "concurrency", Usage: "make at most `N` calls at a time", Value: 16, Destination: &c.Concurrency},
		&cli.GenericFlag{Name: "timeout", Usage: "a call may take `DURATION`, its body included", Value: durationValue{&c.Timeout}, DefaultText: "30s"},
		&cli.StringFlag{Name: "queue", Usage: "use the queue `NAME`; by default one named after the absolute path of the jobs file", Destination: &c.Queue},
	}
}

var prefixShape = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,63}$`)

// validate checks what can be told from the flags alone.
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
	case c.Redis != "" && c.RedisFile != "":
		return errors.New("--redis and --redis-file: must not be given together")
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

// Run checks all input, and only then begins to write.
func (c *RunCommand) Run(ctx context.Context) error {
	if err := c.validate(); err != nil {
		return badInput(`%w: see "worker-demo run -h"`, err)
	}
	progress := drain.NewProgress(c.Stderr, 5*time.Second)
	list, err := c.readJobs()
	if err != nil {
		return inputError{err}
	}
	policies, err := c.loadPolicies(c.Policies)
	if err != nil {
		return inputError{err}
	}
	headers, err := c.readHeaders()
	if err != nil {
		return inputError{err}
	}
	queue, err := c.queueName()
	if err != nil {
		return inputError{err}
	}
	outcome, err := call.NewOutcome(c.Success, c.Retry)
	if err != nil {
		return inputError{err}
	}
	if c.DryRun {
		return c.dryRun(ctx, list, policies)
	}
	server, err := c.openRedis(ctx)
	if err != nil {
		return inputError{err}
	}
	defer server.Close()
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies, Prefix: c.prefix()})
	if err != nil {
		return inputError{err}
	}
	if err := checkJobs(ctx, limiter, c.Policies, list); err != nil {
		return err
	}
	// Whoever worked on these jobs may have written to --out up to now.
	if err := waitAlone(ctx, server.Client, queue, progress); err != nil {
		return err
	}
	results := jobs.NewLog(c.Stdout)
	if c.Out != "" {
		if results, err = jobs.OpenLog(c.Out); err != nil {
			return badInput("--out: %w", err)
		}
		defer results.Close()
	}
	if c.Summary != "" {
		if err := os.WriteFile(c.Summary, nil, 0o644); err != nil {
			return badInput("--summary: %w", err)
		}
	}
	for _, p := range policies {
		for _, warning := range p.Warnings() {
			progress.Say("warning: %s", warning)
		}
	}

	d := &drain.Drain{
		Caller:      call.New(call.Config{Concurrency: c.Concurrency, Env: c.Env, Headers: headers, Keep: c.Keep, Outcome: outcome, Timeout: c.Timeout}),
		Client:      server.Client,
		Concurrency: c.Concurrency,
		Jobs:        list,
		Limiter:     limiter,
		Progress:    progress,
		Queue:       queue,
		Redis:       server.Opt,
		Results:     results,
		RetryFailed: c.RetryFailed,
	}
	summary, err := d.Run(ctx)
	interrupted := err != nil && ctx.Err() != nil
	if err != nil && !interrupted {
		return err
	}
	if err := c.report(summary); err != nil {
		return err
	}
	if interrupted {
		progress.Say("%s", c.howToGoOn(summary))
		return errInterrupted
	}
	if summary.Failed > 0 {
		return errJobsFailed
	}
	return nil
}

// redisURLVariable holds the URL of Redis if no flag tells it.
const redisURLVariable = "SLUICE_REDIS_URL"

// redisAddress is where Redis is, and whether anything says so.
func (c *RunCommand) redisAddress() (a redisconn.Address, found bool, err error) {
	switch {
	case c.Redis != "":
		a = redisconn.Address{Source: "--redis", URL: c.Redis}
	case c.RedisFile != "":
		text, err := os.ReadFile(c.RedisFile)
		if err != nil {
			return a, true, fmt.Errorf("--redis-file: %w", err)
		}
		a = redisconn.Address{Source: "--redis-file " + c.RedisFile, URL: strings.TrimSpace(string(text))}
	default:
		url, set := c.Env(redisURLVariable)
		if !set || url == "" {
			return a, false, nil
		}
		a = redisconn.Address{Source: "$" + redisURLVariable, URL: url}
	}
	a, err = a.Expand(c.Env)
	return a, true, err
}

func (c *RunCommand) openRedis(ctx context.Context) (*redisconn.Server, error) {
	address, found, err := c.redisAddress()
	if err != nil {
		return nil, err
	}
	if !found && c.RedisTLS != (redisconn.TLS{}) {
		return nil, errors.New("there are TLS files, but no Redis: --redis must tell its URL")
	}
	if !found {
		return redisconn.Embedded()
	}
	return redisconn.Open(ctx, address, c.RedisTLS)
}

// prefix is what everything of this run in Redis begins with.
func (c *RunCommand) prefix() string {
	if c.Prefix == "" {
		return ""
	}
	return c.Prefix + ":"
}

// queueName names a queue for this jobs file alone, the same from wherever it is run.
func (c *RunCommand) queueName() (string, error) {
	if c.Queue != "" {
		return c.prefix() + c.Queue, nil
	}
	if c.Jobs == "-" {
		return c.prefix() + "worker-demo:stdin", nil
	}
	abs, err := filepath.Abs(c.Jobs)
	if err != nil {
		return "", fmt.Errorf("--jobs: %w", err)
	}
	plain := regexp.MustCompile(`[^A-Za-z0-9_.-]`).ReplaceAllString(filepath.Base(abs), "_")
	return fmt.Sprintf("%sworker-demo:%s:%.6x", c.prefix(), plain, sha256.Sum256([]byte(abs))), nil
}

// checkJobs asks the limiter whether every job can be granted at all. Redis is not asked.
func checkJobs(ctx context.Context, limiter *throttle.Limiter, policyFile string, list []jobs.Job) error {
	var errs []error
	checked := map[string]error{} // jobs are many, but few of them differ in what they ask for
	for _, job := range list {
		policy, ok := limiter.Match(job.Type)
		if !ok {
			errs = append(errs, fmt.Errorf("%s: type %q: no policy in %s matches it: must match one", job.At, jobs.Shorten(job.Type), policyFile))
			continue
		}
		key := fmt.Sprintf("%q %q %v", policy.Name, job.Tenant, job.Cost)
		err, ok := checked[key]
		if !ok {
			err = limiter.Check(ctx, throttle.Request{Cost: job.Cost, Policy: policy.Name, Tenant: job.Tenant})
			checked[key] = err
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", job.At, err))
		}
	}
	if len(errs) > 0 {
		return inputError{jobs.Join(errs)}
	}
	return nil
}

// waitAlone waits until no server works on the queue: one that was killed is seen there for up
// to 10 s.
func waitAlone(ctx context.Context, client redis.UniversalClient, queue string, progress *drain.Progress) error {
	inspector := asynq.NewInspectorFromRedisClient(client)
	told := false
	for end := time.Now().Add(15 * time.Second); ; {
		servers, err := inspector.Servers()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(servers, func(s *asynq.ServerInfo) bool { return s.Queues[queue] > 0 })
		if i < 0 {
			return nil
		}
		other := servers[i]
		if time.Now().After(end) {
			return badInput("queue %q: process %d on %s works on it: let it end, or use another --queue", queue, other.PID, other.Host)
		}
		if !told {
			told = true
			progress.Say("process %d on %s worked on these jobs up to now: waiting until it is known to be gone", other.PID, other.Host)
		}
		select {
		case <-ctx.Done():
			return errInterrupted
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// report tells people and, if they asked, machines how it went.
func (c *RunCommand) report(s drain.Summary) error {
	fmt.Fprintf(c.Stderr, "%d jobs: %d succeeded, %d failed, in %.1f s; %.2f wakes a job, %d denials", s.Jobs, s.Succeeded, s.Failed, s.DrainSeconds, s.WakesPerJob, s.Denials)
	if s.RedisCallsPerJob != nil {
		fmt.Fprintf(c.Stderr, ", %.1f Redis calls a job", *s.RedisCallsPerJob)
	}
	fmt.Fprintln(c.Stderr)
	drain.PrintWindows(c.Stderr, s.Windows)
	if c.json {
		if err := show.JSON(c.Stdout, s); err != nil {
			return err
		}
	}
	if c.Summary == "" {
		return nil
	}
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.Summary, append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("--summary: %w", err)
	}
	return nil
}

func (c *RunCommand) howToGoOn(s drain.Summary) string {
	_, kept, _ := c.redisAddress()
	text := fmt.Sprintf("stopped with %d of %d jobs done: ", s.Done(), s.Jobs)
	switch {
	case !kept && c.Out == "":
		return text + "without --redis or --out nothing of this is kept, and the same command begins anew"
	case c.Jobs == "-":
		return text + "the same command with the same input goes on from here"
	default:
		return text + "the same command goes on from here"
	}
}

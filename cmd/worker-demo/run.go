package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

// RunCommand is a durable, throttled bulk HTTP caller.
type RunCommand struct {
	*Main

	Concurrency int
	Jobs        string // file, or "-" for stdin
	Out         string // file, or "" for stdout
	Policies    string // file
	Queue       string // "" for one named after the jobs file
	Redis       string // URL, or "" for an embedded one
	Summary     string // file, or ""
	Timeout     time.Duration
}

func (c *RunCommand) ParseFlags(args []string) error {
	if err := parse(c.flags(), args); err != nil {
		return err
	}
	switch {
	case c.Jobs == "":
		return errors.New("-jobs is missing: must be a file of jobs, or - for stdin")
	case c.Policies == "":
		return errors.New("-policies is missing: must be a policy file")
	case c.Queue != "" && strings.TrimSpace(c.Queue) == "":
		return fmt.Errorf("-queue %q: must not be blank", c.Queue)
	case c.Concurrency < 1 || c.Concurrency > 10_000:
		return fmt.Errorf("-concurrency %d: must be 1 to 10000", c.Concurrency)
	case c.Timeout < time.Millisecond || c.Timeout > time.Hour:
		return fmt.Errorf("-timeout %v: must be 1ms to 1h", c.Timeout)
	}
	return nil
}

func (c *RunCommand) flags() *flag.FlagSet {
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	flags.IntVar(&c.Concurrency, "concurrency", 16, "")
	flags.StringVar(&c.Jobs, "jobs", "", "")
	flags.StringVar(&c.Out, "out", "", "")
	flags.StringVar(&c.Policies, "policies", "", "")
	flags.StringVar(&c.Queue, "queue", "", "")
	flags.StringVar(&c.Redis, "redis", "", "")
	flags.StringVar(&c.Summary, "summary", "", "")
	flags.DurationVar(&c.Timeout, "timeout", 30*time.Second, "")
	return flags
}

// Run checks all input, and only then begins to write.
func (c *RunCommand) Run(ctx context.Context) error {
	progress := NewProgress(c.Stderr, 5*time.Second)
	jobs, err := c.readJobs()
	if err != nil {
		return inputError{err}
	}
	policies, err := policyfile.Load(c.Policies)
	if err != nil {
		return inputError{err}
	}
	queue, err := c.queueName()
	if err != nil {
		return inputError{err}
	}
	server, err := openRedis(ctx, c.Redis)
	if err != nil {
		return inputError{err}
	}
	defer server.Close()
	limiter, err := throttle.New(throttle.Config{Client: server.Client, Policies: policies})
	if err != nil {
		return inputError{err}
	}
	if err := checkJobs(ctx, limiter, c.Policies, jobs); err != nil {
		return err
	}
	// Whoever worked on these jobs may have written to -out up to now.
	if err := waitAlone(ctx, server.Client, queue, progress); err != nil {
		return err
	}
	results := NewResultLog(c.Stdout)
	if c.Out != "" {
		if results, err = OpenResultLog(c.Out); err != nil {
			return badInput("-out: %w", err)
		}
		defer results.Close()
	}
	if c.Summary != "" {
		if err := os.WriteFile(c.Summary, nil, 0o644); err != nil {
			return badInput("-summary: %w", err)
		}
	}
	for _, p := range policies {
		for _, warning := range p.Warnings() {
			progress.Say("warning: %s", warning)
		}
	}

	drain := &Drain{
		Caller:      NewCaller(c.Timeout, c.Concurrency),
		Client:      server.Client,
		Concurrency: c.Concurrency,
		Jobs:        jobs,
		Limiter:     limiter,
		Progress:    progress,
		Queue:       queue,
		Redis:       server.Opt,
		Results:     results,
	}
	summary, err := drain.Run(ctx)
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

func (c *RunCommand) readJobs() ([]Job, error) {
	if c.Jobs == "-" {
		return ReadJobs("stdin", c.Stdin)
	}
	file, err := os.Open(c.Jobs)
	if err != nil {
		return nil, fmt.Errorf("-jobs: %w", err)
	}
	defer file.Close()
	return ReadJobs(c.Jobs, file)
}

// queueName names a queue for this jobs file alone, the same from wherever it is run.
func (c *RunCommand) queueName() (string, error) {
	if c.Queue != "" {
		return c.Queue, nil
	}
	if c.Jobs == "-" {
		return "worker-demo:stdin", nil
	}
	abs, err := filepath.Abs(c.Jobs)
	if err != nil {
		return "", fmt.Errorf("-jobs: %w", err)
	}
	plain := regexp.MustCompile(`[^A-Za-z0-9_.-]`).ReplaceAllString(filepath.Base(abs), "_")
	return fmt.Sprintf("worker-demo:%s:%.6x", plain, sha256.Sum256([]byte(abs))), nil
}

// checkJobs asks the limiter whether every job can be granted at all. Redis is not asked.
func checkJobs(ctx context.Context, limiter *throttle.Limiter, policyFile string, jobs []Job) error {
	var errs []error
	checked := map[string]error{} // jobs are many, but few of them differ in what they ask for
	for _, job := range jobs {
		policy, ok := limiter.Match(job.Type)
		if !ok {
			errs = append(errs, fmt.Errorf("%s: type %q: no policy in %s matches it: must match one", job.at, shorten(job.Type), policyFile))
			continue
		}
		key := fmt.Sprintf("%q %q %v", policy.Name, job.Tenant, job.Cost)
		err, ok := checked[key]
		if !ok {
			err = limiter.Check(ctx, throttle.Request{Cost: job.Cost, Policy: policy.Name, Tenant: job.Tenant})
			checked[key] = err
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", job.at, err))
		}
	}
	if len(errs) > 0 {
		return inputError{joinFirst(errs)}
	}
	return nil
}

// waitAlone waits until no server works on the queue: one that was killed is seen there for up
// to 10 s.
func waitAlone(ctx context.Context, client redis.UniversalClient, queue string, progress *Progress) error {
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
			return badInput("queue %q: process %d on %s works on it: let it end, or use another -queue", queue, other.PID, other.Host)
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
func (c *RunCommand) report(s Summary) error {
	fmt.Fprintf(c.Stderr, "%d jobs: %d succeeded, %d failed, in %.1f s; %.2f wakes a job, %d denials", s.Jobs, s.Succeeded, s.Failed, s.DrainSeconds, s.WakesPerJob, s.Denials)
	if s.RedisCallsPerJob != nil {
		fmt.Fprintf(c.Stderr, ", %.1f Redis calls a job", *s.RedisCallsPerJob)
	}
	fmt.Fprintln(c.Stderr)
	printWindows(c.Stderr, s.Windows)
	if c.Summary == "" {
		return nil
	}
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.Summary, append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("-summary: %w", err)
	}
	return nil
}

func (c *RunCommand) howToGoOn(s Summary) string {
	text := fmt.Sprintf("stopped with %d of %d jobs done: ", s.Done(), s.Jobs)
	switch {
	case c.Redis == "" && c.Out == "":
		return text + "without -redis or -out nothing of this is kept, and the same command begins anew"
	case c.Jobs == "-":
		return text + "the same command with the same input goes on from here"
	default:
		return text + "the same command goes on from here"
	}
}

// A RedisServer is where the queue and the windows are.
type RedisServer struct {
	Client redis.UniversalClient
	Opt    asynq.RedisConnOpt

	embedded *miniredis.Miniredis
}

// openRedis connects to the server of the URL, or starts an embedded one for this process.
func openRedis(ctx context.Context, uri string) (*RedisServer, error) {
	s, name := &RedisServer{}, "embedded Redis"
	if uri == "" {
		s.embedded = miniredis.NewMiniRedis()
		s.embedded.ClockTTL(true)
		if err := s.embedded.Start(); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		s.Opt = asynq.RedisClientOpt{Addr: s.embedded.Addr()}
	} else {
		u, err := url.Parse(uri)
		if err != nil {
			return nil, errors.New("-redis: is not a URL: must be such as redis://localhost:6379/0") // the error holds the password
		}
		name = "-redis " + u.Redacted()
		if s.Opt, err = asynq.ParseRedisURI(uri); err != nil {
			return nil, fmt.Errorf("%s: %w: must be such as redis://localhost:6379/0", name, err)
		}
	}
	s.Client = s.Opt.MakeRedisClient().(redis.UniversalClient)
	ping, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := s.Client.Ping(ping).Err(); err != nil {
		s.Close()
		return nil, fmt.Errorf("%s: %w: must be a Redis that answers", name, err)
	}
	return s, nil
}

// Close closes the connection, and ends the server if it is ours.
func (s *RedisServer) Close() {
	s.Client.Close()
	if s.embedded != nil {
		s.embedded.Close()
	}
}

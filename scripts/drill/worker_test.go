//go:build drill

package drill

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/control"
	"github.com/sluice-go/sluice/throttle/promthrottle"
	"github.com/sluice-go/sluice/throttle/usage"
	"github.com/sluice-go/sluice/worker"
)

// workerEnv has the setup of a worker: the test binary is one if it is set.
const workerEnv = "SLUICE_DRILL_WORKER"

// A setup configures a worker.
type setup struct {
	API    string // its URL: handlers call it, and the worker follows what is published; or ""
	Redis  string
	Limit  int64
	Queues map[string]int
	Strict bool
}

func TestMain(m *testing.M) {
	if text := os.Getenv(workerEnv); text != "" {
		if err := work(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	slog.SetDefault(slog.New(slog.DiscardHandler)) // Redis ends on purpose here
	logging.Disable()
	os.Exit(m.Run())
}

// policies returns the policy api, and mail if handlers call an API.
func (s setup) policies() []throttle.Policy {
	policies := []throttle.Policy{{Name: "api", Match: []string{"api:*"}, UpstreamShared: true, Windows: []throttle.Window{
		{Name: "provider", Limit: s.Limit, Period: time.Second, Shared: true},
		{Name: "per-minute", Limit: 100_000, Period: time.Minute},
	}}}
	if s.API != "" {
		policies = append(policies, throttle.Policy{Name: "mail", Match: []string{"mail:*"}, Windows: []throttle.Window{
			{Name: "sender", Limit: 1, Period: 2 * time.Second, Shared: true},
		}})
	}
	return policies
}

// limiter returns a limiter with its store and its metrics.
func (s setup) limiter() (*throttle.Limiter, *control.Store, http.Handler, error) {
	registry := prometheus.NewRegistry()
	metrics, err := promthrottle.New(registry)
	if err != nil {
		return nil, nil, nil, err
	}
	counter := usage.New()
	limiter, err := throttle.New(throttle.Config{
		Client: redis.NewClient(&redis.Options{Addr: s.Redis}), Observer: func(event any) { counter.Observe(event); metrics.Observe(event) }, Policies: s.policies(),
	})
	if err != nil {
		return nil, nil, nil, err
	}
	metrics.Watch(limiter)
	counter.Start(limiter)
	store := control.StoreOf(limiter)
	if s.API != "" {
		store.Follow(context.Background(), control.FollowConfig{})
	}
	return limiter, store, promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), nil
}

// handle calls the API, if there is one, with the ID of the task.
func (s setup) handle(ctx context.Context, task *asynq.Task) error {
	if s.API == "" {
		time.Sleep(5 * time.Millisecond)
		return nil
	}
	if task.Type() == "api:poison" {
		return errors.New("poison")
	}
	id, _ := asynq.GetTaskID(ctx)
	resp, err := http.Get(s.API + "/" + id)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusTooManyRequests {
		seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		return fmt.Errorf("%s: %w", resp.Status, worker.RetryAfter(time.Duration(seconds)*time.Second))
	}
	return nil
}

// work is a worker. It prints the address of its metrics, and ends with its standard input.
func work(text string) error {
	var s setup
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return err
	}
	limiter, _, metrics, err := s.limiter()
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	server, err := worker.NewServer(asynq.RedisClientOpt{Addr: s.Redis},
		asynq.Config{
			Concurrency: 16, Queues: s.Queues, StrictPriority: s.Strict, LogLevel: asynq.FatalLevel,
			RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return 2 * time.Second },
		},
		worker.Config{Limiter: limiter, Logger: logger})
	if err != nil {
		return err
	}
	if err := server.Start(asynq.HandlerFunc(s.handle)); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr())
	go http.Serve(listener, metrics)
	_, _ = io.Copy(io.Discard, os.Stdin)
	server.Shutdown()
	return nil
}

// A workerProcess is a worker that a drill has started.
type workerProcess struct {
	name  string
	cmd   *exec.Cmd
	stdin io.Closer
	url   string
	log   string // its file
}

func (s setup) start(t *testing.T, name string) *workerProcess {
	t.Helper()
	text := expect.Got(json.Marshal(s))(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), workerEnv+"="+string(text))
	log := expect.Got(os.Create(t.TempDir() + "/log"))(t)
	cmd.Stderr = log
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	expect.Must(t, cmd.Start())
	p := &workerProcess{name: name, cmd: cmd, stdin: in, log: log.Name()}
	t.Cleanup(func() {
		p.kill()
		if text, _ := os.ReadFile(p.log); t.Failed() {
			t.Logf("%s logged\n%s", name, text)
		}
	})
	addr := expect.Got(bufio.NewReader(out).ReadString('\n'))(t)
	p.url = "http://" + strings.TrimSpace(addr)
	return p
}

// kill ends the worker as SIGKILL does.
func (p *workerProcess) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// stop ends the worker, which puts down what it has.
func (p *workerProcess) stop() {
	p.stdin.Close()
	_ = p.cmd.Wait()
}

// scraped returns the series of the metrics that the rules use.
func scraped(url string, used map[string]bool) map[string]float64 {
	client := http.Client{Timeout: 4 * time.Second}
	resp, err := client.Get(url)
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		return nil
	}
	series := map[string]float64{}
	for name, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, pair := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", pair.GetName(), pair.GetValue()))
			}
			if used[name] {
				series[name+"{"+strings.Join(labels, ",")+"}"] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
			if !used[name+"_bucket"] {
				continue
			}
			for _, b := range m.GetHistogram().GetBucket() {
				le := fmt.Sprintf("le=%q", fmt.Sprint(b.GetUpperBound()))
				series[name+"_bucket{"+strings.Join(append(labels, le), ",")+"}"] = float64(b.GetCumulativeCount())
			}
		}
	}
	return series
}

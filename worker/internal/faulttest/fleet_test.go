package faulttest

import (
	"context"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// fleetEnv names the environment variable with the number of servers of TestAFleetSharesOneLine.
// With 200 it takes a minute, and is what docs/reference/scaling.md tells.
const fleetEnv = "SLUICE_FLEET"

// Many servers with two slots each take from one line of 500 a second. Nothing runs twice, and no
// limit is exceeded. The figures are logged.
func TestAFleetSharesOneLine(t *testing.T) {
	t.Parallel()
	servers, seconds := 20, 2
	if text := os.Getenv(fleetEnv); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("%s: %v", fleetEnv, err)
		}
		servers, seconds = n, 10
	}
	const limit, period, rate = 50, 100 * time.Millisecond, 500
	s := sitetest.New(t, throttletest.Client(t, throttletest.Redis(t)), sitetest.Shared(limit, period))
	n := rate * seconds
	var tasks []*asynq.Task
	for i := range n {
		tasks = append(tasks, worker.NewTask(worker.Identity{Tenant: "tenant" + strconv.Itoa(i%10)}, "x", nil))
	}
	for _, enqueued := range s.Client(s.AnotherLimiter(s.Redis)).EnqueueBatch(t.Context(), tasks) {
		if enqueued.Err != nil {
			t.Fatal(enqueued.Err)
		}
	}
	l, c := sitetest.NewLedger(), sitetest.Counted{}
	small := func(c *asynq.Config, _ *worker.Config) {
		c.Concurrency, c.DelayedTaskCheckInterval, c.TaskCheckInterval = 2, 0, 0
	}
	for range servers {
		s.Serve(c.Handle, l.Watch, small, s.Apart)
	}
	s.Wait("half have run", func() bool { return c.Done() >= n/2 })
	middle := loadOf(s)
	s.Wait("all have run", func() bool { return c.Done() == n })
	busy := loadOf(s).since(middle)
	c.OnceEach(t, n)
	if over := l.Excess(limit, period); over > 0 {
		t.Errorf("%d above the limit", over)
	}
	half := n - n/2
	t.Logf("%d servers, %d tasks: utilization %.3f; in the second half %.0f commands a task, %.0f us of Redis' CPU a task, %.2f of a core",
		servers, n, l.Utilization(limit, period), busy.commands/float64(half), busy.cpu*1e6/float64(half), busy.cpu/busy.seconds)
	if os.Getenv(fleetEnv) == "" {
		return
	}
	time.Sleep(2 * time.Second) // for the last to end
	before := loadOf(s)
	time.Sleep(10 * time.Second)
	idle := loadOf(s).since(before)
	t.Logf("idle: %.0f commands a second, %.3f of a core", idle.commands/10, idle.cpu/10)
}

// A load is what Redis has done.
type load struct {
	at       time.Time
	seconds  float64 // in between
	commands float64
	cpu      float64 // seconds
}

func loadOf(s *sitetest.Site) load {
	s.Helper()
	text, err := s.Redis.Info(context.Background(), "stats", "cpu").Result()
	if err != nil {
		s.Fatal(err)
	}
	number := func(name string) float64 {
		found := regexp.MustCompile(`(?m)^` + name + `:([\d.]+)`).FindStringSubmatch(text)
		if found == nil {
			s.Fatalf("INFO has no %s", name)
		}
		value, err := strconv.ParseFloat(found[1], 64)
		if err != nil {
			s.Fatal(err)
		}
		return value
	}
	return load{time.Now(), 0, number("total_commands_processed"), number("used_cpu_user") + number("used_cpu_sys")}
}

// since is what was done in between.
func (l load) since(before load) load {
	return load{l.at, l.at.Sub(before.at).Seconds(), l.commands - before.commands, l.cpu - before.cpu}
}

package queuetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// roundsEnv multiplies the rounds of the scenes with random order.
const roundsEnv = "SLUICE_SCENE_ROUNDS"

// rounds is n, times what the environment asks for.
func rounds(n int) int {
	if times, err := strconv.Atoi(os.Getenv(roundsEnv)); err == nil {
		return n * times
	}
	return n
}

// inTime is how late a task may start after the start that it was told: the last of many idle servers
// asks by then, as SPREAD of line_appointments.lua has it.
const inTime = 2 * time.Second

// notStranded is how late a task may start where time is real, and a slow machine can make the
// limiter look silent: half of the two minutes after which a task that is stranded is looked at.
const notStranded = time.Minute

// crossing runs a scene in which replies cross, for a number of rounds: in a bubble, where no slow
// machine delays a task, and a few rounds on a real Redis.
func crossing(t *testing.T, n int, policies []throttle.Policy, scene func(t *testing.T, s *sitetest.Site, n int, most time.Duration)) {
	t.Parallel()
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		s := sitetest.New(t, throttletest.Client(t, throttletest.Redis(t)), policies...)
		jittery(s)
		scene(t, s, rounds(n)/4, notStranded)
	})
	t.Run("bubble", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			s := sitetest.NewInBubble(t, policies...)
			jittery(s)
			scene(t, s, rounds(n), inTime)
		})
	})
}

// idle returns policies that guard nothing. A server asks one of its empty lines every 5 s. So
// beside 30 of them a task waits for minutes if a server wrongly holds its line to be empty.
func idle(n int) (policies []throttle.Policy) {
	for i := range n {
		policies = append(policies, throttle.Policy{
			Name:    "idle-" + strconv.Itoa(i),
			Windows: []throttle.Window{{Name: "window", Limit: 1, Period: time.Second, Scope: throttle.ScopeShared}},
		})
	}
	return policies
}

// jitter delays every reply by up to a millisecond, so that replies on several connections cross.
func jitter(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	time.Sleep(rand.N(time.Millisecond))
	return err
}

// jittery makes replies of asynq's Redis cross, for servers and clients that are made after it.
func jittery(s *sitetest.Site) { s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(jitter)) }

// jitteryLimiter returns another limiter, whose replies cross.
func jitteryLimiter(s *sitetest.Site) *throttle.Limiter {
	s.Helper()
	return s.AnotherLimiter(hooktest.Hook(jitter))
}

// A diary notes when tasks were expected to start, and when they did. A task is known by its
// payload.
type diary struct {
	mu     sync.Mutex
	tasks  map[string]*entry
	runs   int
	answer error // of the handler
}

type entry struct {
	least, most time.Time // its expected start, by the newest answer
	decisions   int
	starts      []time.Time
	started     chan struct{}
}

func newDiary() *diary { return &diary{tasks: map[string]*entry{}} }

// of returns the entry of a task. The lock is held.
func (d *diary) of(payload string) *entry {
	e := d.tasks[payload]
	if e == nil {
		now := time.Now()
		e = &entry{least: now, most: now, started: make(chan struct{})}
		d.tasks[payload] = e
	}
	return e
}

// handle is a handler.
func (d *diary) handle(_ context.Context, task *asynq.Task) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.of(string(task.Payload()))
	if e.starts = append(e.starts, time.Now()); len(e.starts) == 1 {
		close(e.started)
	}
	d.runs++
	return d.answer
}

// watch is a change for Site.Serve.
func (d *diary) watch(_ *asynq.Config, c *worker.Config) {
	c.OnDecision = func(_ context.Context, task *asynq.Task, decision throttle.Decision) {
		d.mu.Lock()
		defer d.mu.Unlock()
		e := d.of(string(task.Payload()))
		if e.decisions++; !decision.Granted {
			now := time.Now()
			e.least, e.most = now.Add(decision.RetryIn), now.Add(max(decision.RetryIn, decision.Latest))
		}
	}
}

// ran returns how often tasks have started.
func (d *diary) ran() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.runs
}

// plan enqueues a task by a client of ours. Its ID defaults to its payload.
func (d *diary) plan(client *worker.Client, task *asynq.Task, opts ...asynq.Option) error {
	payload := string(task.Payload())
	var start worker.ExpectedStart
	_, err := client.EnqueueContext(context.Background(), task,
		append([]asynq.Option{asynq.TaskID(payload), worker.ReportStart(&start)}, opts...)...)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		e := d.of(payload)
		if start.Joined && !start.Latest.IsZero() { // else nothing is known, and it may start now
			e.least, e.most = start.At, start.Latest
		}
	}
	return err
}

// enqueue is plan for a plain client.
func (d *diary) enqueue(client *asynq.Client, task *asynq.Task, opts ...asynq.Option) error {
	payload := string(task.Payload())
	_, err := client.Enqueue(task, append([]asynq.Option{asynq.TaskID(payload)}, opts...)...)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		d.of(payload)
	}
	return err
}

// await waits until a task has started, and returns how late it was. It is not ok if that is most or
// more.
func (d *diary) await(payload string, most time.Duration) (late time.Duration, ok bool) {
	for {
		d.mu.Lock()
		e := d.of(payload)
		if len(e.starts) > 0 {
			late = e.starts[0].Sub(e.most)
		} else {
			late = time.Since(e.most)
		}
		over := len(e.starts) > 0 || late >= most
		d.mu.Unlock()
		if over {
			return late, late < most
		}
		select {
		case <-e.started:
		case <-time.After(most - late): // or it was denied meanwhile, and expected later
		}
	}
}

// awaitAll waits for all tasks in the diary. The test fails for each that did not start in time, or
// started twice.
func (d *diary) awaitAll(t testing.TB, most time.Duration) {
	t.Helper()
	d.mu.Lock()
	var payloads []string
	for payload := range d.tasks {
		payloads = append(payloads, payload)
	}
	d.mu.Unlock()
	latest := time.Duration(0)
	for _, payload := range payloads {
		late, ok := d.await(payload, most)
		latest = max(latest, late)
		if !ok {
			t.Errorf("%s had not started %v after its expected start", payload, late)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for payload, e := range d.tasks {
		if len(e.starts) > 1 {
			t.Errorf("%s started %d times", payload, len(e.starts))
		}
	}
	t.Logf("%d tasks started, the latest %v after its expected start", len(payloads), latest)
}

// taskOf returns a task of a tenant with the payload TENANT-0000 for 0.
func taskOf(s *sitetest.Site, tenant string, i int, opts ...asynq.Option) *asynq.Task {
	return worker.NewTask(worker.Identity{Tenant: tenant}, "x", fmt.Appendf(nil, "%s-%04d", tenant, i), opts...)
}

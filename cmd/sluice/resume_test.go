package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/sluice/internal/jobs"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
)

// What failed runs again if that is asked for, and nothing else does.
func TestRunRetriesFailed(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		d := newDesk(t, roomy, manyJobs(3, r.URL, "")+strings.ReplaceAll(`{"id":"flaky","tenant":"a","url":"URL/flaky","max_retry":0}
{"id":"missing","tenant":"a","url":"URL/missing"}
`, "URL", r.URL))
		args := d.args("--redis", "redis://"+client.Options().Addr)
		e := runMain(t.Context(), "", args...)
		e.want(t, exitFailed, "5 jobs: 3 succeeded, 2 failed")
		if strings.Contains(e.stderr, "done before") {
			t.Errorf("something was done before the first run:\n%s", e.stderr)
		}
		runMain(t.Context(), "", args...).
			want(t, exitFailed, "5 of 5 jobs were done before, 2 of them failed: --retry-failed runs those again")

		runMain(t.Context(), "", append(args, "--retry-failed")...).want(t, exitFailed,
			"2 failed jobs run again", "3 of 5 jobs were done before\n", "5 jobs: 4 succeeded, 1 failed")
		if want := map[string]int{"/0": 1, "/1": 1, "/2": 1, "/flaky": 2, "/missing": 2}; !maps.Equal(r.calls, want) {
			t.Errorf("calls %v, want %v", r.calls, want)
		}
		known, err := jobs.ReadLog(d.path("out.jsonl"))
		if err != nil || len(known) != 5 || known["flaky"].Error != "" || known["missing"].Error != "404 Not Found" {
			t.Errorf("%v: %+v", err, known)
		}
	})
}

// Without Redis, what is in -out is known, and a torn line is not.
func TestRunGoesOnFromOut(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, roomy, manyJobs(4, r.URL, ""))
	d.write("out.jsonl", `{"id":"/0","tenant":"t0","status":200,"attempts":1,"wakes":1,"waited_ms":0,"error":""}
{"id":"/1","tenant":"t1","status":500,"attempts":4,"wakes":4,"waited_ms":0,"error":"500 Internal Server Error"}
{"id":"/2","tenant":"t0","stat`)
	runMain(t.Context(), "", d.args()...).
		want(t, exitFailed, "2 of 4 jobs were done before, 1 of them failed", "4 jobs: 3 succeeded, 1 failed")
	if results := d.results("out.jsonl"); len(results) != 4 || results["/1"].Status != 500 {
		t.Errorf("%+v", results)
	}
	if want := map[string]int{"/2": 1, "/3": 1}; !maps.Equal(r.calls, want) {
		t.Errorf("calls %v, want %v", r.calls, want)
	}
}

// What a task holds in Redis.
type payload struct {
	jobs.Job
	EnqueuedAt time.Time `json:"enqueued_at"`
}

// What an earlier run left in Redis: tasks of a worker that died, and tasks that were removed or
// changed in the jobs file.
func TestRunTakesOver(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		// asynq by itself would take the tasks back after a minute at the earliest.
		ctx, cancel := context.WithTimeout(t.Context(), 45*time.Second)
		defer cancel()
		r := newRemote(t)
		const queue = "taken"
		once := func(n int) string { // but for /1, which has a retry
			return strings.Replace(manyJobs(n, r.URL, `,"max_retry":0`), r.URL+`/1","max_retry":0`, r.URL+`/1","max_retry":1`, 1)
		}
		d := newDesk(t, roomy, once(6)+strings.ReplaceAll(`{"id":"changed","tenant":"t0","url":"URL/new"}
{"id":"known","tenant":"t0","url":"URL/known"}
`, "URL", r.URL))
		d.write("out.jsonl", `{"id":"known","tenant":"t0","status":200,"attempts":1,"wakes":1,"waited_ms":0,"error":""}`+"\n")
		list, err := jobs.Source{}.Read("before", strings.NewReader(
			once(7)+strings.ReplaceAll(`{"id":"changed","tenant":"t0","url":"URL/old"}
{"id":"known","tenant":"t0","url":"URL/known"}
`, "URL", r.URL)))
		must(t, err)
		enqueuer := asynq.NewClientFromRedisClient(client)
		for _, job := range list {
			body, _ := json.Marshal(payload{job, time.Now()})
			task := worker.NewTask(worker.Identity{Tenant: job.Tenant}, job.Type, body)
			_, err := enqueuer.Enqueue(task, asynq.MaxRetry(job.MaxRetry),
				asynq.Queue(queue), asynq.Retention(time.Hour), asynq.TaskID(job.ID))
			must(t, err)
		}
		key := "asynq:{" + queue + "}:"
		for _, id := range []string{"/0", "/1", "known"} { // as a worker leaves a task that dies with it
			client.LRem(ctx, key+"pending", 1, id)
			client.LPush(ctx, key+"active", id)
			client.ZAdd(ctx, key+"lease", redis.Z{Member: id, Score: float64(time.Now().Add(30 * time.Second).Unix())})
			client.HSet(ctx, key+"t:"+id, "state", "active")
		}

		e := runMain(ctx, "", d.args("--queue", queue, "--redis", "redis://"+client.Options().Addr)...)
		e.want(t, exitFailed, "8 jobs: 7 succeeded, 1 failed")
		results := d.results("out.jsonl")
		if len(results) != 8 || results["/0"].Error != "asynq: task lease expired, and no retry is left: the call may have been made" {
			t.Errorf("%+v", results)
		}
		if want := map[string]int{"/1": 1, "/2": 1, "/3": 1, "/4": 1, "/5": 1, "/new": 1}; !maps.Equal(r.calls, want) {
			t.Errorf("calls %v, want %v", r.calls, want)
		}
	})
}

// Two processes must not work on the same jobs.
func TestRunWaitsToBeAlone(t *testing.T) {
	t.Parallel()
	r := newRemote(t)
	d := newDesk(t, roomy, manyJobs(1, r.URL, ""))
	addr := throttletest.Miniredis(t).Addr()
	config := asynq.Config{Queues: map[string]int{"shared": 1}, LogLevel: asynq.FatalLevel}
	other := asynq.NewServer(asynq.RedisClientOpt{Addr: addr}, config)
	must(t, other.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return nil })))
	defer other.Shutdown()
	inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: addr})
	defer inspector.Close()
	for {
		if servers, err := inspector.Servers(); err != nil {
			t.Fatal(err)
		} else if len(servers) == 1 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	told := &interrupter{cancel: cancel, on: "waiting until it is known to be gone"}
	code := (&Main{Env: noEnv, Stdout: io.Discard, Stderr: told}).Run(ctx, d.args("--queue", "shared", "--redis", "redis://"+addr))
	if code != exitInterrupted || !strings.Contains(told.String(), fmt.Sprintf("process %d on ", os.Getpid())) {
		t.Errorf("exit code %d, stderr:\n%s", code, told.String())
	}
	if r.total() > 0 {
		t.Errorf("calls %v", r.calls)
	}
}

// An interrupter is a stderr that cancels when it is told something.
type interrupter struct {
	bytes.Buffer
	cancel context.CancelFunc
	on     string
}

func (i *interrupter) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(i.on)) {
		i.cancel()
	}
	return i.Buffer.Write(b)
}

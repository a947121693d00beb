package faulttest

import (
	"context"
	"crypto/sha1"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// callsOfAsynq are the calls of asynq 0.26 that move a task: the SHA-1 of the script, its keys,
// and its arguments ("task" is the encoded message, "n" a number; keys without "asynq:{QUEUE}").
var callsOfAsynq = map[string]string{
	"dequeue":          "a8153319360adc71cdc370107f8ab9786f204765 keys :pending :paused :active :lease args n | :t:",
	"forward":          "522b1a6ae66fe79ea2f24a9af58798ab71879035 keys :scheduled :pending args n | :t: | n | :g:",
	"forward retry":    "522b1a6ae66fe79ea2f24a9af58798ab71879035 keys :retry :pending args n | :t: | n | :g:",
	"retry":            "65fa409c88198a681c53e0892d8276eca0145694 keys :t:ID :active :lease :retry :processed:* :failed:* :processed :failed args ID | task | n | n | bool | n",
	"archive":          "9c3b1eb9947ce2ee5304ac013a0a365ec364fd2d keys :t:ID :active :lease :archived :processed:* :failed:* :processed :failed :t: args ID | task | n | n | n | n | n",
	"done":             "1241eaa1c73409baaf1fea0c08d203a4911bda15 keys :active :lease :t:ID :processed:* :processed args ID | n | n",
	"done, unique":     "a2631c71357a54b4c3e7450b1757e7f3f49d6c81 keys :active :lease :t:ID :processed:* :processed :unique:done, unique: args ID | n | n",
	"complete":         "117dca952700588e559c7ace20b925096d587974 keys :active :lease :completed :t:ID :processed:* :processed args ID | n | n | task | n",
	"complete, unique": "ce6833ccce362a8c0ee53beee413341daf52e39c keys :active :lease :completed :t:ID :processed:* :processed :unique:complete, unique: args ID | n | n | task | n",
	"requeue":          "f34cbfd11d1fc8019af55b50c447fc68eb8b29e5 keys :active :lease :pending :t:ID args ID",
}

// The hook knows asynq's calls by their shape, and our scripts do in place of them what they do to
// the task's keys. An asynq that calls otherwise is not safe to use before somebody has looked.
func TestCallsOfAsynq(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	recorder := &recorder{calls: map[string]string{}}
	server := asynq.NewServer(hooktest.With(s.Asynq, hooktest.Hook(recorder.see)), asynq.Config{
		Concurrency: 1, DelayedTaskCheckInterval: 10 * time.Millisecond, LogLevel: asynq.FatalLevel, TaskCheckInterval: 10 * time.Millisecond, ShutdownTimeout: time.Millisecond,
	})
	stuck, isStuck := make(chan struct{}), make(chan struct{})
	defer close(stuck)
	if err := server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		switch task.Type() {
		case "retry", "archive":
			return errors.New("boom")
		case "requeue":
			close(isStuck)
			<-stuck
		}
		return nil
	})); err != nil {
		t.Fatal(err)
	}
	for name, opts := range map[string][]asynq.Option{
		"retry":            {asynq.MaxRetry(1)},
		"archive":          {asynq.MaxRetry(0)},
		"done":             {},
		"done, unique":     {asynq.Unique(time.Hour)},
		"complete":         {asynq.Retention(time.Hour)},
		"complete, unique": {asynq.Retention(time.Hour), asynq.Unique(time.Hour)},
	} {
		s.Enqueue(asynq.NewTask(name, nil), append(opts, asynq.TaskID("id of "+name))...)
		s.Wait(name+" was called", func() bool { return recorder.has(name) })
	}
	s.Enqueue(asynq.NewTask("requeue", nil), asynq.TaskID("id of requeue"))
	<-isStuck
	s.Wait("tasks were forwarded", func() bool { return recorder.has("forward") && recorder.has("forward retry") })
	server.Shutdown()

	for name, want := range callsOfAsynq {
		if got := recorder.calls[name]; got != want {
			t.Errorf("asynq calls %s otherwise than the hook expects:\n got %s\nwant %s\n"+
				"Compare its script in asynq's internal/rdb/rdb.go with that of v0.26.0. Then see to\n"+
				" - shapes in internal/asynqredis/calls.go: are the first keys still these, and the ID the first argument (for dequeue: is the reply the encoded task; for forward: the number of tasks moved)?\n"+
				" - the scripts in internal/asynqredis/lua: do they still do what asynq's do, and undo it?\n"+
				" - internal/asynqredis/message.go: does internal/proto/asynq.proto still number its fields so?\n"+
				"and write the new call here.", name, got, want)
		}
	}
	for name, got := range recorder.calls {
		if callsOfAsynq[name] == "" {
			t.Errorf("asynq makes a call that is not known here: %s: %s", name, got)
		}
	}
}

// A recorder notes the script calls that concern a queue's active tasks, by the type of the task.
type recorder struct {
	mu    sync.Mutex
	calls map[string]string
}

func (r *recorder) has(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls[name] != ""
}

var date = regexp.MustCompile(`\d{4}-\d\d-\d\d|[0-9a-f]{32}`)

func (r *recorder) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	args := cmd.Args()
	if err != nil || args[0] != "evalsha" && args[0] != "eval" {
		return err
	}
	sha := args[1].(string)
	if args[0] == "eval" {
		sha = fmt.Sprintf("%x", sha1.Sum([]byte(sha)))
	}
	n := args[2].(int)
	name, known := "dequeue", false
	var keys, argv []string
	for _, key := range args[3 : 3+n] {
		known = known || key == "asynq:{default}:active"
		keys = append(keys, date.ReplaceAllString(key.(string), "*"))
	}
	for _, arg := range args[3+n:] {
		switch arg := arg.(type) {
		case []byte:
			argv = append(argv, "task")
		case string:
			if arg == "asynq:{default}:g:" {
				if name, known = "forward", true; args[3] == "asynq:{default}:retry" {
					name = "forward retry"
				}
			}
			if id, ok := strings.CutPrefix(arg, "id of "); ok {
				name = id
			}
			argv = append(argv, arg)
		case int, int64:
			argv = append(argv, "n")
		default:
			argv = append(argv, fmt.Sprintf("%T", arg))
		}
	}
	call := fmt.Sprintf("%s keys %s args %s", sha, strings.Join(keys, " "), strings.Join(argv, " | "))
	if known {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.calls[name] = strings.ReplaceAll(strings.ReplaceAll(call, "asynq:{default}:", ":"), "id of "+name, "ID")
	}
	return err
}

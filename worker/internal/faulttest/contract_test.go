package faulttest

import (
	"context"
	"crypto/sha1"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// callsOfAsynq are the calls of asynq 0.26 that move a task: the SHA-1 of the script, its keys,
// and its arguments ("task" is the encoded message; keys without "asynq:{QUEUE}").
var callsOfAsynq = map[string]string{
	"dequeue": "a8153319360adc71cdc370107f8ab9786f204765 " + "keys :pending :paused :active :lease args int64 | :t:",
	"forward scheduled": "522b1a6ae66fe79ea2f24a9af58798ab71879035 " +
		"keys :scheduled :pending args int64 | :t: | int64 | :g:",
	"forward retry": "522b1a6ae66fe79ea2f24a9af58798ab71879035 " +
		"keys :retry :pending args int64 | :t: | int64 | :g:",
	"retry": "65fa409c88198a681c53e0892d8276eca0145694 " +
		"keys :t:ID :active :lease :retry :processed:* :failed:* :processed :failed " +
		"args ID | task | int64 | int64 | bool | int64",
	"archive": "9c3b1eb9947ce2ee5304ac013a0a365ec364fd2d " +
		"keys :t:ID :active :lease :archived :processed:* :failed:* :processed :failed :t: " +
		"args ID | task | int64 | int64 | int | int64 | int64",
	"done": "1241eaa1c73409baaf1fea0c08d203a4911bda15 " +
		"keys :active :lease :t:ID :processed:* :processed args ID | int64 | int64",
	"done, unique": "a2631c71357a54b4c3e7450b1757e7f3f49d6c81 " +
		"keys :active :lease :t:ID :processed:* :processed :unique:TYPE: args ID | int64 | int64",
	"complete": "117dca952700588e559c7ace20b925096d587974 " +
		"keys :active :lease :completed :t:ID :processed:* :processed args ID | int64 | int64 | task | int64",
	"complete, unique": "ce6833ccce362a8c0ee53beee413341daf52e39c " +
		"keys :active :lease :completed :t:ID :processed:* :processed :unique:TYPE: " +
		"args ID | int64 | int64 | task | int64",
	"requeue": "f34cbfd11d1fc8019af55b50c447fc68eb8b29e5 " + "keys :active :lease :pending :t:ID args ID",
}

// The hook knows asynq's calls by their shape, and our scripts do instead of them what they do to
// the task's keys. An asynq that calls otherwise is not safe to use before somebody has looked.
func TestCallsOfAsynq(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	recorder := newCallRecorder()
	server := asynq.NewServer(hooktest.With(s.Asynq, hooktest.Hook(recorder.see)), asynq.Config{
		Concurrency: 1, LogLevel: asynq.FatalLevel, ShutdownTimeout: time.Millisecond,
		DelayedTaskCheckInterval: 10 * time.Millisecond, TaskCheckInterval: 10 * time.Millisecond,
	})
	stuck, isStuck := make(chan struct{}), make(chan struct{})
	defer close(stuck)
	expect.Must(t, server.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		switch task.Type() {
		case "retry", "archive":
			return errors.New("boom")
		case "requeue":
			close(isStuck)
			<-stuck
		}
		return nil
	})))
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
	s.Wait("tasks were forwarded", func() bool { return recorder.has("forward scheduled") && recorder.has("forward retry") })
	server.Shutdown()

	recorder.wantCalls(t, callsOfAsynq, " - shapes in internal/asynqredis/calls.go: are the first keys still these, "+
		"and the ID the first argument (for dequeue: is the reply the encoded task; "+
		"for forward: the number of tasks moved)?\n"+
		" - the scripts in internal/asynqredis/lua: do they still do what asynq's do, and undo it?\n"+
		" - internal/asynqredis/message.go: does internal/proto/asynq.proto still number its fields so?")
}

// wantCalls fails unless just these calls were recorded. It says what to see to where one differs.
func (r *callRecorder) wantCalls(t *testing.T, want map[string]string, seeTo string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, want := range want {
		if got := r.calls[name]; got != want {
			t.Errorf("asynq calls %s otherwise than is expected:\n got %s\nwant %s\n"+
				"Compare its script in asynq's internal/rdb with that of v0.26.0. "+
				"Then see to\n%s\nand write the new call here.", name, got, want, seeTo)
		}
	}
	for name, got := range r.calls {
		expect.That(t, want[name] != "", "asynq makes a call that is not known here:", name, got)
	}
}

// A callRecorder notes script calls that concern a task or the active ones. A task's ID is "id of NAME", its type NAME.
type callRecorder struct {
	mu    sync.Mutex
	calls map[string]string
}

func newCallRecorder() *callRecorder { return &callRecorder{calls: map[string]string{}} }

func (r *callRecorder) has(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls[name] != ""
}

var date = regexp.MustCompile(`\d{4}-\d\d-\d\d|[0-9a-f]{32}`)

func (r *callRecorder) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	err := next(ctx, cmd)
	if err != nil || !hooktest.IsScript(cmd) {
		return err
	}
	args := cmd.Args()
	sha := args[1].(string)
	if cmd.Name() == "eval" {
		sha = fmt.Sprintf("%x", sha1.Sum([]byte(sha)))
	}
	name, texts := "", make([]string, len(args)-3) // keys, and arguments
	for i, arg := range args[3:] {
		switch arg := arg.(type) {
		case []byte:
			texts[i] = "task"
		case string:
			texts[i] = date.ReplaceAllString(arg, "*")
			if id, ok := strings.CutPrefix(arg, "id of "); ok {
				name = id
			}
		default:
			texts[i] = fmt.Sprintf("%T", arg)
		}
	}
	n := args[2].(int)
	switch {
	case name != "":
	case slices.Contains(texts[:n], "asynq:{default}:active"):
		name = "dequeue"
	case slices.Contains(texts[n:], "asynq:{default}:g:"):
		name = "forward " + strings.TrimPrefix(texts[0], "asynq:{default}:")
	default:
		return nil
	}
	call := fmt.Sprintf("%s keys %s args %s", sha, strings.Join(texts[:n], " "), strings.Join(texts[n:], " | "))
	r.mu.Lock()
	defer r.mu.Unlock()
	short := strings.NewReplacer("id of "+name, "ID", "asynq:{default}:unique:"+name+":", ":unique:TYPE:", "asynq:{default}:", ":")
	r.calls[name] = short.Replace(call)
	return nil
}

// callsOfAsynqsClient are the calls of asynq 0.26 that enqueue a task, and that of
// Inspector.RunTask: the SHA-1 of the script, its keys and its arguments, as in callsOfAsynq.
var callsOfAsynqsClient = map[string]string{
	"enqueue":          "98d28b42650870a743450ffda9791e9e19c6991b keys :t:ID :pending args task | ID | int64",
	"enqueue, unique":  "297b3f9abfd963a3316434ef9d88fc5bf8a7ddc3 keys :unique:TYPE: :t:ID :pending args ID | int | task | int64",
	"schedule":         "8ce6b38a99b73194585c251eb3c2a89559f37a87 keys :t:ID :scheduled args task | int64 | ID",
	"schedule, unique": "e9b8aa859a976a1fce09eaf723b4fccd02ba799e keys :unique:TYPE: :t:ID :scheduled args ID | int | int64 | task",
	"run":              "2fb646810e3433bbe85fba1a6b407eb3eced7b63 keys :t:ID :pending :groups args ID | : | :g:",
}

// The client's hook knows asynq's calls by their shape, and our scripts do what asynq does to a
// task's keys. An asynq that calls otherwise is not safe to use before somebody has looked.
func TestCallsOfAsynqsClient(t *testing.T) {
	t.Parallel()
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	recorder := newCallRecorder()
	client := asynq.NewClient(hooktest.With(s.Asynq, hooktest.Hook(recorder.see)))
	defer client.Close()
	inspector := asynq.NewInspector(hooktest.With(s.Asynq, hooktest.Hook(recorder.see)))
	defer inspector.Close()
	for name, opts := range map[string][]asynq.Option{
		"enqueue":          {},
		"enqueue, unique":  {asynq.Unique(time.Hour)},
		"schedule":         {asynq.ProcessIn(time.Hour)},
		"schedule, unique": {asynq.ProcessIn(time.Hour), asynq.Unique(time.Hour)},
		"run":              {asynq.ProcessIn(time.Hour)},
	} {
		expect.Must(t, expect.ErrOf(client.Enqueue(asynq.NewTask(name, nil), append(opts, asynq.TaskID("id of "+name))...)))
	}
	expect.Must(t, inspector.RunTask("default", "id of run"))
	recorder.wantCalls(t, callsOfAsynqsClient, " - EnqueueOf in internal/asynqredis/calls.go: are the keys and arguments still these?\n"+
		" - internal/asynqredis/lua/store.lua: does it still leave a task as schedule does? move.lua: as enqueue does?")
}

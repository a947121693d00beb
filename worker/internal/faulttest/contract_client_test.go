package faulttest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

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
	recorder := newRecorder()
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
		if _, err := client.Enqueue(asynq.NewTask(name, nil), append(opts, asynq.TaskID("id of "+name))...); err != nil {
			t.Fatal(err)
		}
	}
	sitetest.Must(t, inspector.RunTask("default", "id of run"))
	recorder.wantCalls(t, callsOfAsynqsClient, " - EnqueueOf in internal/asynqredis/calls.go: are the keys and arguments still these?\n"+
		" - internal/asynqredis/lua/store.lua: does it still leave a task as schedule does? arrange.lua: as enqueue does?")
}

// What the client's hook recognises joins a line, and what it does not goes through: of the calls
// above, the enqueues are ours, and a schedule stays asynq's.
func TestClientRecognisesAsynqsCalls(t *testing.T) {
	t.Parallel()
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Shared(1, time.Hour))
	client := s.Client(s.Limiter)
	s.JoinMany(client, "acme", 0, 1)
	for i, row := range []struct {
		opts   []asynq.Option
		inLine bool
	}{
		{nil, true},
		{[]asynq.Option{asynq.Unique(time.Hour)}, true},
		{[]asynq.Option{asynq.ProcessIn(time.Hour)}, false},
		{[]asynq.Option{asynq.ProcessIn(time.Hour), asynq.Unique(2 * time.Hour)}, false},
		{[]asynq.Option{asynq.Group("some")}, false},
	} {
		id := fmt.Sprint("t", i)
		task := sitetest.AcmeTask()
		if i == 3 {
			task = asynq.NewTaskWithHeaders("y", nil, task.Headers())
		}
		if _, err := client.EnqueueContext(t.Context(), task, append(row.opts, asynq.TaskID(id))...); err != nil {
			t.Fatal(err)
		}
		if got := slices.Contains(s.InLine(), "default/"+id); got != row.inLine {
			t.Errorf("%v: in line: %v", row.opts, got)
		}
	}
}

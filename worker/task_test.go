package worker_test

import (
	"bytes"
	"reflect"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
)

func FuzzIdentityComesBack(f *testing.F) {
	f.Add("acme", "user", "bob", "tokens", int64(1500))
	f.Add("", "", "", "", int64(0))
	f.Add("a b+c%2F\xff", "=&;", "\x00%", "u&=", int64(-1))
	f.Add("テナント", "\xfe", "", "%zz", int64(1<<62))
	f.Fuzz(func(t *testing.T, tenant, attribute, value, unit string, n int64) {
		want := worker.Identity{
			Attributes: map[string]string{attribute: value, "more": "x"},
			Cost:       map[string]int64{unit: n},
			Tenant:     tenant,
		}
		task := worker.NewTask(want, "x", []byte("payload"))
		for name, value := range task.Headers() {
			if !utf8.ValidString(value) {
				t.Errorf("header %s %q is not valid UTF-8", name, value)
			}
		}
		got, err := worker.IdentityOf(task)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%#v comes back as %#v, %v", want, got, err)
		}
	})
}

func TestNoIdentityNoHeaders(t *testing.T) {
	if headers := worker.NewTask(worker.Identity{}, "x", nil).Headers(); len(headers) != 0 {
		t.Errorf("headers %v", headers)
	}
	if id, err := worker.IdentityOf(asynq.NewTask("x", nil)); err != nil || !reflect.DeepEqual(id, worker.Identity{}) {
		t.Errorf("a plain task has the identity %+v, %v", id, err)
	}
}

// A task may be denied thousands of times.
func TestMessagesDoNotGrow(t *testing.T) {
	message := worker.WithError([]byte("\x0a\x01x\x1a\x01a"), "one", time.Unix(1_800_000_000, 0))
	for range 10 {
		if again := worker.WithError(message, "two", time.Unix(1_800_000_001, 0)); len(again) != len(message) || !bytes.Contains(again, []byte("two")) {
			t.Fatalf("%q becomes %q", message, again)
		}
	}
	if got := worker.WithError([]byte("\x0a\x09x"), "one", time.Now()); string(got) != "\x0a\x09x" {
		t.Errorf("what is no message becomes %q", got)
	}
}

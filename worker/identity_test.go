package worker_test

import (
	"reflect"
	"testing"
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

func TestATaskWithoutAnIdentityHasNoHeaders(t *testing.T) {
	if headers := worker.NewTask(worker.Identity{}, "x", nil).Headers(); len(headers) != 0 {
		t.Errorf("headers %v", headers)
	}
	if id, err := worker.IdentityOf(asynq.NewTask("x", nil)); err != nil || !reflect.DeepEqual(id, worker.Identity{}) {
		t.Errorf("a plain task has the identity %+v, %v", id, err)
	}
}

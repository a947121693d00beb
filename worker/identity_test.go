package worker_test

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
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

// The handler sees the decision, and a name of any bytes arrives as it was given.
func TestIdentityReachesTheHandler(t *testing.T) {
	p := policy(100, time.Hour)
	p.Match = []string{"x"}
	p.Windows = append(p.Windows, throttle.Window{Name: "tokens", Limit: 1000, Period: time.Hour, Unit: "tokens", Scope: throttle.Per("user")})
	id := worker.Identity{
		Attributes: map[string]string{"user": "b&=%\x00\xff;b", "ip": "::1"},
		Cost:       map[string]int64{"tokens": 300},
		Tenant:     "a}{:\n%2F \xfe\xffc",
	}
	each(t, []throttle.Policy{p}, func(t *testing.T, s *site) {
		got := make(chan throttle.Decision, 2)
		s.enqueue(worker.NewTask(id, "x", nil))
		s.enqueue(asynq.NewTask("unmatched", nil))
		unmatched := make(chan bool, 1)
		s.serve(func(ctx context.Context, task *asynq.Task) error {
			d, ok := worker.FromContext(ctx).Decision()
			if task.Type() == "unmatched" {
				unmatched <- ok
			} else {
				got <- d
			}
			return nil
		})
		d := <-got
		if !d.Granted || d.Tenant != id.Tenant || d.Policy != "api" || d.Windows[0].Used != 1 || d.Windows[1].Used != 300 ||
			d.Windows[1].Scope.Values[0] != id.Attributes["user"] {
			t.Errorf("decision %+v", d)
		}
		if ticket := d.Reservation.Ticket; !strings.HasSuffix(ticket.Queue, "/default") || len(ticket.ID) < 20 {
			t.Errorf("ticket %q, want queue and task ID", ticket)
		}
		if <-unmatched {
			t.Error("an unmatched task has a decision")
		}
	})
}

func TestTheUsersFunctionsIdentifyATask(t *testing.T) {
	p := policy(10, time.Hour)
	p.Windows[0].Scope = throttle.Per("region")
	each(t, []throttle.Policy{p}, func(t *testing.T, s *site) {
		s.enqueue(asynq.NewTask("x", []byte("eu")))
		s.serve(s.ok, func(_ *asynq.Config, c *worker.Config) {
			c.Attributes = func(task *asynq.Task) map[string]string { return map[string]string{"region": string(task.Payload())} }
			c.Cost = func(*asynq.Task) map[string]int64 { return map[string]int64{"requests": 7} }
			c.Tenant = func(*asynq.Task) string { return "acme" }
		})
		s.wait("it ran", func() bool { return len(s.runs()) == 1 })
		s.mu.Lock()
		defer s.mu.Unlock()
		if d := s.decisions[0]; d.Windows[0].Used != 7 || d.Windows[0].Scope.String() != "region=eu" {
			t.Errorf("decision %+v", d)
		}
	})
}

package worker_test

import (
	"context"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
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
			expect.That(t, utf8.ValidString(value), "header", name, value, "is not valid UTF-8")
		}
		got, err := worker.IdentityOf(task)
		expect.That(t, err == nil && reflect.DeepEqual(got, want), want, "comes back as", got, err)
	})
}

func TestATaskWithoutAnIdentityHasNoHeaders(t *testing.T) {
	headers := worker.NewTask(worker.Identity{}, "x", nil).Headers()
	expect.That(t, len(headers) == 0, "headers", headers)
	id, err := worker.IdentityOf(asynq.NewTask("x", nil))
	expect.That(t, err == nil && reflect.DeepEqual(id, worker.Identity{}), id, err)
}

// The handler sees the decision, and a name of any bytes arrives as it was given.
func TestIdentityReachesTheHandler(t *testing.T) {
	p := sitetest.Policy(100, time.Hour)
	p.Match = []string{"x"}
	p.Windows = append(p.Windows, throttle.Window{Name: "tokens", Limit: 1000, Period: time.Hour, Unit: "tokens", Per: []string{"user"}})
	id := worker.Identity{
		Attributes: map[string]string{"user": "b&=%\x00\xff;b", "ip": "::1"},
		Cost:       map[string]int64{"tokens": 300},
		Tenant:     "a}{:\n%2F \xfe\xffc",
	}
	s := sitetest.OnRedis(t, p)
	got := make(chan throttle.Decision, 2)
	s.Enqueue(worker.NewTask(id, "x", nil))
	s.Enqueue(asynq.NewTask("unmatched", nil))
	unmatched := make(chan bool, 1)
	s.Serve(func(ctx context.Context, task *asynq.Task) error {
		d, ok := worker.FromContext(ctx).Decision()
		if task.Type() == "unmatched" {
			unmatched <- ok
		} else {
			got <- d
		}
		return nil
	})
	d := <-got
	if !d.Granted || d.Tenant != id.Tenant || d.Policy != "api" || d.Windows[0].Used < 1 || d.Windows[1].Used != 300*d.Windows[0].Used ||
		d.Windows[1].Scope.Values[0] != id.Attributes["user"] {
		t.Errorf("decision %+v", d)
	}
	ticket := d.Reservation.Ticket
	expect.That(t, strings.HasSuffix(ticket.Queue, "/default") && len(ticket.ID) >= 20, ticket)
	expect.That(t, !<-unmatched, "an unmatched task has a decision")
}

// Any headers of a task give an identity that comes back as it is, or an error that asynq can store.
func FuzzHeaders(f *testing.F) {
	for _, seed := range []string{
		"", "tenant=acme&attribute.user=bob&attribute.ip=10.0.0.1&cost.requests=1&cost.tokens=1500",
		"tenant=%zz", "attribute.%zz=1", "cost.requests=%zz",
		"tenant=%2541", "attribute.a=%2541", "cost.%2541=1",
		"tenant=%FF%00", "attribute.a=%FF&attribute.a=2&attribute.=&attribute.;", "cost.requests=1;cost.tokens=2",
		"tenant=\xff", "attribute.\xff=\xfe", "cost.\xff=1", "attribute.user", "cost.requests", "attribute", "cost=1", "=",
		"cost.requests=1.5", "cost.requests=NaN", "cost.requests=-1", "cost.requests=+1",
		"cost.requests=9223372036854775808", "cost.requests=1e9", "cost.tokens=1&cost.tokens=2",
		strings.Repeat("x", 2000), strings.Repeat("attribute.a=b&", 2000), strings.Repeat("&", 2000),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		headers := map[string]string{"sluice-identity": text}
		id, err := worker.IdentityOf(asynq.NewTaskWithHeaders("x", nil, headers))
		if err != nil {
			expect.That(t, utf8.ValidString(err.Error()) && !strings.ContainsAny(err.Error(), "\n\x00") && id.Tenant == "", headers, id, err)
			return
		}
		again, err := worker.IdentityOf(worker.NewTask(id, "x", nil))
		same := err == nil && id.Tenant == again.Tenant && maps.Equal(id.Attributes, again.Attributes)
		expect.That(t, same && maps.Equal(id.Cost, again.Cost), headers, id, "comes back as", again, err)
	})
}

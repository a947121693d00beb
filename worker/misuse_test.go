package worker_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A limit below zero is refused, or what it says.
func TestOptionsBelowZero(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()), sitetest.Policy(1, time.Hour))
	client, err := worker.NewClient(s.Asynq, worker.ClientConfig{Limiter: s.Limiter})
	sitetest.Must(t, err)
	defer client.Close()
	var invalid *throttle.RequestError
	if _, err := client.Enqueue(sitetest.AcmeTask(), worker.Backlog(-1)); !errors.As(err, &invalid) {
		t.Errorf("a backlog of -1: %v", err)
	}
	if _, err := client.Enqueue(sitetest.AcmeTask(), worker.MaxWait(-1), worker.ReportStart(nil)); err != nil {
		t.Errorf("it fits at once: %v", err)
	}
	var late *throttle.TooLateError
	if _, err := client.Enqueue(sitetest.AcmeTask(), worker.MaxWait(-1)); !errors.As(err, &late) {
		t.Errorf("it does not fit: %v", err)
	}
	if _, err := client.Enqueue(sitetest.AcmeTask(), worker.MaxWait(-1), asynq.Group("g")); err == nil {
		t.Error("a task of a group never joins")
	}
}

// asynq's manager enqueues as a plain client, which would ignore our options.
func TestPeriodicTasksTakeNoOptionsOfOurs(t *testing.T) {
	if _, err := worker.PeriodicTask("@hourly", nil); err == nil {
		t.Error("no task")
	}
	if _, err := worker.PeriodicTask("@hourly", sitetest.AcmeTask(), worker.MaxWait(time.Hour)); err == nil ||
		!strings.Contains(err.Error(), "option MaxWait(1h0m0s)") {
		t.Errorf("an option of the call: %v", err)
	}
}

// What is missing is named.
func TestNilIsAnError(t *testing.T) {
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	_, dropped := worker.Drop(t.Context(), s.Asynq, nil, worker.DropOptions{Policy: "api", Tenant: "acme"})
	_, identity := worker.IdentityOf(nil)
	_, request := s.Client(s.Limiter).RequestOf(nil)
	for want, err := range map[string]error{
		"worker: Drop: the limiter is nil: must be what throttle.New returns": dropped,
		"worker: IdentityOf: task is nil":                                     identity,
		"worker: RequestOf: task is nil":                                      request,
	} {
		if err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

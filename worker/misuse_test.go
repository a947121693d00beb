package worker_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/inspect"
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

// What was declared and never made says so, and nil is an error.
func TestWhatWasNeverMadeSaysSo(t *testing.T) {
	var server worker.Server
	server.Stop()
	server.Shutdown()
	var client worker.Client
	_, enqueue := client.Enqueue(sitetest.AcmeTask())
	_, explain := client.Explain(t.Context(), "default", "t")
	_, requestOf := client.RequestOf(sitetest.AcmeTask())
	_, plan := client.Plan(t.Context(), nil, inspect.PlanOptions{})
	_, clientCheck := client.CheckRedis(t.Context())
	_, serverCheck := server.CheckRedis(t.Context())
	const zeroClient, zeroServer = "worker: a Client must be made by NewClient", "worker: a Server must be made by NewServer"
	s := sitetest.New(t, throttletest.Client(t, throttletest.Miniredis(t).Addr()))
	_, dropped := worker.Drop(t.Context(), s.Asynq, nil, worker.DropOptions{Policy: "api", Tenant: "acme"})
	_, identity := worker.IdentityOf(nil)
	_, nilTask := s.Client(s.Limiter).RequestOf(nil)
	for name, row := range map[string]struct {
		got  error
		want string
	}{
		"Server.Start":        {server.Start(asynq.NewServeMux()), zeroServer},
		"Server.Run":          {server.Run(asynq.NewServeMux()), zeroServer},
		"Client.Enqueue":      {enqueue, zeroClient},
		"Client.EnqueueBatch": {client.EnqueueBatch(t.Context(), []*asynq.Task{sitetest.AcmeTask()})[0].Err, zeroClient},
		"Client.Explain":      {explain, zeroClient},
		"Client.RequestOf":    {requestOf, zeroClient},
		"Client.Plan":         {plan, zeroClient},
		"Client.Ping":         {client.Ping(), zeroClient},
		"Client.CheckRedis":   {clientCheck, zeroClient},
		"Server.Ping":         {server.Ping(), zeroServer},
		"Server.CheckRedis":   {serverCheck, zeroServer},
		"Drop":                {dropped, "worker: Drop: the limiter is nil: must be what throttle.New returns"},
		"IdentityOf":          {identity, "worker: IdentityOf: task is nil"},
		"RequestOf":           {nilTask, "worker: RequestOf: task is nil"},
	} {
		if row.got == nil || row.got.Error() != row.want {
			t.Errorf("%s: %v, want %s", name, row.got, row.want)
		}
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
}

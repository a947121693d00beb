package worker_test

import (
	"errors"
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
	if err != nil {
		t.Fatal(err)
	}
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

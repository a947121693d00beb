package main

import (
	"slices"
	"testing"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

func TestWaitingTasks(t *testing.T) {
	t.Parallel()
	client := throttletest.Client(t, throttletest.Redis(t))
	limiter := expect.Got(throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{soakPolicy()}}))(t)
	ids := []string{"!x", "0b6e1a5c-7d1f-4c0e-9a53-1f0e2d3c4b5a", "a/b c%20", "task-00001"}
	var requests []throttle.Request
	for _, id := range ids {
		requests = append(requests, throttle.Request{Tenant: "acme", Ticket: throttle.Ticket{Queue: "redis%2F" + queue, ID: id}})
	}
	places := expect.Got(limiter.Line(policyName).Join(t.Context(), requests))(t)
	for _, p := range places {
		expect.Must(t, p.Err)
	}
	got, err := waitingTasks(t.Context(), client)
	slices.Sort(got)
	expect.That(t, err == nil && slices.Equal(got, ids), got, "wait", err, "want", ids)
}

package sitetest

import (
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/worker"
)

// AcmeTask is a task of the tenant acme.
func AcmeTask(opts ...asynq.Option) *asynq.Task {
	return worker.NewTask(worker.Identity{Tenant: "acme"}, "x", nil, opts...)
}

// Off says that two times differ by more than a machine may be slow.
func Off(a, b time.Time) bool { return a.Sub(b).Abs() > 20*time.Second }

// Task is a task of a tenant, with a cost if one is given.
func Task(tenant string, cost ...map[string]int64) *asynq.Task {
	id := worker.Identity{Tenant: tenant}
	if len(cost) > 0 {
		id.Cost = cost[0]
	}
	return worker.NewTask(id, "x", nil)
}

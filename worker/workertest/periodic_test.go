package workertest_test

import (
	"context"
	"log"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/workertest"
)

// tenants is a provider of one periodic task for each of them.
type tenants struct {
	mu    sync.Mutex
	names []string
}

func (p *tenants) GetConfigs() (configs []*asynq.PeriodicTaskConfig, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, tenant := range p.names {
		task := worker.NewTask(worker.Identity{Tenant: tenant}, "report:refresh", []byte(tenant))
		configs = append(configs, &asynq.PeriodicTaskConfig{
			Cronspec: "*/10 * * * *", Task: task, Opts: []asynq.Option{asynq.Queue("reports")},
		})
	}
	return configs, nil
}

func (p *tenants) set(names ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.names = names
}

func startManager(redisOpt asynq.RedisConnOpt, provider asynq.PeriodicTaskConfigProvider) *asynq.PeriodicTaskManager {
	manager, err := asynq.NewPeriodicTaskManager(asynq.PeriodicTaskManagerOpts{
		PeriodicTaskConfigProvider: provider,
		RedisConnOpt:               redisOpt,
		SyncInterval:               time.Minute, // how soon a new tenant is known
		SchedulerOpts:              &asynq.SchedulerOpts{LogLevel: asynq.FatalLevel},
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := manager.Start(); err != nil {
		log.Fatal(err)
	}
	return manager
}

// asynq's PeriodicTaskManager enqueues for each tenant, and follows who comes and goes. The tasks share the limit.
func TestPeriodicTasksOfTenants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := workertest.Start(t, workertest.Config{
			Asynq:   asynq.Config{Queues: map[string]int{"reports": 1}, TaskCheckInterval: 5 * time.Second},
			Handler: asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return nil }),
			Policies: []throttle.Policy{{
				Name: "reports", Match: []string{"report:*"},
				Windows: []throttle.Window{{Name: "w", Limit: 1, Period: 10 * time.Second, Shared: true}},
			}},
		})
		var provider tenants
		provider.set("acme", "beta")
		manager := startManager(w.Memory, &provider)
		defer manager.Shutdown()
		ran := func(after int) (tenants []string) {
			for _, run := range w.Runs()[after:] {
				tenants = append(tenants, run.Decision.Tenant)
			}
			slices.Sort(tenants)
			return tenants
		}
		time.Sleep(12 * time.Minute) // it was midnight
		expect.Require(t, slices.Equal(ran(0), []string{"acme", "beta"}), "tasks ran of", ran(0))
		runs := w.Runs()
		expect.Equal(t, runs[1].Start.Sub(runs[0].Start).Round(time.Millisecond), 10*time.Second, "they ran apart by")
		provider.set("beta", "gamma")
		time.Sleep(10 * time.Minute)
		expect.Equal(t, ran(2), []string{"beta", "gamma"}, "then tasks ran of")
	})
}

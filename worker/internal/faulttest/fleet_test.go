package faulttest

import (
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle/throttletest"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Many servers with two slots each take from one line of 500 a second. Nothing runs twice, and no
// limit is exceeded.
func TestAFleetSharesOneLine(t *testing.T) {
	t.Parallel()
	const servers, limit, period, n = 20, 50, 100 * time.Millisecond, 1000
	s := sitetest.New(t, throttletest.Client(t, throttletest.Redis(t)), sitetest.Shared(limit, period))
	var tasks []*asynq.Task
	for i := range n {
		tasks = append(tasks, worker.NewTask(worker.Identity{Tenant: "tenant" + strconv.Itoa(i%10)}, "x", nil))
	}
	for _, enqueued := range s.Client(s.AnotherLimiter()).EnqueueBulk(t.Context(), tasks) {
		if enqueued.Err != nil {
			t.Fatal(enqueued.Err)
		}
	}
	l, c := sitetest.NewLedger(), sitetest.Counted{}
	var all []*worker.Server
	two := func(c *asynq.Config, _ *worker.Config) { c.Concurrency = 2 }
	for range servers {
		all = append(all, s.Serve(c.Handle, l.Watch, sitetest.Calm, s.Apart, two))
	}
	s.Wait("all have run", func() bool { return c.Done() == n })
	c.OnceEach(t, n)
	if over := l.Excess(limit, period); over > 0 {
		t.Errorf("%d above the limit", over)
	}
	var ended sync.WaitGroup // one after the other they would take half a minute
	for _, server := range all {
		ended.Go(server.Shutdown)
	}
	ended.Wait()
	t.Logf("utilization %.3f", l.Utilization(limit, period))
}

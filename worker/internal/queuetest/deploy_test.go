package queuetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// In a rolling deploy, two servers of the old version and two of the new one serve tasks of old and new clients
// together. All tasks run at the pace of the limits, whatever their policy was when they joined.
func TestARollingDeployKeepsTasksInLine(t *testing.T) {
	perTenant := throttle.Window{Name: "own", Limit: 20, Period: time.Second}
	user := throttle.Window{Name: "user", Limit: 5, Period: time.Second, Per: []string{"tenant", "user"}}
	site := throttle.Window{Name: "site", Limit: 10, Period: time.Second, Per: []string{"site"}}
	all := throttle.Window{Name: "all", Limit: 20, Period: time.Second, Shared: true}
	api := func(windows ...throttle.Window) throttle.Policy {
		return throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows}
	}
	observed := api(perTenant)
	observed.Observe = true
	type row struct{ before, after throttle.Policy }
	sitetest.EachBubble(t, map[string]row{
		"a user's window comes":        {api(perTenant), api(perTenant, user)},
		"a user's window goes":         {api(perTenant, user), api(perTenant)},
		"a user's window for a site's": {api(perTenant, user), api(perTenant, site)},
		"a tenant's window comes":      {api(all), api(perTenant, all)},
		"a shared window comes":        {api(perTenant), api(perTenant, all)},
		"enforced after observed":      {observed, api(perTenant)},
		"observed after enforced":      {api(perTenant), observed},
	}, func(t *testing.T, row row) {
		s := sitetest.NewInBubble(t, row.before)
		s.Asynq = hooktest.With(s.Asynq, hooktest.Hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if hooktest.IsScript(cmd) { // else no call is under way beside another
				time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
			}
			return next(ctx, cmd)
		}))
		limiter := func(p throttle.Policy) *throttle.Limiter {
			return expect.Got(throttle.New(throttle.Config{Client: s.Redis, Policies: []throttle.Policy{p}}))(t)
		}
		for _, p := range []throttle.Policy{row.before, row.after, row.before, row.after} {
			s.Serve(s.Ok, sitetest.By(limiter(p)))
		}
		clients := []*worker.Client{s.Client(limiter(row.before)), s.Client(limiter(row.after))}
		const n = 48
		begin := time.Now()
		for i := range n {
			task := worker.NewTask(worker.Identity{
				Tenant:     fmt.Sprint("t", i%2),
				Attributes: map[string]string{"user": fmt.Sprint(i % 8), "site": fmt.Sprint(i % 3)},
			}, "x", nil)
			var err error
			if id := asynq.TaskID(fmt.Sprint(i)); i%3 == 0 {
				_, err = s.Plain.Enqueue(task, id)
			} else {
				_, err = clients[i%2].Enqueue(task, id)
			}
			expect.Must(t, err)
		}
		s.SleepUntil(n, 5*time.Minute)
		took := time.Since(begin)
		expect.That(t, took <= 10*time.Second, "all have run after", took)
		s.WantWakes(sitetest.DeniedAndRun + 1)
		s.WantNobodyInLine()
	})
}

package linetest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// Half an hour of throttled work: three tenants of different size on the windows of the problem that
// started this, with bursts and without retries to lose.
func TestHalfAnHourOfWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		windows := []throttle.Window{
			{Name: "per-minute", Limit: 20, Period: time.Minute},
			{Name: "burst", Limit: 5, Period: 3 * time.Second},
		}
		s := sitetest.NewInBubble(t, throttle.Policy{Name: "api", Match: []string{"*"}, Windows: windows})
		want := map[string]int{}
		random := rand.New(rand.NewPCG(1, 2))
		begin := time.Now()
		enqueue := func(tenant string, n int, in time.Duration) {
			for range n {
				id := fmt.Sprintf("%s-%d", tenant, len(want))
				want[id] = 1
				s.Enqueue(sitetest.Task(tenant),
					asynq.TaskID(id), asynq.MaxRetry(0), asynq.ProcessAt(begin.Add(in+time.Duration(random.Int64N(int64(time.Second))))))
			}
		}
		for range 80 {
			enqueue("steady", 1, time.Duration(random.Int64N(int64(20*time.Minute))))
		}
		for burst := range 4 {
			enqueue("bursty", 20, time.Duration(burst)*5*time.Minute)
		}
		enqueue("once", 60, 5*time.Minute)

		s.Serve(s.Ok, sitetest.Calm)
		time.Sleep(30 * time.Minute)

		ran := map[string]int{}
		for _, id := range s.Runs() {
			ran[id]++
		}
		for id := range want {
			if ran[id] != 1 {
				t.Errorf("task %s ran %d times", id, ran[id])
			}
		}
		s.WantCounters(sitetest.Counters{Processed: int64(len(want))})
		s.WantReported(nil, nil)

		s.Mu.Lock()
		defer s.Mu.Unlock()
		grants := map[string][]time.Time{}
		for _, d := range s.Decisions {
			if d.Granted {
				grants[d.Tenant] = append(grants[d.Tenant], d.At)
			}
		}
		for tenant, at := range grants {
			slices.SortFunc(at, time.Time.Compare)
			for _, w := range windows {
				for i := range at {
					// The limit-th grant before this one must have left the window.
					if j := i - int(w.Limit); j >= 0 && at[i].Sub(at[j]) < w.Period {
						t.Errorf("%s: more than %d in %v up to %v", tenant, w.Limit, w.Period, at[i].Sub(begin))
					}
				}
			}
		}
		t.Logf("%d tasks, %.1f wakes a task", len(want), float64(len(s.Decisions))/float64(len(want)))
	})
}

package forecast

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/jobs"
	"github.com/sluice-go/sluice/throttle"
)

func TestAForecastSaysWhenJobsAreDone(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 23, 59, 50, 0, time.UTC)
	some := func(n int, tenant string, cost jobs.Cost) []jobs.Job {
		list := make([]jobs.Job, n)
		for i := range list {
			list[i] = jobs.Job{Tenant: tenant, Type: "http:call", Cost: cost}
		}
		return list
	}
	for _, c := range []struct {
		name    string
		windows []throttle.Window
		jobs    []jobs.Job
		want    time.Duration
		by      string // "window scope units"
	}{
		{"no job", []throttle.Window{{Name: "w", Limit: 1, Period: time.Second}}, nil, 0, ""},
		{"all fit", []throttle.Window{{Name: "w", Limit: 3, Period: time.Minute}}, some(3, "a", nil), 0, ""},
		{"one does not", []throttle.Window{{Name: "w", Limit: 3, Period: time.Minute}}, some(4, "a", nil), time.Minute, "w tenant=a 4"},
		{"the margin lengthens the period", []throttle.Window{{Name: "w", Limit: 2, Period: time.Minute, Margin: time.Second}}, some(5, "a", nil), 122 * time.Second, "w tenant=a 5"},
		{"costs are not divided", []throttle.Window{{Name: "w", Limit: 3, Period: 10 * time.Second}}, some(5, "a", jobs.Cost{"requests": 2}), 40 * time.Second, "w tenant=a 10"},
		{"different costs: by units", []throttle.Window{{Name: "w", Limit: 3, Period: 10 * time.Second}},
			append(some(2, "a", jobs.Cost{"requests": 2}), some(1, "a", nil)...), 10 * time.Second, "w tenant=a 5"},
		{"tenants apart", []throttle.Window{{Name: "w", Limit: 1, Period: time.Minute}}, append(some(3, "a", nil), some(2, "b", nil)...), 2 * time.Minute, "w tenant=a 3"},
		{"tenants together", []throttle.Window{{Name: "w", Limit: 1, Period: time.Minute, Scope: throttle.Shared}}, append(some(3, "a", nil), some(2, "b", nil)...), 4 * time.Minute, "w shared 5"},
		{"a limit of one's own", []throttle.Window{{Name: "w", Limit: 1, Period: time.Minute}}, append(some(9, "rich", nil), some(2, "b", nil)...), time.Minute, "w tenant=b 2"},
		{"exempt", []throttle.Window{{Name: "w", Limit: 1, Period: time.Minute, Scope: throttle.Shared}}, append(some(9, "free", nil), some(2, "b", nil)...), time.Minute, "w shared 2"},
		{"the longest of several", []throttle.Window{{Name: "short", Limit: 2, Period: time.Second}, {Name: "long", Limit: 4, Period: time.Hour}}, some(5, "a", nil), time.Hour, "long tenant=a 5"},
		{"another unit", []throttle.Window{{Name: "w", Limit: 10, Period: time.Minute, Unit: "tokens"}}, some(3, "a", jobs.Cost{"tokens": 10}), 2 * time.Minute, "w tenant=a 30"},
		{"gcra", []throttle.Window{{Name: "w", Algorithm: throttle.GCRA, Limit: 10, Period: 10 * time.Second, Burst: 3}}, some(5, "a", nil), 2 * time.Second, "w tenant=a 5"},
		{"fixed by the clock", []throttle.Window{{Name: "w", Algorithm: throttle.Fixed, Limit: 2, Period: time.Minute}}, some(5, "a", nil), 70 * time.Second, "w tenant=a 5"},
		{"fixed from first use", []throttle.Window{{Name: "w", Algorithm: throttle.Fixed, Anchor: throttle.AnchorFirstUse, Limit: 2, Period: time.Minute}}, some(5, "a", nil), 2 * time.Minute, "w tenant=a 5"},
		{"calendar", []throttle.Window{{Name: "w", Algorithm: throttle.Calendar, Limit: 2, Resets: "0 0 * * *"}}, some(5, "a", nil), 24*time.Hour + 10*time.Second, "w tenant=a 5"},
		{"calendar elsewhere", []throttle.Window{{Name: "w", Algorithm: throttle.Calendar, Limit: 2, Resets: "0 0 * * *", Timezone: "America/Los_Angeles"}}, some(3, "a", nil), 8*time.Hour + 10*time.Second, "w tenant=a 3"},
		{"concurrency", []throttle.Window{{Name: "w", Algorithm: throttle.Concurrency, Limit: 1}}, some(5, "a", nil), 0, ""},
	} {
		limiter, err := throttle.New(throttle.Config{Client: redis.NewClient(&redis.Options{}), Policies: []throttle.Policy{{
			Name: "p", Match: []string{"http:*"}, Windows: c.windows, Tenants: map[string]throttle.Tenant{"free": {Exempt: true}},
		}}})
		if c.name == "a limit of one's own" {
			err = limiter.SetPolicies([]throttle.Policy{{
				Name: "p", Match: []string{"http:*"}, Windows: c.windows,
				Tenants: map[string]throttle.Tenant{"rich": {Windows: map[string]throttle.Override{"w": {Limit: 9}}}},
			}})
		}
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		f := Of(limiter, c.jobs, now)
		if f.AtBest != c.want {
			t.Errorf("%s: %v, want %v", c.name, f.AtBest, c.want)
		}
		by := ""
		if b := f.BoundBy(); b != nil {
			by = b.Window + " " + b.Scope + " " + fmt.Sprint(b.Units)
		}
		if by != c.by {
			t.Errorf("%s: bound by %q, want %q", c.name, by, c.by)
		}
	}
}

package drain

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/worker-demo/internal/show"
)

// A Summary says how a drain went. Jobs, Succeeded and Failed count all jobs, also those that
// were done before it began; everything else is of this drain alone.
type Summary struct {
	Jobs             int         `json:"jobs"`
	Succeeded        int         `json:"succeeded"`
	Failed           int         `json:"failed"`
	DoneBefore       int         `json:"done_before"` // of these, when the drain began
	Archived         int         `json:"archived"`    // tasks in the queue's archive: failures, never denials
	Denials          int         `json:"denials"`
	Dequeues         int         `json:"dequeues"`
	WakesPerJob      float64     `json:"wakes_per_job"`
	DrainSeconds     float64     `json:"drain_seconds"`
	RedisCallsPerJob *float64    `json:"redis_calls_per_job"` // inside scripts too; nil where Redis does not say
	Windows          []WindowUse `json:"windows"`
	Learnt           []Lesson    `json:"learnt"` // of windows whose calls the API refused

	done int // in this drain
}

// A WindowUse is the most units that one window counted for one scope, by the throttle's
// decisions.
type WindowUse struct {
	Policy   string  `json:"policy"`
	Window   string  `json:"window"`
	Scope    string  `json:"scope"`
	Limit    int64   `json:"limit"`
	PeriodMS float64 `json:"period_ms"`
	MaxUsed  int64   `json:"max_used"`
}

type windowOf struct{ policy, window, scope string }

// Done is how many jobs have their result.
func (s Summary) Done() int { return s.Succeeded + s.Failed }

func (d *Drain) summarize(took time.Duration, before Counts) Summary {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.counts
	s := Summary{
		Jobs: c.Jobs, Succeeded: c.Succeeded, Failed: c.Failed, DoneBefore: before.Done(),
		Denials: c.Denials, Dequeues: c.Dequeues,
		DrainSeconds: show.Round(took.Seconds()),
		Windows:      slices.AppendSeq([]WindowUse{}, maps.Values(d.used)),
		Learnt:       d.Learnt.lessons(),
		done:         c.Done() - before.Done(),
	}
	s.WakesPerJob = show.Round(float64(c.Dequeues) / float64(max(s.done, 1)))
	if info, err := d.inspector.GetQueueInfo(d.Queue); err == nil {
		s.Archived = info.Archived
	}
	order := d.windowOrder()
	slices.SortFunc(s.Windows, func(a, b WindowUse) int {
		return cmp.Or(cmp.Compare(order[a.Policy+"/"+a.Window], order[b.Policy+"/"+b.Window]), cmp.Compare(a.Scope, b.Scope))
	})
	return s
}

// windowOrder is the order of the policies.
func (d *Drain) windowOrder() map[string]int {
	order := map[string]int{}
	for _, p := range d.Limiter.Policies() {
		for _, w := range p.Windows {
			order[p.Name+"/"+w.Name] = len(order)
		}
	}
	return order
}

func (s *Summary) setRedisCalls(calls int64) {
	if s.done > 0 && calls >= 0 { // a restarted server counts from 0
		perJob := show.Round(float64(calls) / float64(s.done))
		s.RedisCallsPerJob = &perJob
	}
}

// commandCalls is how many commands the server has processed for anybody, those inside of
// scripts included. miniredis does not say, nor does a cluster as a whole.
func commandCalls(ctx context.Context, client redis.UniversalClient) (calls int64, ok bool) {
	single, ok := client.(*redis.Client)
	if !ok {
		return 0, false
	}
	info, err := single.Info(ctx, "commandstats").Result()
	if err != nil {
		return 0, false
	}
	found := regexp.MustCompile(`(?m)^cmdstat_[^:]+:calls=(\d+)`).FindAllStringSubmatch(info, -1)
	for _, match := range found {
		n, _ := strconv.ParseInt(match[1], 10, 64)
		calls += n
	}
	return calls, len(found) > 0
}

// PrintWindows prints, for every window, the scope that came nearest to its limit.
func PrintWindows(w io.Writer, windows []WindowUse) {
	if len(windows) == 0 {
		return
	}
	t := show.Table(w)
	fmt.Fprintln(t, "WINDOW\tLIMIT\tMOST USED\tBY\tSCOPES")
	for rest := windows; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(u WindowUse) bool { return u.Window != rest[0].Window || u.Policy != rest[0].Policy })
		if n < 0 {
			n = len(rest)
		}
		u := slices.MaxFunc(rest[:n], func(a, b WindowUse) int {
			return cmp.Compare(float64(a.MaxUsed)/float64(a.Limit), float64(b.MaxUsed)/float64(b.Limit))
		})
		fmt.Fprintf(t, "%s/%s\t%d per %s\t%d\t%s\t%d\n", u.Policy, u.Window, u.Limit, show.Short(time.Duration(u.PeriodMS*1e6)), u.MaxUsed, u.Scope, n)
		rest = rest[n:]
	}
	t.Flush()
}

package drain

import (
	"context"
	"regexp"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/cmd/sluice/internal/show"
)

// A Summary says how a drain went. Jobs, Succeeded and Failed count all jobs, also those that
// were done before it began; everything else is of this drain alone.
type Summary struct {
	Counts
	DoneBefore       int         `json:"done_before"` // of these, when the drain began
	Archived         int         `json:"archived"`    // tasks in the queue's archive: failures, never denials
	WakesPerJob      float64     `json:"wakes_per_job"`
	DrainSeconds     float64     `json:"drain_seconds"`
	RedisCallsPerJob *float64    `json:"redis_calls_per_job"` // inside scripts too; nil where Redis does not say
	Windows          []WindowUse `json:"windows"`
	Learnt           []Lesson    `json:"learnt"` // of windows whose calls the API refused

	done int // in this drain
}

func (d *Drain) summarize(took time.Duration, before Counts) Summary {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Summary{
		Counts:       d.counts,
		DoneBefore:   before.Done(),
		DrainSeconds: show.Round(took.Seconds()),
		Windows:      d.windows.List(d.Limiter),
		Learnt:       d.Learnt.lessons(),
		done:         d.counts.Done() - before.Done(),
	}
	s.WakesPerJob = show.Round(float64(s.Dequeues) / float64(max(s.done, 1)))
	if info, err := d.inspector.GetQueueInfo(d.Queue); err == nil {
		s.Archived = info.Archived
	}
	return s
}

func (s *Summary) setRedisCalls(calls int64) {
	if s.done > 0 && calls >= 0 { // a restarted server counts from 0
		s.RedisCallsPerJob = new(show.Round(float64(calls) / float64(s.done)))
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

package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/sluice-go/sluice/throttle"
)

// piped makes clients of a miniredis in memory, for testing/synctest.
type piped struct{ m *miniredis.Miniredis }

func (p piped) MakeRedisClient() any {
	return redis.NewClient(&redis.Options{
		Dialer:                   func(context.Context, string, string) (net.Conn, error) { return p.m.Dial() },
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// answers calls inside the process.
type answers func(path string) int

func (a answers) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: a(r.URL.Path), Body: http.NoBody, Header: http.Header{}, Request: r}, nil
}

// While jobs wait for minutes, Redis loses everything: they are still called, once each.
func TestDrainFindsLostTasks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		client := piped{m}.MakeRedisClient().(*redis.Client)
		defer client.Close()
		limiter, err := throttle.New(throttle.Config{Client: client, Policies: []throttle.Policy{{
			Name: "p", Match: []string{"*"}, Windows: []throttle.Window{{Name: "w", Limit: 2, Period: 5 * time.Minute, Scope: throttle.Shared}},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		jobs, err := ReadJobs("jobs", strings.NewReader(manyJobs(5, "http://x", "")))
		if err != nil {
			t.Fatal(err)
		}
		calls := make(chan string, 100)
		caller := NewCaller(time.Second, 1)
		caller.client.Transport = answers(func(path string) int { calls <- path; return http.StatusOK })
		lines := &wholeLines{}
		drain := &Drain{
			Caller: caller, Client: client, Concurrency: 2, Jobs: jobs, Limiter: limiter, Progress: NewProgress(io.Discard, time.Minute),
			Queue: "q", Redis: piped{m}, Results: NewResultLog(lines),
		}
		time.AfterFunc(30*time.Second, m.FlushAll)
		start := time.Now()
		s, err := drain.Run(t.Context())
		if err != nil || s.Succeeded != 5 || lines.lines != 5 || len(calls) != 5 {
			t.Errorf("%v: %+v, %d lines, %d calls", err, s, lines.lines, len(calls))
		}
		if took := time.Since(start); took < 6*time.Minute || took > 8*time.Minute {
			t.Errorf("it took %v: 2 jobs at once, 2 when their loss was seen, 1 five minutes later", took)
		}
	})
}

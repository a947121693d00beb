package policyfile_test

import (
	"bytes"
	"context"
	"errors"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/policyfile"
)

func TestAFileIsWatched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policies.yml")
	synctest.Test(t, func(t *testing.T) {
		var journal bytes.Buffer
		var limits []int64
		var refuse atomic.Bool
		write := func(text string) {
			t.Helper()
			limitertest.Must(t, os.WriteFile(path+".new", []byte(text), 0o600))
			limitertest.Must(t, os.Rename(path+".new", path))
			time.Sleep(2 * time.Second)
		}
		good := func(limit string) string {
			return "policies: [{name: p, windows: [{name: w, period: 1s, limit: " + limit + "}]}]"
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go policyfile.Watch(ctx, path, policyfile.WatchConfig{
			Logger: slog.New(slog.NewTextHandler(&journal, nil)),
			Put: func(policies []throttle.Policy) error {
				if refuse.Load() {
					return errors.New("refused")
				}
				limits = append(limits, policies[0].Windows[0].Limit)
				return nil
			},
		})
		time.Sleep(3 * time.Second) // there is no file
		write(good("1"))
		write(good("2"))
		write(good("zero"))
		write(good("3"))
		refuse.Store(true)
		write(good("4"))
		refuse.Store(false)
		limitertest.Must(t, os.Remove(path))
		time.Sleep(3 * time.Second)
		write(good("5"))
		stop()
		synctest.Wait()
		if len(limits) != 4 || limits[0] != 1 || limits[1] != 2 || limits[2] != 3 || limits[3] != 5 {
			t.Errorf("put in force: %v", limits)
		}
		for _, text := range []string{"no such file", "zero", "refused"} {
			if !strings.Contains(journal.String(), text) {
				t.Errorf("the log does not tell %q:\n%s", text, journal.String())
			}
		}
		if n := strings.Count(journal.String(), "\n"); n != 4 {
			t.Errorf("%d lines in the log, want 4:\n%s", n, journal.String())
		}
	})
}

func TestAWatchThatCanPutNothingInForceEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policies.yml")
	limitertest.Must(t, os.WriteFile(path, []byte("policies: [{name: p, windows: [{name: w, period: 1s, limit: 1}]}]"), 0o600))
	for _, path := range []string{path, path + ".missing"} {
		var journal bytes.Buffer
		policyfile.Watch(t.Context(), path, policyfile.WatchConfig{Logger: slog.New(slog.NewTextHandler(&journal, nil))})
		if !strings.Contains(journal.String(), "WatchConfig.Put is nil") {
			t.Errorf("%s: the log does not tell what is missing:\n%s", path, journal.String())
		}
	}
}

func ExampleWatch() {
	ctx, stop := context.WithCancel(context.Background())
	stop() // when the program ends
	limiter, err := throttle.New(throttle.Config{Client: redis.NewClient(&redis.Options{})})
	if err != nil {
		log.Fatal(err)
	}
	go policyfile.Watch(ctx, "policies.yml", policyfile.WatchConfig{Put: limiter.SetPolicies})
}

package main

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/throttletest"
)

// A run whose limit lets one call out an hour ends, as its policy file changes meanwhile: first to
// one that does not have a policy for the jobs.
func TestARunFollowsItsPolicyFile(t *testing.T) {
	t.Parallel()
	throttletest.Each(t, func(t *testing.T, client *redis.Client) {
		r := newRemote(t)
		policies := func(match, limit string) string {
			return "policies: [{name: api, match: [" + match + "], windows: [{name: w, period: 1h, limit: " + limit + "}]}]"
		}
		d := newDesk(t, policies("http:*", "1"), strings.ReplaceAll(`
{"id":"1","tenant":"a","url":"URL/1"}
{"id":"2","tenant":"a","url":"URL/2"}
{"id":"3","tenant":"a","url":"URL/3"}
`, "URL", r.URL))
		var once sync.Once
		r.onCall = func(string) {
			once.Do(func() {
				d.write("policies.yml", policies("smtp", "9"))
				time.AfterFunc(1500*time.Millisecond, func() { d.write("policies.yml", policies("http:*", "99")) })
			})
		}
		runMain(t.Context(), "", d.args("--redis", "redis://"+client.Options().Addr)...).
			want(t, exitDone, "3 jobs: 3 succeeded", "no policy in")
	})
}

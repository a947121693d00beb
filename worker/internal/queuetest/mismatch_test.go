package queuetest

import (
	"testing"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// The limiters of a client and its server have different lines: its tasks start two minutes late, and
// the server's log says why, once a queue.
func TestAClientWithAnotherLimiterIsNoticed(t *testing.T) {
	policy := sitetest.Policy(1000, time.Minute)
	renamed := policy
	renamed.Name = "another"
	for name, row := range map[string]struct {
		prefix string
		policy throttle.Policy
		logged int
	}{
		"the same":     {"", policy, 0},
		"another name": {"", renamed, 1},
		"a prefix":     {"staging:", policy, 1},
	} {
		t.Run(name, func(t *testing.T) {
			sitetest.Bubble(t, policy, func(t *testing.T, s *sitetest.Site) {
				limiter, err := throttle.New(throttle.Config{Client: s.Redis, Policies: []throttle.Policy{row.policy}, Prefix: row.prefix})
				sitetest.Must(t, err)
				s.Serve(s.Ok, sitetest.Calm)
				client := s.Client(limiter)
				for _, id := range []string{"a", "b"} {
					if _, err := client.Enqueue(sitetest.AcmeTask(), asynq.TaskID(id)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(3 * time.Minute)
				if n := s.Journal.Count("stood in no line"); n != row.logged || len(s.Runs()) != 2 {
					t.Errorf("logged %d times, want %d; ran %q\n%s", n, row.logged, s.Runs(), s.Journal)
				}
			})
		})
	}
}

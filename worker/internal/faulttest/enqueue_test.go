package faulttest

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/hooktest"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// A client whose call ends while it stores the task leaves no place for a task that is not there;
// and a task that is there without a place finds one when workers look after it.
func TestACallThatEndsWhileItStoresLosesNothing(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		sent bool // the call arrives, and its reply is lost
	}{{"before the task is stored", false}, {"after it", true}} {
		t.Run(row.name, func(t *testing.T) {
			sitetest.Bubble(t, sitetest.Shared(1, time.Second), func(t *testing.T, s *sitetest.Site) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				interrupts := interrupts{"asynq:{default}:scheduled", row.sent, cancel}
				config := worker.ClientConfig{Limiter: s.Limiter, LimiterTimeout: time.Minute}
				client, err := worker.NewClient(hooktest.With(s.Asynq, hooktest.Hook(interrupts.see)), config)
				sitetest.Must(t, err)
				defer client.Close()
				if info, err := client.EnqueueContext(ctx, sitetest.AcmeTask(asynq.TaskID("cut"))); err == nil ||
					!strings.Contains(err.Error(), context.Canceled.Error()) {
					t.Fatalf("%v, %v", info, err)
				}
				s.WantNobodyInLine()
				if there := s.Task("cut").ID != ""; there != row.sent {
					t.Errorf("the task is there: %v", there)
				}
				s.Serve(s.Ok, sitetest.Calm)
				time.Sleep(3 * time.Minute)
				if ran := len(s.Runs()); (ran == 1) != row.sent {
					t.Errorf("%d tasks ran", ran)
				}
			})
		})
	}
}

// A client whose call ends after the task was stored has enqueued it.
func TestACallThatEndsWhileItJoinsHasEnqueued(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{sitetest.Shared(1, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		interrupts := interrupts{"sluice:{api}:q", false, cancel}
		client := s.Client(s.AnotherLimiter(hooktest.Hook(interrupts.see)))
		info, err := client.EnqueueContext(ctx, sitetest.AcmeTask(asynq.TaskID("cut")))
		if err != nil || info.State != asynq.TaskStatePending || s.Task("cut").State != asynq.TaskStatePending {
			t.Errorf("%v, %v; it is %v", info, err, s.Task("cut").State)
		}
	})
}

// interrupts ends a context at the call that has the key among its arguments.
type interrupts struct {
	key    string
	after  bool
	cancel context.CancelFunc
}

func (i *interrupts) see(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if !slices.Contains(cmd.Args(), any(i.key)) {
		return next(ctx, cmd)
	}
	if i.after {
		if err := next(ctx, cmd); err != nil {
			return err // that Redis does not know the script yet
		}
	}
	i.cancel()
	cmd.SetErr(context.Canceled)
	return context.Canceled
}

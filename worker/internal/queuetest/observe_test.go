package queuetest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker"
	"github.com/sluice-go/sluice/worker/internal/sitetest"
)

// limitBy gives the site another limiter, with the policies and the logger that it has.
func limitBy(s *sitetest.Site, c throttle.Config) {
	s.Helper()
	c.Logger, c.Policies = slog.New(slog.NewTextHandler(s.Journal, nil)), s.Limiter.Policies()
	limiter, err := throttle.New(c)
	sitetest.Must(s, err)
	s.Limiter = limiter
}

// An observer of the limiter is told how long each task waited, and how late it starts.
func TestStartsAreObserved(t *testing.T) {
	sitetest.Bubble(t, sitetest.Policy(1, 10*time.Second), func(t *testing.T, s *sitetest.Site) {
		starts := make(chan throttle.Start, 10)
		limitBy(s, throttle.Config{Client: s.Redis, Observer: throttle.Observer{Started: func(s throttle.Start) { starts <- s }}})
		client := s.Client(s.Limiter)
		for range 3 {
			if _, err := client.Enqueue(sitetest.AcmeTask()); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(3 * time.Second) // nobody serves the first, which fits
		s.Serve(s.Ok, sitetest.Calm)
		for i, want := range []struct{ waited, late time.Duration }{
			{3 * time.Second, 3 * time.Second}, {13 * time.Second, 0}, {23 * time.Second, 0},
		} {
			got := <-starts
			// Places in line are a microsecond apart.
			if got.Policy != "api" || got.Tenant != "acme" ||
				got.Waited != want.waited-time.Duration(i)*time.Microsecond || got.Late != want.late {
				t.Errorf("start %d: %+v, want %v", i+1, got, want)
			}
		}
		time.Sleep(10 * time.Second)
		s.Enqueue(sitetest.AcmeTask())
		if got := <-starts; got.Waited != 0 || got.Late >= 0 {
			t.Errorf("a task that never was in line: %+v", got)
		}
	})
}

// It is told of tasks that are requeued, or run uncounted, as the limiter could not decide: whether
// Redis is away or silent.
func TestTasksThatTheLimiterCannotDecideAreObserved(t *testing.T) {
	for _, row := range []struct {
		fail   throttle.FailMode
		silent bool
	}{{throttle.FailClosed, false}, {throttle.FailOpen, false}, {throttle.FailClosed, true}, {throttle.FailOpen, true}} {
		t.Run(fmt.Sprintf("fail %s, silent %v", row.fail, row.silent), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := sitetest.Policy(1, time.Hour)
				p.Fail = row.fail
				s := sitetest.NewInBubble(t, p)
				var c sitetest.Cable
				options := c.Options(sitetest.SameRedis(s.Redis))
				ended := make(chan struct{})
				defer close(ended)
				if dial := options.Dialer; row.silent {
					options.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
						conn, err := dial(ctx, network, addr)
						if err != nil {
							<-ended // the context of a dial has no end
						}
						return conn, err
					}
				}
				through := redis.NewClient(options)
				defer through.Close()
				told := make(chan string, 100)
				tell := func(policy, tenant string, err error) {
					told <- fmt.Sprint(policy, " ", tenant, " ", errors.Is(err, throttle.ErrUnavailable))
				}
				limitBy(s, throttle.Config{Client: through, Observer: throttle.Observer{
					Decided: func(d throttle.Decision) {
						if d.FailedOpen != nil {
							tell(d.Policy, "open "+d.Tenant, d.FailedOpen)
						}
					},
					Unavailable: tell,
				}})
				s.Serve(func(context.Context, *asynq.Task) error { return nil }, sitetest.Calm)
				c.Cut()
				s.Enqueue(sitetest.AcmeTask())
				want := map[throttle.FailMode]string{throttle.FailClosed: "acme", throttle.FailOpen: "open acme"}[row.fail]
				select {
				case got := <-told:
					if got != "api "+want+" true" {
						t.Error(got)
					}
				case <-time.After(time.Minute):
					t.Error("told nothing")
				}
				c.Mend()
				time.Sleep(2 * time.Second) // go-redis tries to connect in the background
			})
		})
	}
}

// A lookup of a tenant that panics fails the tenant's tasks, and no others.
func TestALookupThatPanicsFailsItsTasks(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{sitetest.Policy(100, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
		limitBy(s, throttle.Config{Client: s.Redis, Tenants: func(_ context.Context, _, tenant string) (t throttle.Tenant, found bool, err error) {
			if tenant == "acme" {
				panic("on purpose")
			}
			return t, false, nil
		}})
		for _, id := range []string{"a", "b"} {
			s.Enqueue(sitetest.AcmeTask(), asynq.TaskID(id), asynq.MaxRetry(0))
			s.Enqueue(worker.NewTask(worker.Identity{Tenant: "else"}, "x", nil), asynq.TaskID("else-"+id), asynq.MaxRetry(0))
		}
		s.Enqueue(sitetest.AcmeTask(), asynq.TaskID("later"), asynq.MaxRetry(0), asynq.ProcessIn(time.Second)) // forward joins it
		s.Serve(s.Ok)
		s.WaitGone("else-a", "else-b")
		for _, id := range []string{"a", "b", "later"} {
			s.WaitState(asynq.TaskStateArchived, id)
			if got := s.Task(id).LastErr; !strings.Contains(got, `policy "api": tenant "acme": Config.Tenants panicked: on purpose`) {
				t.Errorf("%s failed by %q", id, got)
			}
		}
		if n := s.Journal.Count("function=Tenants"); n != 1 {
			t.Errorf("it is logged %d times", n)
		}
		var invalid *throttle.RequestError
		if _, err := s.Client(s.Limiter).Enqueue(sitetest.AcmeTask()); !errors.As(err, &invalid) {
			t.Errorf("a client's lookup: %v", err)
		}
	})
}

package faulttest

import (
	"bytes"
	"context"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
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
		limited := sitetest.Connect(sitetest.SameRedis(s.Redis))
		defer limited.Close()
		interrupts := interrupts{"sluice:{api}:q", false, cancel}
		limited.AddHook(hooktest.Hook(interrupts.see))
		client := s.Client(s.LimiterOn(limited))
		info, err := client.EnqueueContext(ctx, sitetest.AcmeTask(asynq.TaskID("cut")))
		if err != nil || info.State != asynq.TaskStatePending || s.Task("cut").State != asynq.TaskStatePending {
			t.Errorf("%v, %v; it is %v", info, err, s.Task("cut").State)
		}
	})
}

// The task was stored, but the reply was lost, and go-redis repeats the call: the task is not taken
// for another with its ID.
func TestAStoreWhoseReplyIsLostIsNoConflict(t *testing.T) {
	sitetest.OnRedis(t, []throttle.Policy{sitetest.Shared(1, time.Hour)}, func(t *testing.T, s *sitetest.Site) {
		s.JoinMany(s.Client(s.Limiter), "acme", 0, 1)
		for name, opts := range map[string][]asynq.Option{"plain": nil, "unique": {asynq.Unique(time.Hour)}} {
			lost := &lossyLine{key: "asynq:{default}:scheduled"}
			config := worker.ClientConfig{Limiter: s.Limiter, LimiterTimeout: time.Minute}
			client, err := worker.NewClient(sitetest.Dialed{Options: lost.options(sitetest.SameRedis(s.Redis))}, config)
			sitetest.Must(t, err)
			defer client.Close()
			info, err := client.EnqueueContext(t.Context(), sitetest.AcmeTask(asynq.TaskID(name)), opts...)
			if err != nil || info.State != asynq.TaskStateScheduled {
				t.Errorf("%s: %v, %v", name, info, err)
			}
			if n := lost.replies.Load(); n < 2 {
				t.Errorf("%s: answered %d times: the call was not repeated", name, n)
			}
			if got := s.InLine(); !slices.Contains(got, "default/"+name) {
				t.Errorf("in line: %q, without default/%s", got, name)
			}
		}
	})
}

// A lossyLine loses the first reply to a call that has the key among its arguments, and the
// connection with it. That Redis does not know a script yet is no such reply.
type lossyLine struct {
	key     string
	replies atomic.Int32
}

func (l *lossyLine) options(o *redis.Options) *redis.Options {
	lossy, dial := *o, o.Dialer
	lossy.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return &lossyConn{Conn: conn, line: l}, err
	}
	return &lossy
}

type lossyConn struct {
	net.Conn
	asked bool
	line  *lossyLine
}

func (c *lossyConn) Write(b []byte) (int, error) {
	c.asked = bytes.Contains(b, []byte(c.line.key))
	return c.Conn.Write(b)
}

func (c *lossyConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.asked && !bytes.HasPrefix(b[:n], []byte("-NOSCRIPT")) && c.line.replies.Add(1) == 1 {
		c.Conn.Close()
		return 0, io.EOF
	}
	c.asked = false
	return n, err
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

package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// A Server is an asynq.Server whose tasks are throttled before any other middleware sees them.
type Server struct {
	client     redis.UniversalClient
	middleware asynq.MiddlewareFunc
	server     *asynq.Server
	started    atomic.Bool
	throttle   *Throttle
}

// NewServer returns a server for the queues in opt's Redis. The limiter may use another Redis.
// It does not talk to either. Shutdown must be called, also on a server that was not started.
func NewServer(opt asynq.RedisConnOpt, c asynq.Config, throttled Config) (*Server, error) {
	t, err := New(throttled)
	if err != nil {
		return nil, err
	}
	if c.GroupGracePeriod != 0 && c.GroupGracePeriod < time.Second { // asynq would panic
		return nil, fmt.Errorf("worker: asynq.Config.GroupGracePeriod %v: must be at least 1s", c.GroupGracePeriod)
	}
	client, err := connect(opt)
	if err != nil {
		return nil, err
	}
	server := asynq.NewServer(t.Redis(connection{client}), t.Asynq(c))
	middleware, err := t.Middleware()
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return &Server{client: client, middleware: middleware, server: server, throttle: t}, nil
}

// Start begins to process tasks by the handler, and returns. Errors are asynq's.
func (s *Server) Start(handler asynq.Handler) error {
	return s.server.Start(s.throttled(handler))
}

// Run starts, waits for a signal to exit, and shuts down. Errors are asynq's.
func (s *Server) Run(handler asynq.Handler) error {
	defer s.throttle.Close()
	signalled, ignore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer ignore()
	defer context.AfterFunc(signalled, s.throttle.Stop)()
	return s.server.Run(s.throttled(handler))
}

func (s *Server) throttled(handler asynq.Handler) asynq.Handler {
	if handler == nil {
		return nil // an error of asynq's
	}
	s.started.Store(true)
	return s.middleware(handler)
}

// Stop stops picking up tasks; those that run go on. Shutdown must follow.
func (s *Server) Stop() {
	s.throttle.pickNoMore()
	s.server.Stop()
}

// Shutdown stops, waits for the handlers as long as asynq.Config.ShutdownTimeout says, gives
// the tasks of the others back, and closes the connection.
func (s *Server) Shutdown() {
	s.throttle.Stop()
	s.server.Shutdown()
	s.throttle.Close()
	if !s.started.Load() { // otherwise asynq has closed it, or is about to
		s.client.Close()
	}
}

// Ping asks Redis whether it is there.
func (s *Server) Ping() error { return s.server.Ping() }

// A connection hands asynq a client that is made already.
type connection struct{ client redis.UniversalClient }

func (c connection) MakeRedisClient() any { return c.client }

func connect(opt asynq.RedisConnOpt) (redis.UniversalClient, error) {
	if opt == nil {
		return nil, errors.New("worker: the asynq.RedisConnOpt is nil: must be such as asynq.RedisClientOpt{Addr: ...}")
	}
	client, ok := opt.MakeRedisClient().(redis.UniversalClient)
	if !ok {
		return nil, fmt.Errorf("worker: %T makes no redis.UniversalClient: use one of asynq's own options", opt)
	}
	return client, nil
}

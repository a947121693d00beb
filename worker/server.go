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

	"github.com/sluice-go/sluice/worker/internal/asynqredis"
)

// A Server is an asynq.Server whose tasks are throttled before any other middleware sees them.
type Server struct {
	adapter    *Adapter
	middleware asynq.MiddlewareFunc
	owned      redis.UniversalClient // nil if the caller made it
	server     *asynq.Server
	started    atomic.Bool
}

// NewServer returns a server for the queues in opt's Redis. The limiter may use another Redis.
// It does not talk to either. Shutdown must be called, also for a server that was not started.
func NewServer(opt asynq.RedisConnOpt, c asynq.Config, throttled Config) (*Server, error) {
	client, err := asynqredis.Connect(opt)
	if err != nil {
		return nil, err
	}
	s, err := newServer(c, throttled, func(ad *Adapter, c asynq.Config) *asynq.Server {
		return asynq.NewServer(ad.Redis(connection{client}), c)
	})
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	s.owned = client
	return s, nil
}

// NewServerFromRedisClient is NewServer for a client that stays the caller's to close, after
// Shutdown. Adapter.RedisClient says which clients can be shared.
func NewServerFromRedisClient(client redis.UniversalClient, c asynq.Config, throttled Config) (*Server, error) {
	if client == nil {
		return nil, errNoClient
	}
	return newServer(c, throttled, func(ad *Adapter, c asynq.Config) *asynq.Server {
		return asynq.NewServerFromRedisClient(ad.RedisClient(client), c)
	})
}

func newServer(c asynq.Config, throttled Config, make func(*Adapter, asynq.Config) *asynq.Server) (*Server, error) {
	ad, err := NewAdapter(throttled)
	if err != nil {
		return nil, err
	}
	if c.GroupGracePeriod != 0 && c.GroupGracePeriod < time.Second { // asynq would panic
		return nil, fmt.Errorf("worker: asynq.Config.GroupGracePeriod %v: must be at least 1s", c.GroupGracePeriod)
	}
	server := make(ad, ad.Asynq(c))
	middleware, err := ad.Middleware()
	if err != nil {
		return nil, err
	}
	return &Server{adapter: ad, middleware: middleware, server: server}, nil
}

// Start starts to process tasks by the handler, and returns. Errors are asynq's.
func (s *Server) Start(handler asynq.Handler) error {
	return s.server.Start(s.throttled(handler))
}

// Run starts, waits for a signal to exit, and shuts down. Errors are asynq's.
func (s *Server) Run(handler asynq.Handler) error {
	defer s.adapter.Close()
	signalled, ignore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer ignore()
	defer context.AfterFunc(signalled, s.adapter.Stop)()
	return s.server.Run(s.throttled(handler))
}

func (s *Server) throttled(handler asynq.Handler) asynq.Handler {
	if handler == nil {
		return nil // asynq returns the error
	}
	s.started.Store(true)
	return s.middleware(handler)
}

// Stop picks up no more tasks. Those that run go on. Shutdown must follow.
func (s *Server) Stop() {
	s.adapter.pickNoMore()
	s.server.Stop()
}

// Shutdown picks up no more tasks, and waits up to asynq.Config.ShutdownTimeout for the handlers.
// It makes the tasks of handlers that have not returned pending again, and closes the connection,
// unless that is the caller's.
func (s *Server) Shutdown() {
	s.adapter.Stop()
	s.server.Shutdown()
	s.adapter.Close()
	if s.owned != nil && !s.started.Load() { // else asynq has closed it, or is about to
		s.owned.Close()
	}
}

// UnmatchedCount returns how many attempts of tasks there were whose type no policy matches.
func (s *Server) UnmatchedCount() int64 { return s.adapter.UnmatchedCount() }

var errNoClient = errors.New("worker: the redis.UniversalClient is nil")

// A connection is an asynq.RedisConnOpt of a client that exists.
type connection struct{ client redis.UniversalClient }

func (c connection) MakeRedisClient() any { return c.client }

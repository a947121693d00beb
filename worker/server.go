package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hibiken/asynq"

	"github.com/sluice-go/sluice/internal/testhook"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// Defaults of asynq for fields that a user leaves empty.
const (
	taskCheckInterval = time.Second
	shutdownTimeout   = 8 * time.Second
)

// asynqDelay is asynq's sleep after it has found no task. It is short, as our hook has already waited.
const asynqDelay = time.Millisecond

// Config configures how tasks are throttled. Many goroutines may call its functions, at every attempt of a task.
type Config struct {
	// Identify returns the task's identity. The class is always taken from the task's header. The default is
	// IdentityOf, which returns what NewTask was given.
	Identify func(*asynq.Task) (Identity, error)

	// Limiter decides about tasks. Its policies name the task types that they match. It is required.
	Limiter *throttle.Limiter

	// Logger gets outages of the limiter and of asynq's Redis, tasks that no policy can count, lost tickets and
	// mistakes in the setup. The default is slog.Default(). Pauses and changed rates are for throttle.Config.Logger.
	Logger *slog.Logger

	// OnDecision, if not nil, is called with the decision about a task that asynq has picked up, before it takes
	// effect. For metrics of all that a limiter does, see throttle.Observer.
	OnDecision func(ctx context.Context, t *asynq.Task, d throttle.Decision)

	// RejectUnmatched fails a task whose type no policy matches, with ErrUnmatched. By default such a task
	// runs unthrottled. The first task of each such type is logged, of up to 100 types.
	RejectUnmatched bool
}

// A Server is an asynq.Server whose tasks are throttled before any middleware sees them. Calls may be concurrent.
type Server struct {
	link
	attempts    *attempts
	config      Config
	dispatch    *dispatch.Dispatcher
	limiterLog  *outage.Log // logs when the limiter does not answer, and when it does again
	asynqServer *asynq.Server

	mu     sync.Mutex
	warned map[string]bool // task types

	shutdown        sync.Once
	shutdownGrace   context.Context // ends when a shutdown waits no longer
	endGrace        context.CancelFunc
	shutdownTimeout time.Duration
}

// NewServer returns a server for the queues in opt's Redis. The limiter may use another Redis.
// It does not talk to either. Shutdown must be called, also for a server that was not started: it closes
// what opt.MakeRedisClient returned, which must be a client of this server alone.
//
// The functions of asynq's config are not called for a denial, which is neither a failure nor an
// error. If a task's time runs out while the limiter is asked, IsFailure and RetryDelayFunc are called with the
// error of the task's context, but without effect. The same happens, with asynq.ErrLeaseExpired, for a
// task of a server that died, if the task goes back to wait. An idle server looks for tasks of plain clients
// every TaskCheckInterval, but at least every 1.25 s. Tasks in line need no such look: they start when they fit.
func NewServer(opt asynq.RedisConnOpt, c asynq.Config, config Config) (*Server, error) {
	config.Logger = cmp.Or(config.Logger, slog.Default())
	if config.Limiter == nil {
		return nil, errors.New("worker: Config.Limiter is nil: must be what throttle.New returns")
	}
	if c.GroupGracePeriod != 0 && c.GroupGracePeriod < time.Second { // asynq would panic
		return nil, fmt.Errorf("worker: asynq.Config.GroupGracePeriod %v: must be at least 1s", c.GroupGracePeriod)
	}
	client, err := asynqredis.Connect(opt)
	if err != nil {
		return nil, err
	}
	hooks, hooked := client.(*testhook.Client)
	if hooked {
		client = hooks.UniversalClient
	}
	s := &Server{
		link:            link{tasks: asynqredis.New(client), limiter: config.Limiter},
		config:          config,
		limiterLog:      &outage.Log{Logger: config.Logger, Service: "the limiter"},
		shutdownTimeout: cmp.Or(max(c.ShutdownTimeout, 0), shutdownTimeout),
		warned:          map[string]bool{},
	}
	s.shutdownGrace, s.endGrace = context.WithCancel(context.Background())
	s.dispatch = dispatch.New(dispatch.Config{
		Concurrency: cmp.Or(max(c.Concurrency, 0), runtime.NumCPU()),
		Limiter:     config.Limiter,
		LimiterLog:  s.limiterLog,
		Match:       s.match,
		Poll:        cmp.Or(max(c.TaskCheckInterval, 0), taskCheckInterval),
		Queues:      queuesOf(c.Queues),
		Strict:      c.StrictPriority,
		Tasks:       s.tasks,
	})
	s.attempts = &attempts{byTask: map[asynqredis.Ref]*attempt{}, onEnd: s.dispatch.Ended, swept: time.Now()}
	if hooked {
		hooks.Look = func() { s.dispatch.Freed(config.Limiter.Lines()...) }
	}
	client.AddHook(&hook{server: s})
	s.asynqServer = asynq.NewServerFromRedisClient(client, s.asynqConfig(c))
	return s, nil
}

func (s *Server) asynqConfig(c asynq.Config) asynq.Config {
	c.ErrorHandler = s.reportErrors(c.ErrorHandler)
	c.DelayedTaskCheckInterval = max(0, c.DelayedTaskCheckInterval) // below 0 asynq would spin
	c.TaskCheckInterval = asynqDelay
	return c
}

// queuesOf returns the queues that asynq would serve, with their priorities.
func queuesOf(configured map[string]int) map[string]int {
	queues := maps.Clone(configured)
	maps.DeleteFunc(queues, func(name string, priority int) bool {
		return strings.TrimSpace(name) == "" || priority <= 0
	})
	if len(queues) == 0 {
		return map[string]int{"default": 1}
	}
	return queues
}

// Start begins to process tasks with the handler, and returns. Errors are asynq's.
func (s *Server) Start(handler asynq.Handler) error { return s.start(s.asynqServer.Start, handler) }

// start starts asynq's server. It fails after a Shutdown, even if the server never ran: asynq would not know of that.
func (s *Server) start(asynqStart func(asynq.Handler) error, handler asynq.Handler) error {
	if s.shutdownGrace.Err() != nil {
		return asynq.ErrServerClosed
	}
	go s.logCheck()
	return asynqStart(s.middleware(handler))
}

// Run starts the server, waits for a signal to exit, and shuts down. Errors are asynq's.
func (s *Server) Run(handler asynq.Handler) error {
	signalled, ignore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer ignore()
	defer context.AfterFunc(signalled, s.beginShutdown)()
	if err := s.start(s.asynqServer.Run, handler); err != nil {
		return err
	}
	s.Shutdown()
	return nil
}

// Stop picks up no more tasks. Running tasks go on. Shutdown must follow.
func (s *Server) Stop() {
	s.dispatch.Stop() // first, as asynq's Stop waits until its dequeue has returned
	s.asynqServer.Stop()
}

// Shutdown picks up no more tasks, and waits up to asynq.Config.ShutdownTimeout for the handlers.
// If handlers have not returned by then, their tasks become pending again. It closes the connection.
//
// While asynq's Redis does not answer, it tries to requeue denied tasks, for at most ShutdownTimeout.
// Asynq recovers a task that could not be requeued as if its worker had died.
func (s *Server) Shutdown() {
	s.shutdown.Do(func() {
		s.beginShutdown()
		s.asynqServer.Shutdown()
		s.dispatch.Close(s.shutdownGrace)
		s.endGrace()
		s.tasks.Redis().Close()
	})
}

// beginShutdown picks up no more tasks, and bounds how long the shutdown takes.
func (s *Server) beginShutdown() {
	s.dispatch.Stop()
	time.AfterFunc(s.shutdownTimeout, s.endGrace)
}

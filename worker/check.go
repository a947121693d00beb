package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/redischeck"
	"github.com/sluice-go/sluice/throttle"
)

// CheckRedis looks whether the Redises of asynq and of the limiter answer, and returns what of them
// is not set up, one line each: see throttle.Limiter.CheckRedis. Use it at the start of a program.
// Errors are throttle.ErrUnavailable, throttle.ErrForbidden and the context's.
func (c *Client) CheckRedis(ctx context.Context) ([]string, error) {
	return check(ctx, c.limiter, c.tasks.Redis())
}

func check(ctx context.Context, limiter *throttle.Limiter, client redis.UniversalClient) ([]string, error) {
	findings, err := limiter.CheckRedis(ctx)
	queue, failed := redischeck.Findings(ctx, client)
	for _, finding := range queue {
		if !slices.Contains(findings, finding) { // they are often the same Redis
			findings = append(findings, finding)
		}
	}
	return findings, bothFailed(err, failed)
}

// bothFailed joins the errors of the limiter's Redis and of asynq's, which gets the same kinds of errors.
func bothFailed(limiterErr, asynqErr error) error {
	if limiterErr != nil {
		limiterErr = fmt.Errorf("worker: the limiter's Redis: %w", limiterErr)
	}
	if asynqErr != nil {
		kind := throttle.ErrUnavailable
		if redischeck.Forbidden(asynqErr) {
			kind = fmt.Errorf("%w: %w", kind, throttle.ErrForbidden)
		}
		asynqErr = fmt.Errorf("worker: asynq's Redis: %w: %w", kind, asynqErr)
	}
	return errors.Join(limiterErr, asynqErr)
}

// Ping returns nil if the Redises of asynq and of the limiter answer, and the limiter can decide. It is
// for readiness probes, and takes 5 seconds at most for each. Errors are throttle.ErrUnavailable and
// throttle.ErrForbidden.
func (c *Client) Ping() error { return ping(c.limiter, c.asynqClient.Ping) }

// Ping is Client.Ping for a server.
func (s *Server) Ping() error { return ping(s.config.Limiter, s.asynqServer.Ping) }

func ping(limiter *throttle.Limiter, pingAsynq func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()
	failed := pingAsynq()
	return bothFailed(limiter.Ping(ctx), failed)
}

// logCheck logs what is wrong with how the Redises of the limiter and of asynq are set up. A Redis
// that does not answer is not checked.
func (s *Server) logCheck() {
	ctx, cancel := context.WithTimeout(s.shutdownGrace, cleanUpTimeout)
	defer cancel()
	findings, _ := check(ctx, s.config.Limiter, s.tasks.Redis())
	for _, finding := range findings {
		s.config.Logger.Warn("worker: Redis is not set up for throttling", "finding", finding)
	}
}

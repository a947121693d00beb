package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluice-go/sluice/internal/redischeck"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/asynqredis"
	"github.com/sluice-go/sluice/worker/internal/outage"
)

// A link connects a Client or a Server with the two Redises.
type link struct {
	tasks   *asynqredis.Client // of the connection to asynq's
	limiter *throttle.Limiter
	breaker outage.Breaker // of the limiter
	swept   sync.Map       // by line: a channel that holds when that was swept last, and nothing while it is
}

// CheckRedis looks whether the Redises of asynq and of the limiter answer, and returns what of them
// is not set up, one line each: see throttle.Limiter.CheckRedis. A Server logs it at its start. Errors are
// throttle.ErrUnavailable, throttle.ErrForbidden and the context's.
func (l *link) CheckRedis(ctx context.Context) ([]string, error) {
	findings, err := l.limiter.CheckRedis(ctx)
	queue, failed := redischeck.Findings(ctx, l.tasks.Redis())
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
// for readiness probes, and takes 5 seconds at most. Errors are throttle.ErrUnavailable and
// throttle.ErrForbidden.
func (l *link) Ping() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()
	failed := l.tasks.Redis().Ping(ctx).Err()
	return bothFailed(l.limiter.Ping(ctx), failed)
}

// logCheck logs what is wrong with how the Redises of the limiter and of asynq are set up. A Redis
// that does not answer is not checked.
func (s *Server) logCheck() {
	ctx, cancel := context.WithTimeout(s.shutdownGrace, cleanUpTimeout)
	defer cancel()
	findings, _ := s.CheckRedis(ctx)
	for _, finding := range findings {
		s.config.Logger.Warn("worker: Redis is not set up for throttling", "finding", finding)
	}
}

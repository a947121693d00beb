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

// A link connects a Client or a Server to the two Redises.
type link struct {
	tasks   *asynqredis.Client // in asynq's Redis
	limiter *throttle.Limiter
	breaker outage.Breaker // for calls of the limiter
	sweeps  sync.Map       // by line: a channel with the time of the line's last sweep; it is empty during a sweep
}

// CheckRedis checks whether the Redises of asynq and of the limiter answer, and returns a text for each of their
// settings that is wrong: see throttle.Limiter.CheckRedis. A Server logs the texts when it starts. Errors are
// throttle.ErrUnavailable, throttle.ErrForbidden and the context's.
func (l *link) CheckRedis(ctx context.Context) ([]string, error) {
	findings, err := l.limiter.CheckRedis(ctx)
	ofAsynq, asynqErr := redischeck.Findings(ctx, l.tasks.Redis())
	for _, finding := range ofAsynq {
		if !slices.Contains(findings, finding) { // often both are the same Redis
			findings = append(findings, finding)
		}
	}
	return findings, joinErrors(err, asynqErr)
}

// joinErrors joins the errors of the two Redises, and gives asynq's the kinds that the limiter's have.
func joinErrors(limiterErr, asynqErr error) error {
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

// Ping returns nil if the Redises of asynq and of the limiter answer, and the limiter can decide: for readiness probes.
// It takes 5 seconds at most, or a client's ReadTimeout if that is longer. Errors are CheckRedis's.
func (l *link) Ping() error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), cleanUpTimeout, outage.ErrSilent)
	defer cancel()
	asynqErr := l.tasks.Redis().Ping(ctx).Err()
	return joinErrors(l.limiter.Ping(ctx), asynqErr)
}

// logCheck logs the settings of the two Redises that are wrong. A Redis that does not answer is not checked.
func (s *Server) logCheck() {
	ctx, cancel := context.WithTimeout(s.shutdownGrace, cleanUpTimeout)
	defer cancel()
	findings, _ := s.CheckRedis(ctx)
	for _, finding := range findings {
		s.config.Logger.Warn("worker: Redis is not set up for throttling", "finding", finding)
	}
}

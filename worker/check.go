package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle"
)

// checkTimeout bounds the look at how the Redises are set up, when a server starts, and a Ping.
const checkTimeout = 5 * time.Second

// Check looks whether the Redises of asynq and of the limiter answer, and returns what of them is not
// set up, one line each: see throttle.Limiter.CheckRedis. Use it at the start of a program. Errors are
// throttle.ErrUnavailable, throttle.ErrForbidden and the context's.
func (c *Client) Check(ctx context.Context) ([]string, error) {
	return check(ctx, c.limiter, c.asynq.Redis())
}

// Check is Client.Check for a server.
func (s *Server) Check(ctx context.Context) ([]string, error) { return s.adapter.Check(ctx) }

// Check is Client.Check for a server that was made by the adapter. Without a connection of that it looks
// at the limiter's Redis alone.
func (ad *Adapter) Check(ctx context.Context) ([]string, error) {
	asynq := ad.asynq.Load()
	if asynq == nil {
		return ad.config.Limiter.CheckRedis(ctx)
	}
	return check(ctx, ad.config.Limiter, asynq.Redis())
}

func check(ctx context.Context, limiter *throttle.Limiter, asynq redis.UniversalClient) ([]string, error) {
	findings, err := limiter.CheckRedis(ctx)
	queue, failed := throttle.CheckRedis(ctx, asynq)
	for _, finding := range queue {
		if !slices.Contains(findings, finding) { // they are often the same Redis
			findings = append(findings, finding)
		}
	}
	return findings, bothFailed(err, failed)
}

// bothFailed joins the errors of the limiter's Redis and of asynq's.
func bothFailed(limiter, asynq error) error {
	if limiter != nil {
		limiter = fmt.Errorf("worker: the limiter's Redis: %w", limiter)
	}
	if asynq != nil {
		asynq = fmt.Errorf("worker: asynq's Redis: %w", asynq)
	}
	return errors.Join(limiter, asynq)
}

// Ping returns nil if the Redises of asynq and of the limiter answer, and the limiter can decide. It is
// for readiness probes, and takes 5 seconds at most for each. Errors are throttle.ErrUnavailable, and
// throttle.ErrForbidden of the limiter's.
func (c *Client) Ping() error { return ping(c.limiter, c.client.Ping) }

// Ping is Client.Ping for a server.
func (s *Server) Ping() error { return ping(s.adapter.config.Limiter, s.server.Ping) }

func ping(limiter *throttle.Limiter, asynq func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
	defer cancel()
	failed := asynq()
	if failed != nil {
		failed = fmt.Errorf("%w: %w", throttle.ErrUnavailable, failed)
	}
	return bothFailed(limiter.Ping(ctx), failed)
}

// checkRedis logs, once, what is wrong with how the Redises of the limiter and of asynq are set up.
// A Redis that does not answer is not checked.
func (ad *Adapter) checkRedis() {
	if ad.asynq.Load() == nil { // the server has a connection of its own, which the middleware reports
		return
	}
	ctx, cancel := context.WithTimeout(ad.shutdownGrace, checkTimeout)
	defer cancel()
	findings, _ := ad.Check(ctx)
	for _, finding := range findings {
		ad.config.Logger.Warn("worker: Redis is not set up for throttling", "finding", finding)
	}
}

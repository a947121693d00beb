package throttle

import (
	"context"
	"fmt"

	"github.com/sluice-go/sluice/internal/redischeck"
)

// CheckRedis checks how the limiter's Redis is set up, and returns a text for each problem: its eviction
// policy, its clock, or a command that the limiter needs and its user may not call. Of a Cluster it checks
// all primaries, but commands on one. What the server does not say, or the user may not ask, is left out. It
// makes a few calls: use it at the start of a program. Errors are ErrUnavailable, ErrForbidden and the context's.
func (l *Limiter) CheckRedis(ctx context.Context) ([]string, error) {
	findings, err := redischeck.Findings(ctx, l.runner.Client)
	if err != nil {
		return findings, classify(ctx, "", err)
	}
	if err = l.runner.Preflight(ctx); redischeck.Forbidden(err) {
		findings = append(findings, fmt.Sprintf("redis: %v: see docs/howto/lock-down-redis.md", err))
	}
	return findings, classify(ctx, "", err)
}

// Ping returns nil if the limiter can decide: Redis answers, and its user may call all that the limiter needs. It is
// one call, for readiness probes. Errors are ErrUnavailable, ErrForbidden and the context's. See CheckRedis for more.
func (l *Limiter) Ping(ctx context.Context) error { return classify(ctx, "", l.runner.Preflight(ctx)) }

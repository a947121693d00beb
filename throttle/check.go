package throttle

import (
	"context"
	"fmt"
	"strings"

	"github.com/sluice-go/sluice/internal/redischeck"
)

// CheckRedis checks how the limiter's Redis is set up, and returns a line for each problem: its eviction
// policy, its clock, or a command that the limiter needs and its user may not call. Of a Cluster it checks
// all primaries. What the server does not say, or the user may not ask, is left out. It makes a few
// calls: use it at the start of a program. Errors are ErrUnavailable, ErrForbidden and the context's.
func (l *Limiter) CheckRedis(ctx context.Context) ([]string, error) {
	findings, err := redischeck.Findings(ctx, l.runner.Client)
	if err != nil {
		return findings, classify(ctx, "", err)
	}
	refused, err := l.runner.Preflight(ctx)
	switch {
	case err != nil && len(findings) > 0 && !redischeck.Forbidden(err):
		return findings, nil // such as that it is a replica
	case err != nil || len(refused) == 0:
		return findings, classify(ctx, "", err)
	}
	finding := "redis: its user may not call " + strings.Join(refused, ", ") +
		": must be allowed, see docs/howto/lock-down-redis.md"
	return append(findings, finding), fmt.Errorf("%w: %w: %s", ErrUnavailable, ErrForbidden, finding)
}

// Ping returns nil if the limiter can decide: Redis answers, and its user may call all that the
// limiter needs. It is one call, for readiness probes. Errors are ErrUnavailable, ErrForbidden and
// the context's. See CheckRedis for more.
func (l *Limiter) Ping(ctx context.Context) error {
	refused, err := l.runner.Preflight(ctx)
	if err == nil && len(refused) > 0 {
		commands := strings.Join(refused, ", ")
		return fmt.Errorf("%w: %w: its user may not call %s", ErrUnavailable, ErrForbidden, commands)
	}
	return classify(ctx, "", err)
}

package throttle

import (
	"context"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/throttle/internal/redischeck"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// CheckRedis is the function CheckRedis for the Redis of the limiter. It also finds each command
// that the user may not call, and has to. Then the error is ErrForbidden.
func (l *Limiter) CheckRedis(ctx context.Context) ([]string, error) {
	findings, err := CheckRedis(ctx, l.runner.Client())
	if err != nil {
		return findings, err
	}
	refused, err := l.runner.Preflight(ctx)
	switch {
	case err != nil && len(findings) > 0 && !script.Forbidden(err):
		return findings, nil // such as of a replica
	case err != nil || len(refused) == 0:
		return findings, classify(ctx, "", err)
	}
	finding := "redis: its user may not call " + strings.Join(refused, ", ") +
		": must be allowed, see docs/howto/lock-down-redis.md"
	return append(findings, finding), fmt.Errorf("%w: %w: %s", ErrUnavailable, ErrForbidden, finding)
}

// Ping returns nil if the limiter can decide: Redis answers, and lets its user call all that the
// limiter needs. It is one call, for readiness probes. Errors are ErrUnavailable, ErrForbidden and
// the context's. See CheckRedis for more.
func (l *Limiter) Ping(ctx context.Context) error {
	refused, err := l.runner.Preflight(ctx)
	if err == nil && len(refused) > 0 {
		return fmt.Errorf("%w: %w: its user may not call %s",
			ErrUnavailable, ErrForbidden, strings.Join(refused, ", "))
	}
	return classify(ctx, "", err)
}

// CheckRedis looks whether a Redis is set up for Sluice, and returns what is not, one line each:
// its version, its eviction policy, its role and its clock, and whether the client is of its kind.
// Of a Cluster it looks at all primaries. What the server does not say, or the user may not ask, is
// left out. The error is ErrUnavailable, ErrForbidden or the context's. It makes three calls: use
// it at the start of a program.
func CheckRedis(ctx context.Context, client redis.UniversalClient) ([]string, error) {
	findings, err := redischeck.Findings(ctx, client)
	return findings, classify(ctx, "", err)
}

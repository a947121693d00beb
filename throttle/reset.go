package throttle

import (
	"context"
	"slices"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// Reset empties the windows of a policy, of one tenant or with "" of all: as if nothing had been
// granted. What all tenants share stays if a tenant is named. Pauses by the upstream, and what the
// policy adapted to, end there too. Concurrency windows forget who runs now: more may run than
// their limit, until those have ended. Tickets in line keep their places.
//
// It returns how many counts it has emptied. It looks through all keys of a Redis, some thousand a
// call, unless the windows count by the tenant alone, or by nothing. If it fails or ctx ends, some
// counts are empty: repeat it. Errors are Take's.
func (l *Limiter) Reset(ctx context.Context, policy, tenant string) (int, error) {
	cp, err := l.find(policy, tenant)
	if err != nil {
		return 0, err
	}
	shards := []*compiledPolicy{cp}
	if tenant == "" {
		shards = l.policies.Load().byName[policy]
	}
	n := 0
	for _, cp := range shards {
		for _, attributes := range cp.scopes {
			some, err := l.resetScope(ctx, cp, attributes, tenant)
			n += some
			if err != nil {
				return n, classify(ctx, cp.Name, err)
			}
		}
		if err := l.runner.LookAgain(ctx, cp.line); err != nil {
			return n, classify(ctx, cp.Name, err)
		}
	}
	return n, nil
}

func (l *Limiter) resetScope(ctx context.Context, cp *compiledPolicy, attributes []string, tenant string) (int, error) {
	i := slices.Index(attributes, TenantAttribute)
	switch {
	case tenant != "" && i < 0:
		return 0, nil
	case len(attributes) == 0:
		return l.runner.Forget(ctx, cp.line, script.ScopeKey(nil, nil))
	case tenant != "" && len(attributes) == 1:
		return l.runner.Forget(ctx, cp.line, script.ScopeKey(attributes, []string{tenant}))
	}
	return l.runner.ForgetScopes(ctx, cp.line, attributes, func(values []string) bool {
		return tenant == "" || values[i] == tenant
	})
}

package throttle

import (
	"context"
	"slices"
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
			if tenant != "" && !slices.Contains(attributes, TenantAttribute) {
				continue
			}
			some, err := l.runner.Forget(ctx, cp.line, attributes, tenant)
			n += int(some)
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

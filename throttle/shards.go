package throttle

import (
	"fmt"
	"hash/fnv"
	"strings"
)

// MaxShards bounds Policy.Shards.
const MaxShards = 64

// lineName returns the name of the line in which tickets of a tenant wait, which is also the hash
// tag of the tenant's windows. Names of policies hold no slash. The number of shards is in it:
// tenants that come from another shard would find counts there that are not theirs alone.
func lineName(policy, tenant string, shards int) string {
	if shards <= 1 {
		return policy
	}
	return shardName(policy, shardOf(tenant, shards), shards)
}

func shardName(policy string, shard, shards int) string {
	if shards <= 1 {
		return policy
	}
	return fmt.Sprintf("%s/%dof%d", policy, shard+1, shards)
}

// shardOf returns the shard of a tenant, from 0. It is the same in every process.
func shardOf(tenant string, shards int) int {
	if shards <= 1 {
		return 0
	}
	h := fnv.New64a()
	h.Write([]byte(tenant))
	return int(h.Sum64() % uint64(shards))
}

// LineOf returns the name of the line, for Line, in which tickets of a tenant wait for a policy. It
// is the policy's name, unless Policy.Shards is above 1 or SetPolicies changed that: then tickets
// that joined before wait in other lines.
func (l *Limiter) LineOf(policy, tenant string) string {
	shards := l.policies.Load().byName[policy]
	return lineName(policy, tenant, len(shards))
}

// PolicyOf returns the name of the policy that a line belongs to.
func PolicyOf(line string) string {
	policy, _, _ := strings.Cut(line, "/")
	return policy
}

package throttle

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"reflect"
	"slices"
	"strings"

	"github.com/sluice-go/sluice/throttle/internal/glob"
	"github.com/sluice-go/sluice/throttle/internal/quote"
)

// SetPolicies replaces all policies, for calls that begin later. A window keeps its counts if the
// policy's name and its own name, algorithm and scope stay. The line of a removed policy can be
// taken from until it is empty, and its reservations can be corrected and released. So can those of
// removed policies that only other programs had; one that is in force again is left out. The error is
// a *PolicyError. Then nothing changes.
func (l *Limiter) SetPolicies(policies []Policy, removed ...Policy) error {
	l.setting.Lock()
	defer l.setting.Unlock()
	set, err := l.compile(policies)
	if err != nil {
		return err
	}
	before := cmp.Or(l.policies.Load(), &policySet{})
	for line, cp := range before.byLine {
		if now := set.byLine[line]; now != nil {
			now.policyState = cp.policyState
		} else {
			set.byLine[line] = cp
		}
	}
	for _, p := range removed {
		shards, err := l.compilePolicy(p)
		if err != nil {
			return err
		}
		for _, cp := range shards {
			set.byLine[cp.line] = cmp.Or(set.byLine[cp.line], cp)
		}
	}
	if l.policies.Swap(set) != nil && !reflect.DeepEqual(before.policies(), set.policies()) {
		l.config.Logger.Info("throttle: the policies were replaced", "policies", set.names)
	}
	return nil
}

// Policies returns copies of all policies, in the order of SetPolicies, with their defaults.
func (l *Limiter) Policies() []Policy { return l.policies.Load().policies() }

func (set *policySet) policies() (all []Policy) {
	for _, name := range set.names {
		all = append(all, set.byName[name][0].WithDefaults())
	}
	return all
}

// Match returns the policy whose Policy.Match matches a task type, or false. For work that waits or waited
// in line it may be one that was removed. Like Lookup it is cheap: it returns all settings but Match,
// Tenants and Windows.
func (l *Limiter) Match(taskType string, waited bool) (Policy, bool) {
	return l.policies.Load().first(waited, func(cp *compiledPolicy) bool { return cp.Matches(taskType) }).given()
}

// Lookup returns the policy of that name, or the one that a line of that name belongs to, or false. It
// may have been removed.
func (l *Limiter) Lookup(policyOrLine string) (Policy, bool) {
	return l.policies.Load().named(PolicyOf(policyOrLine)).given()
}

// named returns the policy of that name, even if it was removed, or nil.
func (set *policySet) named(policy string) *compiledPolicy {
	if shards := set.byName[policy]; shards != nil {
		return shards[0]
	}
	return set.first(true, func(cp *compiledPolicy) bool { return cp.Name == policy })
}

// removed returns removed policies whose lines are not known to be empty, in order of the lines' names.
func (set *policySet) removed() (policies []*compiledPolicy) {
	for _, cp := range set.byLine {
		if !set.inForce(cp) && !cp.drained.Load() {
			policies = append(policies, cp)
		}
	}
	slices.SortFunc(policies, func(a, b *compiledPolicy) int { return strings.Compare(a.line, b.line) })
	return policies
}

// first returns the first policy in force that matches or, with orRemoved, the first removed one; nil without one.
func (set *policySet) first(orRemoved bool, matches func(*compiledPolicy) bool) *compiledPolicy {
	for _, name := range set.names {
		if cp := set.byName[name][0]; matches(cp) {
			return cp
		}
	}
	if orRemoved {
		for _, cp := range set.removed() {
			if matches(cp) {
				return cp
			}
		}
	}
	return nil
}

func (cp *compiledPolicy) given() (Policy, bool) {
	if cp == nil {
		return Policy{}, false
	}
	p := cp.Policy
	p.Match, p.Tenants, p.Windows = nil, nil, nil
	return p, true
}

// policyFor returns the tenant's shard of a policy. With waited, for work that waits or waited, it may be removed.
func (l *Limiter) policyFor(policy, tenant string, waited bool) (*compiledPolicy, error) {
	if shards := l.policies.Load().byName[policy]; shards != nil {
		return shards[shardOf(tenant, len(shards))], nil
	}
	if waited {
		return l.policyOfLine(l.LineOf(policy, tenant), true)
	}
	return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, quote.Short(policy))
}

// policyOfLine returns the policy that the line belongs to. With former it may be one that was removed.
func (l *Limiter) policyOfLine(line string, former bool) (*compiledPolicy, error) {
	set := l.policies.Load()
	cp := set.byLine[line]
	if cp != nil && !former && !set.inForce(cp) {
		cp = nil
	}
	if shards := set.byName[line]; cp == nil && len(shards) > 1 {
		return nil, fmt.Errorf("%w: policy %q has %d shards, each with a line of its own: "+
			"join the one that LineOf returns, and take from those of Lines", ErrUnknownPolicy, line, len(shards))
	}
	if cp == nil {
		return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, quote.Short(line))
	}
	return cp, nil
}

// A policySet holds all policies of a limiter. SetPolicies replaces it as a whole.
type policySet struct {
	names  []string
	byName map[string][]*compiledPolicy // by shard
	byLine map[string]*compiledPolicy   // with those that SetPolicies removed
}

func (set *policySet) inForce(cp *compiledPolicy) bool {
	return slices.Contains(set.byName[cp.Name], cp)
}

func (l *Limiter) compile(policies []Policy) (*policySet, error) {
	set := &policySet{byName: map[string][]*compiledPolicy{}, byLine: map[string]*compiledPolicy{}}
	for _, p := range policies {
		shards, err := l.compilePolicy(p)
		if err != nil {
			return nil, err
		}
		if set.byName[p.Name] != nil {
			return nil, &PolicyError{Policy: p.Name, Field: "name", Value: p.Name,
				Hint: "is taken: policies have different names"}
		}
		set.byName[p.Name] = shards
		set.names = append(set.names, p.Name)
		for _, cp := range shards {
			set.byLine[cp.line] = cp
		}
	}
	return set, checkOverlaps(policies)
}

func checkOverlaps(policies []Policy) error {
	lists := make([][]string, len(policies))
	for i, p := range policies {
		lists[i] = p.Match
	}
	overlaps := glob.Overlaps(lists)
	if len(overlaps) == 0 {
		return nil
	}
	o := overlaps[0]
	first, second := policies[o.First], policies[o.Second]
	hint := fmt.Sprintf("must not match a task type that policy %q matches too, by %q",
		first.Name, first.Match[o.FirstGlob])
	return &PolicyError{Policy: second.Name, Field: "match", Value: second.Match[o.SecondGlob], Hint: hint}
}

// lineName returns the name of the line in which tickets of a tenant wait, which is also the hash
// tag of the tenant's windows.
func lineName(policy, tenant string, shards int) string {
	return shardName(policy, shardOf(tenant, shards), shards)
}

// shardName returns the name of a shard's line. Policies' names hold no slash. It contains the number of
// shards, as a change of that moves tenants, who must not find the counts of others.
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

// LineOf returns the name of the line in which tickets of a tenant wait for a policy. It is the
// policy's, unless that has shards. Tickets that joined before these changed wait in other lines.
func (l *Limiter) LineOf(policy, tenant string) string {
	shards := 1
	if cp := l.policies.Load().named(policy); cp != nil {
		shards = cp.Shards
	}
	return lineName(policy, tenant, shards)
}

// PolicyOf returns the name of the policy that a line belongs to.
func PolicyOf(line string) string {
	policy, _, _ := strings.Cut(line, "/")
	return policy
}

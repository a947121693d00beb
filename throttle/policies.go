package throttle

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"reflect"
	"slices"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/glob"
	"github.com/sluice-go/sluice/throttle/internal/quote"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

const followWithin = 2 * time.Second // other processes learn of changes within this time

const onlyInForce, orRemoved = false, true // which policies policyFor and policyOfLine return

// SetPolicies replaces all policies, for calls that begin later. A window keeps its counts if the policy's name and
// its own name, algorithm and scope stay. Tickets of a removed policy can be taken until its line is empty, and its
// reservations can be corrected and released. `removed` are policies that only other programs had; one that is in
// force again is ignored. An error wraps a *PolicyError for each invalid value of a policy. Then nothing changes.
func (l *Limiter) SetPolicies(policies []Policy, removed ...Policy) error {
	l.setting.Lock()
	defer l.setting.Unlock()
	set := &policySet{byLine: map[string]*compiledPolicy{}, byName: map[string][]*compiledPolicy{}}
	var names []string
	var globs [][]string
	for i, p := range slices.Concat(policies, removed) {
		p, isRemoved := p.WithDefaults(), i >= len(policies)
		if err := p.Validate(); err != nil {
			return err
		}
		if !isRemoved {
			if set.byName[p.Name] != nil {
				return &PolicyError{Policy: p.Name, Field: "name", Value: p.Name, Hint: "is taken: policies have different names"}
			}
			set.policies, names, globs = append(set.policies, p), append(names, p.Name), append(globs, p.Match)
		}
		for shard := range p.Shards {
			l.addShard(set, p, p.lineOfShard(shard), isRemoved)
		}
	}
	if overlaps := glob.Overlaps(globs); len(overlaps) > 0 {
		first, second := overlaps[0].First, overlaps[0].Second
		hint := fmt.Sprintf("must not match a task type that policy %q matches too, by %q",
			names[first], globs[first][overlaps[0].FirstGlob])
		return &PolicyError{Policy: names[second], Field: "match", Value: globs[second][overlaps[0].SecondGlob], Hint: hint}
	}
	old := cmp.Or(l.policies.Load(), &policySet{})
	for _, before := range old.lines {
		l.addShard(set, before.Policy, before.line, true) // if the set has no policy for the line: it is served until it is empty
		set.byLine[before.line].policyState = before.policyState
	}
	if l.policies.Swap(set) != nil && !reflect.DeepEqual(old.policies, set.policies) {
		l.config.Logger.Info("throttle: the policies were replaced", "policies", names)
	}
	return nil
}

// A policySet has all policies of a limiter. SetPolicies replaces it as a whole.
type policySet struct {
	policies []Policy          // in force, in the order of SetPolicies, with their defaults
	lines    []*compiledPolicy // their shards, and then removed ones
	byLine   map[string]*compiledPolicy
	byName   map[string][]*compiledPolicy // in the order of lines
}

// addShard adds one shard of a policy to a set, unless that has a policy for the line already.
func (l *Limiter) addShard(set *policySet, p Policy, line string, removed bool) {
	if set.byLine[line] != nil {
		return
	}
	paused := func() int64 { return l.interventions.Load().pause(target{policy: p.Name}).ends() }
	cp := compile(&l.runner, p, line, paused)
	claims := &claims{line: l.Line(line), taker: l.runner.NewTaker(), waiting: map[string]waiter{}}
	cp.policyState = &policyState{group: l.runner.NewGroup(), claims: claims, taker: l.runner.NewTaker()}
	set.byLine[line], set.lines = cp, append(set.lines, cp)
	set.byName[p.Name] = append(set.byName[p.Name], cp)
	if removed {
		l.watch(cp)
	}
}

// watch counts the tickets in a removed policy's line every 10 seconds. Once two counts in a row find none, Lines omits
// the line. The first count comes when other processes know of the removal: until then they may join the line.
func (l *Limiter) watch(cp *compiledPolicy) {
	cp.removed.Store(true)
	time.AfterFunc(5*followWithin, func() {
		if now, _ := l.policyOfLine(cp.line, orRemoved); now != cp { // policies were set since. If the line is removed all the same, it has a new watch
			return
		}
		if waiting, err := l.runner.CountTickets(context.Background(), cp.line); waiting > 0 || err != nil {
			cp.emptyCounts.Store(0)
		} else {
			cp.emptyCounts.Add(1)
		}
		l.watch(cp)
	})
}

// Policies returns copies of all policies, in the order of SetPolicies, with their defaults.
func (l *Limiter) Policies() (all []Policy) {
	for _, p := range l.policies.Load().policies {
		all = append(all, p.WithDefaults())
	}
	return all
}

// Match returns the policy whose Policy.Match matches a task type, or false. With `waited`, for work that is or was in
// line, it may be a removed policy. Like Lookup, Match is cheap, and its result lacks Match, Tenants and Windows.
func (l *Limiter) Match(taskType string, waited bool) (Policy, bool) {
	for cp := range l.policies.Load().live {
		if (waited || !cp.removed.Load()) && cp.Matches(taskType) {
			return cp.settings, true
		}
	}
	return Policy{}, false
}

// Lookup returns the policy of that name, or of the line of that name, or false. It may have been removed.
func (l *Limiter) Lookup(policyOrLine string) (Policy, bool) {
	if shards := l.policies.Load().byName[script.PolicyOf(policyOrLine)]; shards != nil {
		return shards[0].settings, true
	}
	return Policy{}, false
}

// live yields the shards of policies in force, and then of removed ones until watch has found their line empty twice.
func (set *policySet) live(yield func(*compiledPolicy) bool) {
	for _, cp := range set.lines {
		if cp.emptyCounts.Load() < 2 && !yield(cp) {
			return
		}
	}
}

func (set *policySet) inForce(policy string) bool {
	shards := set.byName[policy]
	return shards != nil && !shards[0].removed.Load()
}

// policyFor returns the tenant's shard of a policy. For work that has waited it may be a removed one.
func (l *Limiter) policyFor(policy, tenant string, removedToo bool) (*compiledPolicy, error) {
	if !removedToo && !l.policies.Load().inForce(policy) {
		return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, quote.Short(policy))
	}
	return l.policyOfLine(l.LineOf(policy, tenant), orRemoved) // checked above, where the error names the policy
}

// policyOfLine returns the policy that the line belongs to.
func (l *Limiter) policyOfLine(line string, removedToo bool) (*compiledPolicy, error) {
	set := l.policies.Load()
	if cp := set.byLine[line]; cp != nil && (removedToo || !cp.removed.Load()) {
		return cp, nil
	}
	if shards := set.byName[line]; shards != nil && shards[0].Shards > 1 {
		return nil, fmt.Errorf("%w: policy %q has %d shards, each with a line of its own: "+
			"join the one that LineOf returns, and take from those of Lines", ErrUnknownPolicy, line, shards[0].Shards)
	}
	return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, quote.Short(line))
}

// LineOf returns the name of the line in which tickets of a tenant wait for a policy. It is the policy's name, unless
// the policy has shards. Tickets that joined before the shards changed wait in other lines.
func (l *Limiter) LineOf(policy, tenant string) string {
	if shards := l.policies.Load().byName[policy]; shards != nil {
		return shards[0].lineOf(tenant)
	}
	return policy
}

// lineOf returns the name of a tenant's line. It is the same in every process.
func (p *Policy) lineOf(tenant string) string {
	h := fnv.New64a()
	h.Write([]byte(tenant))
	return p.lineOfShard(int(h.Sum64() % uint64(p.Shards)))
}

// lineOfShard returns the name of a shard's line, which is its hash tag. The number of shards is a part of it: if
// that changes, tenants move, and all count from 0.
func (p *Policy) lineOfShard(shard int) string {
	if p.Shards == 1 {
		return p.Name
	}
	return fmt.Sprintf("%s/%dof%d", p.Name, shard+1, p.Shards)
}

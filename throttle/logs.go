package throttle

import (
	"context"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// maxWatched bounds the rates that are watched until they are the published ones again: tenants
	// are data.
	maxWatched = 1000

	// watchTimeout bounds the question whether a rate is the published one again.
	watchTimeout = 5 * time.Second

	// watchAgain is the shortest time until it is asked again.
	watchAgain = time.Second
)

// watched are the requests whose rate a refusal to this process has changed.
type watched struct {
	mu    sync.Mutex
	byKey map[string]bool // by policy, window and scope
}

// logRefusal logs a refusal if a pause begins by it, and has it logged when the rate that it
// changed is the published one again.
func (l *Limiter) logRefusal(r Request, refusal Refusal) {
	if refusal.Pause <= 0 {
		return
	}
	about := []any{"policy", refusal.Policy, "tenant", refusal.Tenant, "for", refusal.Pause}
	if refusal.Adapted != nil {
		about = append(about, "rate", refusal.Adapted.String())
	}
	l.logger.Warn("throttle: the upstream refused a call: its policy pauses", about...)
	if refusal.Adapted != nil {
		l.watch(r, *refusal.Adapted)
	}
}

func (l *Limiter) watch(r Request, a Adapted) {
	key := strings.Join(append([]string{r.Policy, a.Window}, a.Scope.Values...), "\x00")
	l.watched.mu.Lock()
	defer l.watched.mu.Unlock()
	if l.watched.byKey[key] || len(l.watched.byKey) >= maxWatched {
		return
	}
	l.watched.byKey[key] = true
	r.Ticket = Ticket{}
	l.lookLater(key, r, a, a.Until.Sub(a.Changed))
}

// lookLater logs, after a time, that a rate is the published one. While it is not, it looks again.
func (l *Limiter) lookLater(key string, r Request, last Adapted, in time.Duration) {
	time.AfterFunc(max(in, watchAgain), func() {
		ctx, cancel := context.WithTimeout(context.Background(), watchTimeout)
		defer cancel()
		d, err := l.Peek(ctx, r)
		if err == nil && d.Adapted != nil {
			l.lookLater(key, r, *d.Adapted, d.Adapted.Until.Sub(d.At))
			return
		}
		l.watched.mu.Lock()
		delete(l.watched.byKey, key)
		l.watched.mu.Unlock()
		if err == nil {
			l.logger.Info("throttle: no call was refused for a while: the rate is the published one again",
				"policy", r.Policy, "tenant", r.Tenant, "was", last.String())
		}
	})
}

func (l *Limiter) logPolicies(before, now *policySet) {
	names := map[string][]string{}
	for _, name := range now.names {
		switch old := before.byName[name]; {
		case old == nil:
			names["added"] = append(names["added"], name)
		case !reflect.DeepEqual(old[0].declared, now.byName[name][0].declared):
			names["changed"] = append(names["changed"], name)
		}
	}
	for _, name := range before.names {
		if now.byName[name] == nil {
			names["removed"] = append(names["removed"], name)
		}
	}
	var about []any
	for _, what := range slices.Sorted(maps.Keys(names)) {
		about = append(about, what, slices.Sorted(slices.Values(names[what])))
	}
	if about != nil {
		l.logger.Info("throttle: the policies were replaced", about...)
	}
}

package dispatch

import (
	"maps"

	"github.com/sluice-go/sluice/throttle"
)

// Each line is fair between its tenants. The lines of one policy's shards share this server's slots
// so that all its tenants get theirs by weight: a line's turn comes when its tenants have had the
// least (start-time fair queueing, Goyal et al., 1996).

// A share is how much the tenants of a line have had.
type share struct {
	began  float64            // where the task began that was taken last: one of a tenant of weight 1 takes 1
	ends   map[string]float64 // by queue and tenant: where its last one ended, if that is later
	pruned int                // how many were left when those were dropped that are not later
}

// family is the policy of a line, which its other shards have too.
func (l *line) family() string { return throttle.PolicyOf(l.name) }

// had returns how much the tenants of a line have had. Nobody saves up turns.
func (l *line) had() float64 { return max(l.share.began, l.group.reached[l.family()]) }

// serves notes tickets that were taken.
func (l *line) serves(tickets []throttle.TakenTicket) {
	family, s := l.family(), &l.share
	if len(tickets) > 0 {
		l.group.served = family
	}
	if len(tickets) == 0 || family == l.name {
		return
	}
	s.began = l.had()
	l.group.reached[family] = s.began
	if s.ends == nil {
		s.ends = map[string]float64{}
	}
	for _, t := range tickets {
		whose := t.Queue + " " + t.Decision.Tenant
		s.began = max(s.began, s.ends[whose])
		s.ends[whose] = s.began + 1/t.Weight
	}
	if len(s.ends) > 2*s.pruned+100 {
		maps.DeleteFunc(s.ends, func(_ string, end float64) bool { return end <= s.began })
		s.pruned = len(s.ends)
	}
}

package dispatch

import (
	"cmp"
	"strings"

	"github.com/sluice-go/sluice/throttle"
)

// Each line is fair between its tenants. The lines of all policies, and of their shards, share this
// server's slots so that all tenants get theirs: a line's turn comes when its tenants have had the least
// (start-time fair queueing, Goyal et al., 1996). Tenants of shards go by weight, the others are equals.

// endsMost is of how many tenants of a line is known what they had. If there are more all are forgotten.
const endsMost = 10_000

// had returns how much the tenants of a line have had. Nobody saves up turns.
func (l *line) had() float64 { return max(l.began, l.group.reached) }

// before reports whether a line of the same group comes first.
func (l *line) before(other *line) bool {
	had, asked := cmp.Compare(l.had(), other.had()), l.asked.Compare(other.asked)
	return cmp.Or(had, asked, strings.Compare(l.name, other.name)) < 0
}

// serves notes tickets that were taken.
func (l *line) serves(tickets []throttle.TakenTicket) {
	if len(tickets) == 0 {
		return
	}
	l.began = l.had()
	l.group.reached = l.began
	for _, t := range tickets {
		whose := t.Queue + " " + t.Decision.Tenant
		l.began = max(l.began, l.ends[whose])
		l.ends[whose] = l.began + 1/cmp.Or(t.Weight, 1)
	}
	if len(l.ends) > endsMost {
		clear(l.ends)
	}
}

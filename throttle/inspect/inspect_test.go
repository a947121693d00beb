package inspect

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
)

// A tenant starves whose first ticket stays, unless it is granted others: those of retries go before it.
func TestATenantThatIsGrantedDoesNotStarve(t *testing.T) {
	at := time.Date(2026, 1, 2, 14, 0, 0, 0, time.UTC)
	for after, starving := range map[int64]int{100: 1, 101: 0} {
		var h Heads
		s := PolicyState{State: State{Policy: "api"}, Tenants: []State{{Tenant: "acme", Oldest: at, Share: 1, flow: flow{tag: 100}}}}
		s.Tenants[0].At, s.PerSecond = at, 20
		h.Note(s)
		s.Tenants[0].At, s.Tenants[0].flow.tag = at.Add(80*time.Second), after
		expect.Equal(t, len(h.Note(s)), starving, "starve with the tag", after)
	}
}

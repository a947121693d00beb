package inspect

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// What holds tickets up has a name.
func TestWhatHoldsUpIsNamed(t *testing.T) {
	for binds, want := range map[string]string{
		"": "", "burst": "window burst", throttle.ByPause: "a pause", throttle.ByUpstream: "a pause by the upstream",
		throttle.ByLine: "tickets that wait before it", throttle.BySlots: "handler slots: servers have none free",
	} {
		expect.Equal(t, (Limits{Binds: binds}).DelayedBy(), want, binds)
	}
}

// A tenant starves whose first ticket stays, unless it is granted others: those of retries go before it.
func TestATenantThatIsGrantedDoesNotStarve(t *testing.T) {
	at := time.Date(2026, 1, 2, 14, 0, 0, 0, time.UTC)
	for after, starving := range map[int64]int{100: 1, 101: 0} {
		var h Heads
		s := PolicyState{Policy: "api", At: at, Tenants: []TenantState{{Tenant: "acme", Oldest: at, Share: 1, tags: 100}}}
		s.PerSecond = 20
		h.Note(s)
		s.At, s.Tenants[0].tags = at.Add(80*time.Second), after
		expect.Equal(t, len(h.Note(s)), starving, "starve with the tag", after)
	}
}

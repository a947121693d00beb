package inspect

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
)

// A tenant starves whose first ticket stays, unless it is granted others: those of retries go before it.
func TestATenantThatIsGrantedDoesNotStarve(t *testing.T) {
	at := time.Date(2026, 1, 2, 14, 0, 0, 0, time.UTC)
	tenantWindows := []throttle.WindowState{{Remaining: 300, Unit: "tokens"}} // where one that costs more waits
	for _, row := range []struct {
		after    string
		cost     int64
		starving int
	}{{"100", 300, 1}, {"100.5", 300, 0}, {"100", 301, 0}} {
		var d StarvationDetector
		cost := map[string]int64{"tokens": row.cost}
		acme := State{Tenant: "acme", Oldest: at, Share: 1, Windows: tenantWindows, Cost: cost, tag: "100"}
		s := PolicyState{State: State{Policy: "api"}, Tenants: []State{acme}}
		s.Tenants[0].At, s.PerSecond = at, 20
		d.Note(s)
		s.Tenants[0].At, s.Tenants[0].tag = at.Add(80*time.Second), row.after
		expect.Equal(t, len(d.Note(s)), row.starving, "starve:", row)
	}
}

package throttle_test

import (
	"testing"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// What SetInterventions is given, and what Interventions returns, is the caller's to change.
func TestInterventionsAreCopies(t *testing.T) {
	l := throttletest.NewLimiter(t, throttle.Policy{Name: "p", Windows: []throttle.Window{{Name: "w", Limit: 1, Period: time.Hour}}})
	given := throttle.TenantOverride{
		Exempt: new(true), Policy: "p", Tenant: "acme", Until: time.Now().Add(time.Hour), Windows: map[string]throttle.Override{"w": {Limit: 1}},
	}
	l.SetInterventions(throttle.Interventions{At: time.Now(), Overrides: []throttle.TenantOverride{given}})
	for _, changed := range []throttle.TenantOverride{given, l.Interventions().Overrides[0]} {
		*changed.Exempt = false
		changed.Windows["w"] = throttle.Override{Limit: 2}
	}
	for range 3 {
		d, err := l.Reserve(t.Context(), throttle.Request{Policy: "p", Tenant: "acme"})
		limitertest.Require(t, err == nil && d.Exempt && d.Windows[0].Limit == 1, d, err)
	}
}

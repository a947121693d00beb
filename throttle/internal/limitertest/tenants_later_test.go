package limitertest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-go/sluice/internal/testhook/expect"
	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/throttletest"
)

// What is said of a tenant by now holds within a minute for calls that wait in place, also where no server takes.
func TestATenantsNewLimitHoldsForCallsThatWait(t *testing.T) {
	more := map[string]throttle.Override{"window": {Limit: 100}}
	var now atomic.Bool // Config.Tenants says so
	for name, change := range map[string]func(l *throttle.Limiter){
		"an override": func(l *throttle.Limiter) {
			l.SetInterventions(throttle.Interventions{At: time.Now(), Overrides: []throttle.TenantOverride{
				{Policy: "api", Tenant: "acme", Until: time.Now().Add(h), Windows: more},
			}})
		},
		"the policy": func(l *throttle.Limiter) {
			policies := l.Policies()
			policies[0].Tenants = map[string]throttle.Tenant{"acme": {Windows: more}}
			expect.Must(t, l.SetPolicies(policies))
		},
		"a database": func(*throttle.Limiter) { now.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := NewFrom(t, throttle.Config{
					Client: throttletest.InMemory(t).Client(t),
					Policies: []throttle.Policy{{
						Name: "api", Windows: []throttle.Window{{Name: "window", Limit: 1, Period: m}},
					}},
					Tenants: func(_ context.Context, _, tenant string) (throttle.Tenant, bool, error) {
						if now.Load() && tenant == "aaa" {
							return throttle.Tenant{}, false, errors.New("on purpose")
						}
						return throttle.Tenant{Windows: more}, now.Load(), nil
					},
				})
				ctx, cancel := context.WithCancel(t.Context())
				var granted atomic.Int64
				for range 9 { // another tenant waits before it
					go l.Wait(ctx, throttle.Request{Policy: "api", Tenant: "aaa"})
				}
				time.Sleep(s)
				for range 30 {
					go func() {
						if _, err := l.Wait(ctx, throttle.Request{Policy: "api", Tenant: "acme"}); err == nil {
							granted.Add(1)
						}
					}()
				}
				time.Sleep(10 * s)
				change(l)
				time.Sleep(3 * m)
				expect.Equal(t, granted.Load(), 30, "granted")
				cancel()
				time.Sleep(5 * s)
			})
		})
	}
}

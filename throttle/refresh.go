package throttle

import (
	"context"
	"math"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

const (
	refreshTimeout = time.Minute
	refreshEvery   = time.Minute      // tenants' settings change, and other processes may join by older ones
	refreshPart    = 1000             // refreshes take at most 1/refreshPart of the time
	refreshAgain   = 10 * time.Second // after an error

	refreshNew      = 0             // as compiledPolicy.refreshAt: the policy is new, and the next take refreshes
	refreshUnderWay = math.MaxInt64 // the same: no take refreshes, until a time is set by the refresh or SetInterventions
)

// maintain, after a take, refreshes the tickets in line if that is due. Taken.Next says whether any are in line.
func (l *Limiter) maintain(ctx context.Context, cp *compiledPolicy, next time.Duration) {
	at, now := cp.refreshAt.Load(), time.Now()
	due := now.UnixNano() >= at && next >= 0 && !cp.removed.Load()
	if !due || !cp.refreshAt.CompareAndSwap(at, refreshUnderWay) { // if it has changed, somebody else refreshes
		return
	}
	go func() {
		again := refreshAgain
		switch err := l.refresh(context.WithoutCancel(ctx), cp, nil); {
		case err == nil && at == refreshNew: // until then clients may join by older settings
			again = followWithin
		case err == nil:
			again = max(refreshEvery, refreshPart*time.Since(now))
		}
		cp.refreshAt.CompareAndSwap(refreshUnderWay, time.Now().Add(again).UnixNano()) // else one is due sooner
	}()
}

// refresh applies present settings to tickets in line of these tenants, or with nil of all.
func (l *Limiter) refresh(ctx context.Context, cp *compiledPolicy, tenants map[string]bool) error {
	ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	cp.refreshing.Lock() // an older policy must not be applied last
	defer cp.refreshing.Unlock()
	return l.runner.Flows(ctx, cp.line, func(flows []string) error {
		if now, _ := l.policyOfLine(cp.line, orRemoved); now != cp {
			return nil
		}
		var asks []script.Request
		for _, flow := range flows {
			r, hasSameScopes := cp.requestOf(flow, "", 1) // as the policy has now
			if isMeant := tenants == nil || tenants[r.Tenant]; !hasSameScopes || !isMeant {
				continue
			}
			t, err := l.tenant(ctx, cp, r.Tenant)
			o, invalid := cp.newOperation(r, t, allValues)
			if err != nil || invalid != nil {
				continue // the next refresh asks again
			}
			ask := o.lineRequest(script.Refresh)
			ask.LinePart.Flow = flow // the flow of a claim has another name
			asks = append(asks, ask)
		}
		_, err := cp.decide(ctx, asks...)
		return err
	})
}

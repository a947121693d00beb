package worker

import (
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/worker/internal/dispatch"
)

// started tells the limiter's observer that a task's handler is about to be called.
func (ad *Adapter) started(d throttle.Decision, grant *dispatch.Grant) {
	tell := ad.config.Limiter.Observer().Started
	if tell == nil {
		return
	}
	s := throttle.Start{Late: -1, Policy: d.Policy, Tenant: d.Tenant}
	if wasTaken(grant) {
		s.Waited = grant.Waited + max(0, time.Since(grant.Sent))
		if !grant.Due.IsZero() {
			s.Late = max(0, time.Since(grant.Due))
		}
	}
	tell(s)
}

// undecided reports a task that is requeued because the limiter could not decide.
func (ad *Adapter) undecided(r throttle.Request, err error) {
	if report := ad.config.Limiter.Observer().Undecided; report != nil {
		report(throttle.Undecided{Err: err, Policy: r.Policy, Tenant: r.Tenant})
	}
}

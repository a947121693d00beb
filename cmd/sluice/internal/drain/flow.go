package drain

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	againAfter  = time.Second            // between two tries to reach Redis
	startWithin = 100 * time.Millisecond // of the grant: a call that begins later needs a new grant
)

// serve makes the calls of one tenant and policy, in their order, each when it is granted. No call begins after the
// context `beginning` has ended. Calls under way go on until `calls` has ended.
func (d *Drain) serve(beginning, calls context.Context, flow []*openJob) {
	for _, j := range flow {
		if grant, ok := d.granted(beginning, calls, j); ok {
			d.running.Go(func() { d.call(beginning, calls, j, grant) })
		}
	}
}

// granted waits until a job is granted and has a slot, or no call may begin. A job that can never be granted ends.
func (d *Drain) granted(beginning, calls context.Context, j *openJob) (grant throttle.Decision, ok bool) {
	for beginning.Err() == nil {
		grant, err := d.Limiter.Wait(beginning, j.request)
		switch {
		case errors.As(err, new(*throttle.RequestError)):
			d.end(j, err)
			return grant, false
		case err != nil && beginning.Err() == nil:
			d.Progress.Unanswered(err)
			sleep(beginning, againAfter)
			continue
		case err != nil:
			return grant, false
		}
		grantedAt := time.Now()
		select {
		case <-d.slots:
		case <-beginning.Done():
			_, _ = grant.Reservation.Cancel(calls)
			return grant, false
		}
		if beginning.Err() == nil && time.Since(grantedAt) <= startWithin {
			return grant, true
		}
		// The windows count the units from the time of the grant, so the upstream could get too many calls.
		_, _ = grant.Reservation.Cancel(calls)
		atOnce := j.request
		atOnce.MaxWait = -1
		if grant, err = d.Limiter.Wait(beginning, atOnce); err == nil {
			return grant, true
		}
		d.slots <- struct{}{}
	}
	return grant, false
}

// again puts a job back in its line after a delay.
func (d *Drain) again(beginning, calls context.Context, j *openJob, after time.Duration) {
	d.running.Go(func() {
		sleep(beginning, after)
		d.serve(beginning, calls, []*openJob{j})
	})
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

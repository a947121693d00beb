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

// serve makes the calls of one tenant and policy, in their order, each when it is granted. No call begins after ctx has
// ended. Calls under way go on until the context of calls has ended.
func (d *Drain) serve(ctx, calls context.Context, flow []*openJob) {
	for _, w := range flow {
		if grant, ok := d.granted(ctx, calls, w); ok {
			d.running.Go(func() { d.call(ctx, calls, w, grant) })
		}
	}
}

// granted waits until a job is granted and has a slot. A job that can never be granted ends.
func (d *Drain) granted(ctx, calls context.Context, w *openJob) (grant throttle.Decision, ok bool) {
	for ctx.Err() == nil {
		grant, err := d.Limiter.Wait(ctx, w.request)
		switch {
		case errors.As(err, new(*throttle.RequestError)):
			d.end(w, err)
			return grant, false
		case err != nil && ctx.Err() == nil:
			d.Progress.Unanswered(err)
			sleep(ctx, againAfter)
			continue
		case err != nil:
			return grant, false
		}
		grantedAt := time.Now()
		select {
		case <-d.slots:
		case <-ctx.Done():
			_, _ = grant.Reservation.Cancel(calls)
			return grant, false
		}
		if time.Since(grantedAt) <= startWithin {
			return grant, true
		}
		// The windows count the units from the time of the grant, so the upstream could get too many calls.
		_, _ = grant.Reservation.Cancel(calls)
		atOnce := w.request
		atOnce.MaxWait = -1
		if grant, err = d.Limiter.Wait(calls, atOnce); err == nil {
			return grant, true
		}
		d.slots <- struct{}{}
	}
	return grant, false
}

// again puts a job back in its line after a delay.
func (d *Drain) again(ctx, calls context.Context, w *openJob, after time.Duration) {
	d.running.Go(func() {
		sleep(ctx, after)
		d.serve(ctx, calls, []*openJob{w})
	})
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

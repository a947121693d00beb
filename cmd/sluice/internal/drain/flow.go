package drain

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

const (
	againAfter  = time.Second            // after Redis did not answer
	startWithin = 100 * time.Millisecond // an older grant is replaced: its units count from then
)

// serve makes the calls of one tenant by one policy, in their order, each when it is granted.
func (d *Drain) serve(ctx, calls context.Context, flow []*work) {
	for _, w := range flow {
		if grant, ok := d.granted(ctx, calls, w); ok {
			d.working.Go(func() { d.call(ctx, calls, w, grant) })
		}
	}
}

// granted waits until a job is granted and has a slot. A job that never fits ends.
func (d *Drain) granted(ctx, calls context.Context, w *work) (grant throttle.Decision, ok bool) {
	for ctx.Err() == nil {
		grant, err := d.Limiter.Wait(ctx, w.request)
		switch {
		case errors.As(err, new(*throttle.RequestError)):
			d.end(w, err)
			return grant, false
		case err != nil && ctx.Err() == nil:
			d.Progress.Unanswered(err)
			pause(ctx, againAfter)
			continue
		case err != nil:
			return grant, false
		}
		since := time.Now()
		select {
		case <-d.slots:
		case <-ctx.Done():
			_, _ = grant.Reservation.Cancel(calls)
			return grant, false
		}
		if time.Since(since) <= startWithin {
			return grant, true
		}
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

// again makes the call of a job once more, after a while.
func (d *Drain) again(ctx, calls context.Context, w *work, after time.Duration) {
	d.working.Go(func() {
		pause(ctx, after)
		d.serve(ctx, calls, []*work{w})
	})
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

package httpthrottle

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"sync"

	"github.com/sluice-go/sluice/throttle"
)

// ErrLeaseLost is why a call, or a handler's context, was ended: the hold of a Concurrency window ran
// out, because Redis could not be reached for as long as the lease, and the room is somebody else's.
var ErrLeaseLost = errors.New("httpthrottle: the hold of a concurrency window was lost")

// A hold keeps what Concurrency windows hold for a reservation, by renewing it, until it is ended. One
// of a reservation that holds nothing does nothing.
type hold struct {
	cancel      context.CancelCauseFunc
	limiter     *throttle.Limiter
	logger      *slog.Logger
	once        sync.Once
	outer       context.Context
	reservation throttle.Reservation
	stop        func() // nil if it holds nothing
}

// newHold begins to renew. The context returned ends with the hold, with ErrLeaseLost if that is lost.
func newHold(outer context.Context, l *throttle.Limiter, r throttle.Reservation, logger *slog.Logger) (context.Context, *hold) {
	h := &hold{limiter: l, logger: logger, outer: outer, reservation: r}
	ctx, cancel := context.WithCancelCause(outer)
	if l.Lease(r) == 0 {
		cancel(nil)
		return outer, h
	}
	h.stop = l.KeepRenewing(outer, r, func(bool) { cancel(ErrLeaseLost) })
	h.cancel = cancel
	return ctx, h
}

// end ends the hold, once, by what is to be done then. A renewal under way is awaited: after the
// release it would take the room again.
func (h *hold) end(do func(context.Context)) {
	h.once.Do(func() {
		if h.stop != nil {
			h.stop()
			defer h.cancel(context.Canceled)
		}
		afterward(h.outer, do)
	})
}

func (h *hold) release(ctx context.Context) {
	if h.stop == nil {
		return
	}
	if err := h.limiter.Release(ctx, h.reservation); err != nil {
		h.logger.Warn("httpthrottle: a hold of a concurrency window was not released, and runs out", "policy", h.reservation.Policy, "error", err)
	}
}

// until ends the hold with the answer's body, or the caller's context.
func (h *hold) until(outer context.Context, resp *http.Response) {
	if h.stop == nil {
		return
	}
	if resp.Body == nil || resp.Body == http.NoBody {
		h.end(h.release)
		return
	}
	forget := context.AfterFunc(outer, func() { h.end(h.release) })
	b := body{resp.Body, func() { forget(); h.end(h.release) }}
	if w, ok := resp.Body.(io.Writer); ok {
		resp.Body = &duplex{b, w}
	} else {
		resp.Body = &b
	}
}

package httpthrottle

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/sluice-go/sluice/throttle"
)

// unavailableRetry is the Retry-After, in seconds, of a request that was not served because Redis
// did not answer.
const unavailableRetry = "1"

// sparsely is the least time between two log lines about requests that cannot be counted. Without
// it any client could fill the log.
const sparsely = time.Minute

// fail answers a request that the limiter could not decide.
func (g *guard) fail(w http.ResponseWriter, r *http.Request, err error) {
	var wrong *throttle.RequestError
	switch {
	case r.Context().Err() != nil: // nobody reads the answer
		w.WriteHeader(http.StatusServiceUnavailable)
	case errors.As(err, new(*throttle.NeverFitsError)):
		http.Error(w, "more than is ever served at once", http.StatusRequestEntityTooLarge)
	case errors.As(err, &wrong) && // the client chose the value; costs are the server's
		(wrong.Field == throttle.TenantAttribute || strings.HasPrefix(wrong.Field, "attribute ")):
		g.invalid.log(func(n int) {
			g.Logger.Warn("httpthrottle: requests were refused that no window can count",
				"policy", g.Policy, "requests", n, "last", err)
		})
		g.Refused(w, r, http.StatusBadRequest, throttle.Decision{At: time.Now(), Policy: g.Policy})
	case errors.As(err, &wrong), errors.Is(err, throttle.ErrUnknownPolicy):
		g.broken.log(func(n int) {
			g.Logger.Error("httpthrottle: requests cannot be throttled, and were not served",
				"policy", g.Policy, "requests", n, "last", err)
		})
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
	default:
		g.logOutage(err, "closed")
		w.Header().Set("Retry-After", unavailableRetry)
		g.Refused(w, r, http.StatusServiceUnavailable, throttle.Decision{
			At: time.Now(), Policy: g.Policy, RetryIn: time.Second,
		})
	}
}

// logOutage logs when an outage of the limiter begins, with its cause, every minute while it lasts,
// and when it ends.
func (g *guard) logOutage(cause error, fails string) {
	if cause != nil {
		g.outage.log(func(n int) {
			g.Logger.Error("httpthrottle: the limiter is unavailable",
				"policy", g.Policy, "fails", fails, "requests", n, "error", cause)
		})
	} else if g.outage.end() {
		g.Logger.Info("httpthrottle: the limiter is available again", "policy", g.Policy)
	}
}

// A sparse counts frequent events, of which some are logged.
type sparse struct {
	mu     sync.Mutex
	n      int       // since the last line
	logged time.Time // the last line; zero before the first event
}

// end makes log call line for the next event at once. It reports whether there were any events.
func (s *sparse) end() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	some := !s.logged.IsZero()
	s.n, s.logged = 0, time.Time{}
	return some
}

// log counts one more, and calls line with the number not logged yet, unless it did so lately.
func (s *sparse) log(line func(n int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	if time.Since(s.logged) >= sparsely {
		line(s.n)
		s.n, s.logged = 0, time.Now()
	}
}

// refuse is MiddlewareConfig.Refused's default. It names no window, as scopes hold other people's
// names.
func refuse(w http.ResponseWriter, _ *http.Request, status int, _ throttle.Decision) {
	text := http.StatusText(status)
	if seconds := w.Header().Get("Retry-After"); seconds != "" {
		text += ": try again in " + seconds + " s"
	}
	http.Error(w, text, status)
}

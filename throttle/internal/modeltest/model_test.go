package modeltest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle"
	"github.com/sluice-go/sluice/throttle/internal/limitertest"
)

// A model answers as the scripts must. It is slow and plain: it keeps all that was granted since
// a window was last empty, and works every answer out from that log.
type model struct {
	exempt  string           // this tenant is
	held    map[string]bool  // by reservation: it is not cancelled
	last    map[string]int64 // by scope: time does not run backwards from here
	logs    map[string]*grantLog
	windows []throttle.Window // with their defaults, as they hold now
}

// A grantLog is the history of one window for one scope.
type grantLog struct {
	events []*grantEvent
	until  int64 // nothing counts from here on, by the rate at the last event
}

// A grantEvent is a grant or a cancel. Times are in microseconds.
type grantEvent struct {
	at        int64
	cancelled bool
	id        string      // of the reservation
	grant     *grantEvent // the grant that a cancel is of
	units     int64
	window    throttle.Window // as it held then
}

func newModel(exempt string, windows []throttle.Window) *model {
	m := &model{exempt: exempt, held: map[string]bool{}, last: map[string]int64{}, logs: map[string]*grantLog{}}
	m.setWindows(windows)
	return m
}

func (m *model) setWindows(windows []throttle.Window) {
	m.windows = limitertest.Policy(windows...).WithDefaults().Windows
}

func (m *model) exempts(r throttle.Request) bool { return r.Tenant == m.exempt }

func scopeOf(w throttle.Window, r throttle.Request) throttle.ScopeValue {
	scope := throttle.ScopeValue{Attributes: append([]string{}, w.Per...), Values: make([]string, len(w.Per))}
	for i, a := range w.Per {
		scope.Values[i] = r.Attributes[a]
		if a == throttle.TenantAttribute {
			scope.Values[i] = r.Tenant
		}
	}
	return scope
}

func capacity(w throttle.Window) int64 {
	if w.Algorithm == throttle.AlgorithmGCRA {
		return w.Burst
	}
	return w.Limit
}

func (m *model) neverFits(r throttle.Request) bool {
	for _, w := range m.windows {
		if limitertest.CostOf(w, r) > capacity(w) && !m.exempts(r) {
			return true
		}
	}
	return false
}

// A view is what the windows of one request look like at a time.
type view struct {
	model  *model
	logs   []*grantLog // by window; a copy of what still counts
	now    int64
	behind int64 // how far the clock is behind now
	r      throttle.Request
	scopes []string // by window
}

func (m *model) look(r throttle.Request, real int64) *view {
	v := &view{model: m, now: real, r: r}
	for _, w := range m.windows {
		scope := scopeOf(w, r).String()
		v.scopes = append(v.scopes, scope)
		v.now = max(v.now, m.last[scope])
	}
	v.behind = v.now - real
	for i, w := range m.windows {
		log := m.logs[v.scopes[i]+"/"+w.Name]
		if log == nil || log.until <= v.now {
			log = &grantLog{}
		}
		v.logs = append(v.logs, log)
	}
	return v
}

// write keeps what the windows are after the events.
func (v *view) write(events []*grantEvent) {
	alive := map[string]bool{}
	for i, w := range v.model.windows {
		log := v.logs[i]
		log.events = append(log.events, events[i])
		if log.until = resets(w, log.events, v.now); log.until == v.now {
			*log = grantLog{}
		}
		v.model.logs[v.scopes[i]+"/"+w.Name] = log
		alive[v.scopes[i]] = alive[v.scopes[i]] || log.until > v.now
	}
	for scope, alive := range alive {
		v.model.last[scope] = v.now
		if !alive {
			delete(v.model.last, scope)
		}
	}
}

// fits reports whether all windows fit now.
func (v *view) fits() bool {
	for i, w := range v.model.windows {
		if !fits(w, limitertest.CostOf(w, v.r), level(w, v.logs[i].events, v.now)) {
			return false
		}
	}
	return true
}

// earliest is when all windows fit together.
func (v *view) earliest() int64 {
	for t := v.now; ; {
		next := t
		for i, w := range v.model.windows {
			next = max(next, fitsFrom(w, v.logs[i].events, t, limitertest.CostOf(w, v.r)))
		}
		if next == t {
			return t
		}
		t = next
	}
}

func (v *view) decision(granted bool, decided, retryAt int64) throttle.Decision {
	d := throttle.Decision{
		At: time.UnixMicro(decided), ClockBehind: time.Duration(v.behind) * us, Exempt: v.model.exempts(v.r), Granted: granted, Policy: "p", Tenant: v.r.Tenant,
	}
	if !granted {
		d.RetryIn = time.Duration(retryAt-decided) * us
		d.Latest = d.RetryIn // nobody waits
	}
	latest := v.now
	for i, w := range v.model.windows {
		log := v.logs[i].events
		state := throttle.WindowState{
			Algorithm: w.Algorithm,
			Burst:     capacity(w), Limit: w.Limit, Name: w.Name, Period: w.Period, Unit: w.Unit,
			ResetsAt: time.UnixMicro(resets(w, log, v.now)),
			Scope:    scopeOf(w, v.r),
			Used:     ceil(level(w, log, v.now)),
		}
		state.Remaining = max(0, state.Burst-state.Used)
		if !granted && retryAt > decided {
			if fits := fitsFrom(w, log, v.now, limitertest.CostOf(w, v.r)); fits > v.now {
				state.Denied, state.RetryIn = true, time.Duration(fits-decided)*us
				if fits > latest {
					d.Binds, latest = w.Name, fits
				}
			}
		}
		d.Windows = append(d.Windows, state)
	}
	return d
}

func (m *model) peek(r throttle.Request, real int64) throttle.Decision {
	v := m.look(r, real)
	if v.fits() {
		return v.decision(true, v.now, 0)
	}
	if m.exempts(r) {
		return v.decision(true, real, 0)
	}
	return v.decision(false, real, v.earliest())
}

func (m *model) reserve(r throttle.Request, id string, real int64) throttle.Decision {
	v := m.look(r, real)
	if !v.fits() && !m.exempts(r) {
		return v.decision(false, real, v.earliest())
	}
	var events []*grantEvent
	for _, w := range m.windows {
		events = append(events, &grantEvent{at: v.now, id: id, units: limitertest.CostOf(w, r), window: w})
	}
	v.write(events)
	m.held[id] = true
	return v.decision(true, v.now, 0)
}

// cancel answers as limitertest.TryCancel does.
func (m *model) cancel(r throttle.Reservation, real int64) (d throttle.Decision) {
	defer func() { d.Exempt = false }() // a refund says nothing of that
	v := m.look(r.Request, real)
	if !m.held[r.ID] {
		return v.decision(false, v.now, v.now)
	}
	used := func(d throttle.Decision) (sum int64) {
		for _, w := range d.Windows {
			sum += w.Used
		}
		return sum
	}
	before := used(v.decision(true, v.now, 0))
	var events []*grantEvent
	for i, w := range m.windows {
		e := &grantEvent{at: v.now, units: limitertest.CostOf(w, r.Request), window: w, grant: &grantEvent{at: r.At.UnixMicro()}}
		switch grant := v.grant(i, r); {
		case grant != nil && w.Algorithm == throttle.AlgorithmGCRA && w.Limit != grant.window.Limit:
			e.units = 0 // it drained at another rate
		case grant != nil:
			grant.cancelled, e.grant = true, grant
		}
		events = append(events, e)
	}
	v.write(events)
	delete(m.held, r.ID)
	d = v.decision(true, v.now, 0)
	if used(d) == before { // it held nothing
		d = v.decision(false, v.now, v.now)
	}
	return d
}

// grant is what the log of window i holds of the reservation.
func (v *view) grant(i int, r throttle.Reservation) *grantEvent {
	for _, e := range slices.Backward(v.logs[i].events) {
		if e.grant == nil && e.id == r.ID {
			return e
		}
	}
	return nil
}

// outlived reports whether a window has forgotten a reservation that would still count: it had drained at a higher
// rate than now, or the clock was set back to when it counted. No script knows whose units it finds instead.
func (m *model) outlived(r throttle.Reservation, real int64) bool {
	v := m.look(r.Request, real)
	for i, w := range m.windows {
		alone := []*grantEvent{{at: r.At.UnixMicro(), units: limitertest.CostOf(w, r.Request), window: w}}
		if v.grant(i, r) == nil && (v.now < alone[0].at || level(w, alone, v.now).Sign() > 0) {
			return true
		}
	}
	return false
}

// describe is for the message of a failing test.
func describe(d throttle.Decision) string {
	var b strings.Builder
	fmt.Fprintf(&b, "granted %v, exempt %v, at %v, clock behind %v, retry in %v by %s", d.Granted, d.Exempt,
		d.At.UnixMicro()-limitertest.Midnight, d.ClockBehind, d.RetryIn, d.Binds)
	for _, w := range d.Windows {
		fmt.Fprintf(&b, "\n  %s %v %v: used %d, remaining %d of %d, denied %v, retry in %v, resets %d",
			w.Name, w.Period, w.Scope, w.Used, w.Remaining, w.Burst, w.Denied, w.RetryIn, w.ResetsAt.UnixMicro()-limitertest.Midnight)
	}
	return b.String()
}

const (
	us = time.Microsecond
	ms = time.Millisecond
	s  = time.Second
	m  = time.Minute
	h  = time.Hour
)

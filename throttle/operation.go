package throttle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-go/sluice/throttle/internal/quote"
	"github.com/sluice-go/sluice/throttle/internal/script"
)

// An operation is one request against one policy.
type operation struct {
	*compiledPolicy
	request Request
	tenant  effectiveTenant
	windows []Window // with the tenant's own limits

	unlimited bool     // the tenant is exempt, or the policy observes
	keys      []string // of the scopes
	verb      string   // by which it reserves: script.Reserve, Exempt or Observe
}

// checked prepares a request for capacity, by a policy in force.
func (l *Limiter) checked(ctx context.Context, r Request) (*operation, error) {
	cp, err := l.policyFor(r.Policy, r.Tenant, onlyInForce)
	if err != nil {
		return nil, err
	}
	return l.checkedFor(ctx, cp, r)
}

// checkedFor prepares a request for capacity, and refuses what can never be granted. Errors are Limiter.Check's.
func (l *Limiter) checkedFor(ctx context.Context, cp *compiledPolicy, r Request) (*operation, error) {
	if r.Ticket.ID == "" && r.Ticket.Queue != "" {
		return nil, r.bad("ticket", "", "must have an ID")
	}
	t, err := l.tenant(ctx, cp, r.Tenant)
	if err != nil && !silent(ctx) { // silent: ctx has ended, and FailOpen is to decide
		return nil, err
	}
	o, err := cp.newOperation(r, t, allValues)
	if err != nil {
		return nil, err
	}
	return o, o.checkCosts()
}

// tenant returns the settings of a tenant. With an error it returns the policy's, which corrections and
// releases use: giving the units back matters more than the tenant's own limits.
func (l *Limiter) tenant(ctx context.Context, cp *compiledPolicy, name string) (effectiveTenant, error) {
	t, err := l.configuredTenant(ctx, cp, name)
	if err != nil {
		t = cp.Tenants[name]
	}
	return l.interventions.Load().applyTo(cp, name, t), err
}

// configuredTenant asks the TenantFunc, and then the policy.
func (l *Limiter) configuredTenant(ctx context.Context, cp *compiledPolicy, name string) (t Tenant, err error) {
	if l.config.Tenants == nil {
		return cp.Tenants[name], nil
	}
	defer func() {
		if value := recover(); value != nil {
			l.logPanic("Tenants", value)
			hint := fmt.Sprintf("Config.Tenants panicked: %v", value)
			err = &RequestError{Policy: cp.Name, Field: TenantAttribute, Value: name, Hint: hint}
		}
	}()
	t, found, err := l.config.Tenants(ctx, cp.Name, name)
	switch {
	case err != nil:
		return t, fmt.Errorf("throttle: policy %q: looking up tenant %q: %w", cp.Name, quote.Short(name), err)
	case !found:
		return cp.Tenants[name], nil
	}
	t = t.withDefaults()
	return t, errors.Join(cp.checkTenant(name, t)...)
}

const allValues, orPartial = false, true // whether a request of newOperation may lack values of the scopes' attributes

// newOperation prepares a request. A partial one is about what all tenants share, or about a grant that the policy made
// when it had other scopes. It asks for no grant: only Exempt makes it unlimited. Errors are *RequestError.
func (cp *compiledPolicy) newOperation(r Request, t effectiveTenant, partial bool) (*operation, error) {
	o := &operation{compiledPolicy: cp, request: r, tenant: t, windows: cp.counting}
	o.unlimited = t.Exempt || cp.Observe && !partial
	if len(t.Windows) > 0 {
		o.windows = slices.Clone(cp.counting)
		for i, w := range o.windows {
			o.windows[i] = w.With(t.Windows[w.Name])
		}
	}
	o.keys = make([]string, len(cp.scopes))
	for i, attributes := range cp.scopes {
		values := r.values(attributes)
		for j, value := range values {
			if !partial && (value == "" || len(value) > MaxValueBytes) {
				field := "attribute " + attributes[j]
				if attributes[j] == TenantAttribute {
					field = TenantAttribute
				}
				hint := fmt.Sprintf("must be 1 to %d bytes: a window is counted by it", MaxValueBytes)
				return nil, r.bad(field, value, hint)
			}
		}
		o.keys[i] = script.ScopeKey(attributes, values)
	}
	switch {
	case !o.unlimited:
		o.verb = script.Reserve
	case t.Exempt || o.neverFits() >= 0: // exempt, or so costly that it never fits: no time to observe
		o.verb = script.Exempt
	default:
		o.verb = script.Observe
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	return o, nil
}

// check returns what is invalid in a request, whatever the policy's scopes are.
func (r Request) check() error {
	switch {
	case len(r.Tenant) > MaxValueBytes:
		return r.bad(TenantAttribute, r.Tenant, fmt.Sprintf("must be at most %d bytes", MaxValueBytes))
	case r.Class != "" && r.Class != ClassLive && r.Class != ClassBatch:
		return r.bad("class", string(r.Class), `must be "live" or "batch"`)
	case r.Backlog < 0:
		return r.bad("backlog", r.Backlog, "must not be below 0")
	case r.MaxHold < 0:
		return r.bad("max hold", r.MaxHold, "must not be below 0")
	case len(r.Key) > MaxKeyBytes:
		return r.bad("key", r.Key, fmt.Sprintf("must be at most %d bytes", MaxKeyBytes))
	}
	return nil
}

// checkCosts reports costs that can never be granted. Errors are *RequestError.
// Cancel does not call it: what was taken is given back under any policy.
func (o *operation) checkCosts() error {
	if err := o.checkUnits("cost", o.request.Cost); err != nil {
		return err
	}
	if i := o.neverFits(); i >= 0 && !o.unlimited {
		w := o.windows[i]
		hint := fmt.Sprintf("never fits: the window grants %d at most", w.capacity())
		return &RequestError{
			Policy: o.Name, Window: w.Name, Field: "cost " + w.Unit, Value: o.request.CostOf(w.Unit), Hint: hint,
		}
	}
	return nil
}

// neverFits returns the first window whose capacity is below the cost, or -1.
func (o *operation) neverFits() int {
	for i, w := range o.windows {
		if o.request.CostOf(w.Unit) > w.capacity() {
			return i
		}
	}
	return -1
}

func (cp *compiledPolicy) checkUnits(field string, costs map[string]int64) error {
	r := Request{Policy: cp.Name}
	for unit, cost := range costs {
		counted := slices.Contains(cp.units, unit) || unit == Requests
		switch {
		case !counted:
			return r.bad(field+" "+quote.Name(unit), cost, cp.unitsHint())
		case cost < 0 || cost > MaxLimit:
			return r.bad(field+" "+quote.Name(unit), cost, fmt.Sprintf("must be 0 to %d", int64(MaxLimit)))
		}
	}
	return nil
}

func (cp *compiledPolicy) unitsHint() string {
	return "no window counts this unit, but " + strings.Join(cp.units, ", ")
}

// reserveRequest returns the request that reserves.
func (o *operation) reserveRequest() script.Request {
	ask := o.lineRequest(o.verb)
	o.refuseLate(ask.LinePart)
	ask.ID = script.NewID()
	return ask
}

// joinRequest returns what is sent to join. An operation that is never denied joins no line: joins is false.
func (o *operation) joinRequest() (ask script.Request, joins bool, err error) {
	if !o.request.hasTicket() {
		return ask, false, o.request.bad("ticket", "", "must have an ID")
	}
	if o.unlimited && !o.tenant.paused() {
		return ask, false, nil
	}
	ask = o.lineRequest(script.Join)
	ask.LinePart.Backlog = int64(o.request.Backlog)
	o.refuseLate(ask.LinePart)
	return ask, true, nil
}

// refuseLate sets the bounds by which the script refuses a request that cannot start in time.
func (o *operation) refuseLate(part *script.LinePart) {
	switch most := o.request.MaxWait; {
	case most > 0:
		part.MaxWait = max(1, most.Microseconds())
	case most < 0:
		part.MaxWait = script.Refuse
	}
	if deadline := o.request.Deadline; !deadline.IsZero() {
		if part.Deadline = time.Until(deadline).Microseconds(); part.Deadline <= 0 {
			part.Deadline = script.Refuse
		}
	}
}

// lineRequest returns a request with the fields that are common to all verbs about capacity or the line.
func (o *operation) lineRequest(op string) script.Request {
	r := o.request
	ask := script.Request{
		Op: op, Settings: o.tenantSettings(), Keys: o.keys, Cost: o.costsText(r), Hold: r.MaxHold.Microseconds(),
		LinePart: &script.LinePart{
			Since: max(0, r.Since.UnixMicro()), Flow: o.flow(script.Escape(r.Ticket.Queue), r), Tenant: r.Tenant,
			Weight: o.weight(), Key: r.Key, Front: r.Front,
		},
	}
	ask.Settings.Paused = o.tenant.pauses[script.OfTenant].ends()
	if r.hasTicket() {
		ask.Ticket = r.Ticket.name()
	}
	return ask
}

// tenantSettings returns the tenant's own settings, also where they equal the policy's, as the policy may change.
func (o *operation) tenantSettings() script.Settings {
	s := script.Settings{Unlimited: o.unlimited}
	if len(o.tenant.Windows) == 0 {
		return s
	}
	for i, w := range o.windows {
		params := w.Algorithm.side().Params(w.numbers())
		if o.tenant.Windows[w.Name] != (Override{}) || params != o.script.Windows[i].Params {
			if s.Windows == nil {
				s.Windows = map[string][4]int64{}
			}
			s.Windows[w.Name+o.script.Windows[i].Kind] = params
		}
	}
	return s
}

// flow returns the name of the flow of a request. The queue is as script.Flow takes it.
func (cp *compiledPolicy) flow(queue string, r Request) string {
	return script.Flow(queue, r.Class == ClassBatch, cp.flowMark, r.values(cp.flowBy))
}

// costsText lists the cost of each unit, such as "requests=1,tokens=5".
func (cp *compiledPolicy) costsText(r Request) string {
	text, comma := "", ""
	for _, unit := range cp.units {
		if cost := r.CostOf(unit); cost > 0 {
			text, comma = text+comma+unit+"="+strconv.FormatInt(cost, 10), ","
		}
	}
	return text
}

func (o *operation) weight() int64 { return max(1, int64(cmp.Or(o.tenant.Weight, 1)*1000)) }

func (o *operation) do(ctx context.Context, ask script.Request) (script.Answer, error) {
	answers, err := o.decide(ctx, ask)
	if err != nil {
		return script.Answer{}, err
	}
	return answers[0], nil
}

// decide sends requests, and returns an answer to each. If one fails, its error is returned.
func (cp *compiledPolicy) decide(ctx context.Context, asks ...script.Request) ([]script.Answer, error) {
	answers, err := cp.group.Do(ctx, cp.script, asks...)
	for _, a := range answers {
		err = cmp.Or(err, a.Err)
	}
	return answers, classify(ctx, cp.Name, err)
}

// decided returns the decision in an answer; for a refused request also a *DeniedError, for an unknown status ErrReply.
func (l *Limiter) decided(o *operation, ask script.Request, a script.Answer) (d Decision, err error) {
	d = o.decision(a)
	switch a.Status {
	case script.BacklogFull:
		cause := fmt.Errorf("%d wait already", o.request.Backlog)
		err = &DeniedError{Cause: cause, Decision: d, Request: o.request}
	case script.TooLong:
		cause := fmt.Errorf("may wait for %v, longer than %v: %w",
			roundUp(max(d.Latest, d.RetryIn)), max(0, o.request.MaxWait.Truncate(time.Microsecond)), context.DeadlineExceeded)
		err = &DeniedError{Cause: cause, Decision: d, Request: o.request}
	case script.TooLate:
		err = tooLate(o.request, d)
	default:
		isDenied := a.Status == script.Denied && d.RetryIn > 0
		if !d.Granted && !d.Queued && !isDenied {
			return Decision{}, fmt.Errorf("%w: policy %q: status %q: must be granted, denied or in line", ErrReply, o.Name, a.Status)
		}
	}
	reserves := ask.Op == o.verb // otherwise it peeks or joins
	if reserves && d.Granted {
		d.Reservation = Reservation{Request: o.request, At: d.At, ID: ask.ID, grantor: o.compiledPolicy, limiter: l}
	}
	if hasReplaced := d.Granted && ask.Replaces != ""; reserves && !hasReplaced { // observers know of the replaced grant
		tell(l, d)
	}
	return d, err
}

// decision returns the decision in an answer, without its Reservation.
func (o *operation) decision(a script.Answer) Decision {
	neverDenied := o.neverDenied(a)
	d := Decision{
		AlreadyQueued: a.Status == script.Waits,
		At:            time.UnixMicro(a.At),
		ClockBehind:   micros(a.Behind),
		Exempt:        neverDenied && o.tenant.Exempt,
		Granted:       a.Status == script.Granted || neverDenied,
		Policy:        o.Name,
		Queued:        a.Status == script.Joined || a.Status == script.Waits,
		Tenant:        o.request.Tenant,
	}
	if !d.Granted {
		d.RetryIn = micros(a.Time - a.At)
		if a.Latest > 0 {
			d.Latest = max(d.RetryIn, micros(a.Latest-a.At))
		}
		switch p := a.Pause; {
		case p.Whose != script.OfUpstream: // if it began after the operation was prepared, only its end is known
			bare := Pause{ByHand: true, Policy: o.Name, Until: time.UnixMicro(p.Until)}
			d.Pause = new(cmp.Or(o.tenant.pauses[p.Whose], bare))
		case p.Until > 0:
			d.Pause = &Pause{
				At: time.UnixMicro(p.At), Author: p.Reporter, Cause: p.Cause, Policy: o.Name, Tenant: p.Tenant,
				Until: time.UnixMicro(p.Until),
			}
		}
		d.Binds = o.binds(a, d.RetryIn)
	}
	if neverDenied && !o.tenant.Exempt {
		d.Observed = o.observed(a)
	}
	d.Adapted = o.adapted(a.Adapted)
	if l := a.Left; l.Unit != "" {
		d.Remaining = &Remaining{Unit: l.Unit, Units: l.Units, Until: time.UnixMicro(l.Reset)}
	}
	if a.Used != nil {
		d.Windows = o.states(a, d.Granted)
	}
	return d
}

// neverDenied reports whether a request is granted whatever its windows say, as its tenant is exempt or the policy
// observes. Only operators' pauses stop such a request: by one it is denied, or joins and stays in line after the pause,
// or is refused: it may have to wait for too long, or the backlog is full.
func (o *operation) neverDenied(a script.Answer) bool {
	switch a.Status {
	case script.Joined, script.Waits, script.TooLong, script.TooLate, script.BacklogFull:
		return false
	}
	return o.unlimited && (a.Status == script.Granted || a.Pause.Whose == script.OfUpstream) // 0, as without a pause
}

// binds returns Decision.Binds of a denial, or of a taken ticket.
func (o *operation) binds(a script.Answer, wait time.Duration) string {
	switch {
	case wait <= 0:
		return ""
	case a.Binds == script.Paused && a.Pause.Whose == script.OfUpstream:
		return ByUpstream
	case a.Binds == script.Paused:
		return ByPause
	case a.Binds == script.Slots:
		return BySlots
	case a.Binds > 0 && a.Binds <= int64(len(o.windows)):
		return o.windows[a.Binds-1].Name
	}
	return ByLine
}

// observed returns the denial that an enforcing policy would have given; nil if it would have granted.
func (o *operation) observed(a script.Answer) *Observed {
	if i := o.neverFits(); i >= 0 {
		return &Observed{Binds: o.windows[i].Name, NeverFits: true}
	}
	if a.Time <= a.At {
		return nil
	}
	// The window that fits last binds, unless the upstream's pause lasts longer.
	would, longest := &Observed{Binds: ByUpstream, Wait: micros(a.Time - a.At)}, max(a.At, a.Pause.Until)
	for i, fits := range a.Fits {
		if fits > longest {
			would.Binds, longest = o.windows[i].Name, fits
		}
	}
	return would
}

// adapted returns the rate in an answer; nil if the published one applies, or its window is not one of the policy.
func (o *operation) adapted(a script.AdaptedAnswer) *Adapted {
	if a.Refusals <= 0 || a.Window < 1 || a.Window > int64(len(o.windows)) {
		return nil
	}
	w := o.windows[a.Window-1]
	published := float64(w.Limit) / (w.Period + w.Margin).Seconds()
	return &Adapted{
		Published: published,
		Rate:      published * float64(a.Rate) / 1e6,
		Refusals:  a.Refusals,
		Since:     time.UnixMicro(a.Since),
		Until:     time.UnixMicro(a.Until),
		Window:    w.Name,
	}
}

// states returns the windows' states. An answer of a take knows neither when the cost fits nor when the windows reset.
func (o *operation) states(a script.Answer, granted bool) []WindowState {
	states := make([]WindowState, len(o.windows))
	for i, w := range o.windows {
		capacity, attributes := w.capacity(), o.scopes[o.script.Windows[i].Scope-1]
		states[i] = WindowState{
			Algorithm: w.Algorithm,
			Burst:     capacity,
			Denied:    !granted && a.Fits != nil && a.Fits[i] > a.At,
			Limit:     w.Limit,
			Name:      w.Name,
			Period:    w.Period,
			Remaining: max(0, capacity-a.Used[i]),
			Scope:     ScopeValue{slices.Clone(attributes), o.request.values(attributes)},
			Unit:      w.Unit,
			Used:      a.Used[i],
		}
		if a.Resets != nil && a.Resets[i] > 0 {
			states[i].ResetsAt = time.UnixMicro(a.Resets[i])
		}
		if states[i].Denied {
			states[i].RetryIn = micros(a.Fits[i] - a.At)
		}
	}
	return states
}

// requestOf returns the request of a ticket, as far as its flow and costs contain it; or of several, with their average
// costs. It is false if the ticket joined by other scopes, or its costs are malformed.
func (cp *compiledPolicy) requestOf(flow, costs string, tickets int64) (r Request, ok bool) {
	queue, batch, mark, values := script.ParseFlow(flow)
	r = Request{Policy: cp.Name, Ticket: Ticket{Queue: queue}}
	if batch {
		r.Class = ClassBatch
	}
	if r.Cost, ok = averageCosts(costs, tickets); !ok || len(values) != len(cp.flowBy) {
		return r, false
	}
	for i, a := range cp.flowBy {
		if a == TenantAttribute {
			r.Tenant = values[i]
			continue
		}
		if r.Attributes == nil {
			r.Attributes = map[string]string{}
		}
		r.Attributes[a] = values[i]
	}
	return r, mark == cp.flowMark
}

// averageCosts parses what a ticket costs, such as "tokens=10", or the average of what several cost together, such as
// "tokens=30/5/20": the sum, the least and the most (internal/script/lua/line_units.lua).
func averageCosts(text string, tickets int64) (costs map[string]int64, ok bool) {
	costs = map[string]int64{Requests: 0} // a text without them costs none, but Request.Cost without them means 1
	for part := range strings.SplitSeq(text, ",") {
		unit, number, isCost := strings.Cut(part, "=")
		if !isCost { // the text is empty, or "-"
			continue
		}
		number, _, isSum := strings.Cut(number, "/")
		cost, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			return costs, false
		}
		if isSum {
			cost = (cost + tickets/2) / max(1, tickets) // rounded
		}
		costs[unit] = cost
	}
	return costs, true
}

// micros converts microseconds. It never returns a negative duration, and does not overflow.
func micros(us int64) time.Duration {
	const most = math.MaxInt64 / int64(time.Microsecond)
	return time.Duration(min(max(us, 0), most)) * time.Microsecond
}

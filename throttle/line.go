package throttle

import (
	"context"
	"fmt"
	"strings"
	"time"
)

const (
	// holdFor is for how long what a called ticket needs is kept free for it.
	holdFor = 2 * time.Second

	// callMost is how many tickets one script call calls at the most.
	callMost = 64
)

// What the scripts answer (lua/reserve.lua).
const (
	statusDenied = iota
	statusGranted
	statusGrantedBefore
	statusPlanned
	statusTooLate
	statusBacklog
	statusPlannedBefore
)

// A Line is what one call saw of the waiting line of a policy, or, where no window of the policy
// is shared between tenants, of one tenant.
type Line struct {
	// Calls are the tickets whose turn it is: they fit now, and what they need is held for
	// them for two seconds. Whoever hears of them has to wake them.
	Calls []string

	// Due is after what time somebody must look again (Pump), if nothing happens before.
	// It is negative if nobody waits any more.
	Due time.Duration

	Policy string // empty if nothing was seen, but all policies were set anew
	Tenant string // empty if the line is all tenants'
}

type planOptions struct {
	MaxWait time.Duration
	Backlog int
}

// A listener is somebody who listens to OnLine, on top of who did before.
type listener struct {
	listen func(Line)
	before *listener
	ended  bool
}

// OnLine sets who is told of the lines that calls of this limiter see, in place of whoever was
// before, who is told again when this ends. It is called on the calling goroutine after each such
// call, and must not block. Only while somebody listens do tickets wait; calling what is returned
// ends it.
func (l *Limiter) OnLine(listen func(Line)) (end func()) {
	l.listening.Lock()
	defer l.listening.Unlock()
	mine := &listener{listen: listen, before: l.line.Load()}
	l.line.Store(mine)
	return func() {
		l.listening.Lock()
		defer l.listening.Unlock()
		mine.ended = true
		top := l.line.Load()
		for top != nil && top.ended {
			top = top.before
		}
		l.line.Store(top)
	}
}

// Listening reports whether somebody listens to OnLine.
func (l *Limiter) Listening() bool { return l.line.Load() != nil }

func (l *Limiter) tell(line *Line) {
	if top := l.line.Load(); top != nil && line != nil {
		top.listen(*line)
	}
}

// lineArguments are the ticket and the number of calls to ask for: none while nobody listens.
func (l *Limiter) lineArguments(ticket string) (string, int) {
	if l.line.Load() == nil {
		return "", 0
	}
	return ticket, callMost
}

// Plan takes a place in line for a request that runs later: its ticket is called when it fits.
// Decision.RetryIn is when that is expected, 0 for at once. With maxWait above 0 a request that
// would wait longer is refused, with backlog above 0 one that finds that many of the same scopes
// in line: both with a *RefusedError, and no place is taken. Other errors are Reserve's.
func (l *Limiter) Plan(ctx context.Context, r Request, maxWait time.Duration, backlog int) (Decision, error) {
	if !l.Listening() || r.Ticket == "" {
		return Decision{}, &RequestError{Policy: r.Policy, Field: "ticket", Value: r.Ticket, Mend: "planning takes a ticket, and a listener to OnLine"}
	}
	r.Nonce = "plan" // taking the same place twice changes nothing
	c, err := l.newCall(ctx, r)
	if err != nil {
		return Decision{}, err
	}
	if c.tenant.Exempt {
		return Decision{Planned: true, Policy: r.Policy, Tenant: r.Tenant, Exempt: true}, nil
	}
	d, err := l.decide(ctx, c, "plan", r.Ticket, planOptions{maxWait, backlog})
	if d.refused {
		refused := &RefusedError{Decision: d, MaxWait: maxWait}
		if maxWait <= 0 || d.RetryIn <= maxWait {
			refused.Backlog = backlog
		}
		return d, refused
	}
	return d, err
}

// Leave gives the place of a ticket in line back, if it has one: its job is gone, or runs
// without being counted.
func (l *Limiter) Leave(ctx context.Context, policy, tenant, ticket string) error {
	line, err := l.look(ctx, "leave", policy, tenant, ticket, nil)
	l.tell(line)
	return err
}

// Skip says that a ticket which was called cannot come for now. What it needs is for the next, and it
// keeps its rank: it is called again after a minute, and may come before.
func (l *Limiter) Skip(ctx context.Context, policy, tenant, ticket string) error {
	line, err := l.look(ctx, "skip", policy, tenant, ticket, nil)
	l.tell(line)
	return err
}

// Pump looks whether anybody's turn has come in a line, and tells OnLine. Somebody has to at the
// time that Line.Due told last.
func (l *Limiter) Pump(ctx context.Context, policy, tenant string) error {
	line, err := l.look(ctx, "pump", policy, tenant, "", nil)
	l.tell(line)
	return err
}

// Look is Pump for one who keeps the time of a line: what it sees is returned, and nobody else
// is told.
func (l *Limiter) Look(ctx context.Context, policy, tenant string) (Line, error) {
	line, err := l.look(ctx, "pump", policy, tenant, "", nil)
	if err != nil {
		return Line{}, err
	}
	return *line, nil
}

// Retune makes tenants' own limits and weights as they are now hold for all that wait in a line; what is
// the policy's holds at every Look. It is for whoever begins to look after a line, or hears that the
// policies have changed.
func (l *Limiter) Retune(ctx context.Context, policy, tenant string) error {
	pl, ok := l.plans.Load().byName[policy]
	if !ok {
		return fmt.Errorf("%w %q", ErrUnknownPolicy, cut(policy))
	}
	flows, known := lineKey(hashTag(pl.Name, tenant, pl.shared)), map[string]*call{}
	flows = strings.TrimSuffix(flows, "q") + "f"
	for cursor := uint64(0); ; {
		page, next, err := l.client.HScan(ctx, flows, cursor, "", 500).Result()
		if err != nil {
			return classify(ctx, policy, err)
		}
		for i := 0; i+1 < len(page); i += 2 {
			if err := l.retuneFlow(ctx, pl, known, page[i], page[i+1]); err != nil {
				return err
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// retuneFlow writes a flow's weight and own parameters anew, if they are others now. The record
// is "weight tenant suffixes;own" (lua/line.lua).
func (l *Limiter) retuneFlow(ctx context.Context, pl *plan, known map[string]*call, flow, record string) error {
	head, own, _ := strings.Cut(record, ";")
	fields := strings.SplitN(head, " ", 3)
	if len(fields) < 3 {
		return nil
	}
	name := unescape(fields[1])
	c := known[name]
	if c == nil {
		t, err := l.tenant(ctx, pl, name)
		if err != nil {
			return err
		}
		c = &call{plan: pl, request: Request{Tenant: name}, tenant: t, windows: pl.windowsOf(t)}
		known[name] = c
	}
	if now, _ := c.ownParams(); now == own && fmt.Sprint(c.weight()) == fields[0] {
		return nil
	}
	changed := *c
	changed.flow = flow
	line, err := l.look(ctx, "retune", pl.Name, name, "", &changed)
	l.tell(line)
	return err
}

// look runs the parts of reserve.lua that are not about a request of their own; c may say for whom.
func (l *Limiter) look(ctx context.Context, what, policy, tenant, ticket string, c *call) (*Line, error) {
	pl, ok := l.plans.Load().byName[policy]
	if !ok {
		return nil, fmt.Errorf("%w %q", ErrUnknownPolicy, cut(policy))
	}
	tag := hashTag(pl.Name, tenant, pl.shared)
	if c == nil {
		c = &call{plan: pl, request: Request{Tenant: tenant}, windows: pl.Windows}
	}
	c.costs = make([]int64, len(c.windows))
	c.keys = []string{nonceKey(tag, what), lineKey(tag)}
	ticket, budget := l.lineArguments(ticket)
	args := c.arguments(l.now(), what, nonceKept.Milliseconds(), c.lineFields(ticket, budget, planOptions{}), 0)
	reply, err := pl.scripts.reserve.Run(ctx, l.client, c.keys, args...).Slice()
	if err != nil {
		return nil, classify(ctx, policy, err)
	}
	c.windows = nil // the reply has none
	_, line, err := c.decision(reply)
	if err != nil {
		return nil, err
	}
	if line == nil {
		line = &Line{Due: -1}
	}
	line.Policy = policy
	if !pl.shared {
		line.Tenant = tenant
	}
	return line, nil
}

// Leads are what one worker tells the others of the lines of a policy, by their Line.Tenant.
type Leads struct {
	Ask     []string // lines it would look after, if nobody does
	Empty   []string // lines that it led and in which nobody waits
	Keep    []string // lines it leads and goes on to lead
	Release []string // lines it leads and leaves to others
	Take    int      // how many lines that nobody leads it takes over besides, at the most
	Tell    []string // lines that it saw and does not look after itself
}

// Lead shares the lines of a policy out among workers: one of them, until its lease ends, does
// the looking that Line.Due asks for. It returns the lines that the caller has to look at now: those
// that it leads from now on, and those it led of which others have seen something since.
func (l *Limiter) Lead(ctx context.Context, policy string, lease time.Duration, leads Leads) ([]string, error) {
	args := []any{l.now(), lease.Microseconds(), leads.Take}
	for _, list := range []struct {
		letter string
		lines  []string
	}{{"k", leads.Keep}, {"a", leads.Ask}, {"r", leads.Release}, {"d", leads.Empty}, {"n", leads.Tell}} {
		for _, tenant := range list.lines {
			args = append(args, list.letter+escape(tenant))
		}
	}
	led, err := l.lead.Run(ctx, l.client, []string{linesKey(policy)}, args...).StringSlice()
	if err != nil {
		return nil, classify(ctx, policy, err)
	}
	for i, tenant := range led {
		led[i] = unescape(tenant)
	}
	return led, nil
}

// readLine reads the end of a script's reply: nothing, or when somebody must look again and the
// tickets called.
func readLine(reply []any, now int64) (*Line, bool) {
	if len(reply) == 0 {
		return nil, true
	}
	due, ok := reply[0].(int64)
	if !ok {
		return nil, false
	}
	line := &Line{Due: -1}
	if due > 0 {
		line.Due = micros(due - now)
	}
	for _, v := range reply[1:] {
		ticket, ok := v.(string)
		if !ok {
			return nil, false
		}
		line.Calls = append(line.Calls, unescape(ticket))
	}
	return line, true
}

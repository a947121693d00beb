package throttle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// After a pause, one window's worth is let out evenly over a ramp: as long as the pause was, within
// rampMin and rampMost. Whatever is refused on the ramp or shortly after it doubles the next one.
const (
	rampMin  = time.Second
	rampMost = time.Minute
)

// Release gives back what Concurrency windows hold for a reservation, at the end of its attempt. Of
// all other windows it changes nothing. Releasing twice, or what ran out, does nothing.
func (l *Limiter) Release(ctx context.Context, r Reservation) error {
	pl, ok := l.plans.Load().byName[r.Policy]
	if !ok || r.Nonce == "" || !slices.ContainsFunc(pl.Windows, func(w Window) bool { return w.Algorithm == Concurrency }) {
		return nil
	}
	c, err := l.newCall(ctx, r.Request)
	if err != nil {
		return err
	}
	_, err = l.settle(ctx, c, r, "release", "", "")
	return err
}

// Renew keeps what Concurrency windows hold for a reservation for another lease, from now on. It is
// false if that ran out, or was given back, and the room is somebody else's now: the attempt must end.
func (l *Limiter) Renew(ctx context.Context, r Reservation) (held bool, err error) {
	if l.Lease(r) == 0 {
		return true, nil
	}
	c, err := l.newCall(ctx, r.Request)
	if err != nil {
		return false, err
	}
	d, err := l.settle(ctx, c, r, "renew", "", "")
	return d.Granted, err
}

// Lease is the shortest lease of the Concurrency windows in which a reservation holds something, or
// 0 if there are none: it has to be renewed before, and released in the end.
func (l *Limiter) Lease(r Reservation) time.Duration {
	pl, ok := l.plans.Load().byName[r.Policy]
	if !ok || r.Nonce == "" {
		return 0
	}
	lease := time.Duration(0)
	for _, w := range pl.Windows {
		if w.Algorithm == Concurrency && r.Request.costOf(w.Unit) > 0 && (lease == 0 || w.Lease < lease) {
			lease = w.Lease
		}
	}
	return lease
}

// KeepRenewing renews what Concurrency windows hold for a reservation, three times a lease, until stop is
// called, also after the context has ended: what it is held for may go on. Stop waits for a renewal under
// way; Release must follow. Once, shortly before a lease runs out that could not be renewed, it calls
// lost, and goes on; if a renewal is refused, because the room is somebody else's, it calls lost with
// refused and ends. Stop is nil if the reservation holds nothing by leases.
func (l *Limiter) KeepRenewing(ctx context.Context, r Reservation, lost func(refused bool)) (stop func()) {
	lease := l.Lease(r)
	if lease == 0 {
		return nil
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		l.keepRenewing(ctx, r, lease, lost)
	}()
	return func() {
		cancel()
		<-stopped
	}
}

func (l *Limiter) keepRenewing(ctx context.Context, r Reservation, lease time.Duration, lost func(refused bool)) {
	// Not by the end of a renewal, which may wait for Redis for longer than the lease lasts.
	expiry := time.AfterFunc(lease-lease/10, func() { lost(false) })
	defer expiry.Stop()
	timer := time.NewTimer(lease / 3)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		asked := time.Now()
		renewal, cancel := context.WithTimeout(ctx, lease/3)
		held, err := l.Renew(renewal, r)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			timer.Reset(lease / 20)
		case !held:
			lost(true)
			return
		default:
			if now := l.Lease(r); now > 0 {
				lease = now // the policy's lease may be another by now
			}
			expiry.Reset(lease - lease/10 - time.Since(asked))
			timer.Reset(lease / 3)
		}
	}
}

// Settle says what a reservation really cost, per unit: what was estimated is corrected in all windows of
// the unit, except for Concurrency windows. What is too much is given back, as far as it still
// counts, and called for; what is too little is taken, now and above the limit if need be, and later requests wait
// for it. Units that are not named stay as they are. It returns the reservation as it is then, for a later Settle or
// Cancel; after a Cancel it changes nothing. Errors are Reserve's.
func (l *Limiter) Settle(ctx context.Context, r Reservation, actual map[string]int64) (Reservation, error) {
	if r.Nonce == "" {
		return r, nil
	}
	c, err := l.newCall(ctx, r.Request)
	if err != nil {
		return r, err
	}
	for unit, cost := range actual {
		mend := ""
		switch {
		case !slices.Contains(c.units, unit) && unit != Requests:
			mend = "no window counts this unit, but " + strings.Join(c.units, ", ")
		case cost < 0 || cost > MaxLimit:
			mend = fmt.Sprintf("must be 0 to %d", int64(MaxLimit))
		default:
			continue
		}
		return r, &RequestError{Policy: c.Name, Field: "actual " + printable(unit), Value: cost, Mend: mend}
	}
	change, before := false, slices.Clone(c.costs)
	for i, w := range c.windows {
		cost, ok := actual[w.Unit]
		if c.costs[i] = cost - c.costs[i]; !ok || w.Algorithm == Concurrency {
			c.costs[i] = 0
		}
		change = change || c.costs[i] != 0
	}
	if !change {
		return r, nil
	}
	// Asked for again, because nobody knows whether it was done, the same correction is made once.
	own := sha256.Sum256(fmt.Append(nil, before, c.costs))
	if _, err := l.settle(ctx, c, r, "settle", hex.EncodeToString(own[:16]), ""); err != nil {
		return r, err
	}
	settled := maps.Clone(r.Cost)
	if settled == nil {
		settled = map[string]int64{}
	}
	maps.Copy(settled, actual)
	r.Cost = settled
	return r, nil
}

// Pause grants nothing for a while to whom the far side refused a call: the scopes that the policy's
// Remote names, with the values that the reservation was granted by. On every worker; who waits keeps its place. What is
// refused later extends the pause; afterwards the windows open gradually. A reservation that was
// never granted, with its Request alone, pauses from now on: for instance by hand.
//
// The pause is 1 microsecond to MaxPeriod. Errors are Reserve's.
func (l *Limiter) Pause(ctx context.Context, r Reservation, pause time.Duration) error {
	if pause <= 0 || pause > MaxPeriod {
		return &RequestError{Policy: r.Policy, Field: "pause", Value: pause, Mend: fmt.Sprintf("must be above 0 and at most %v", MaxPeriod)}
	}
	ramp := min(max(pause, rampMin), rampMost)
	return l.told(ctx, r, "pause", fmt.Sprintf("%d %d %d", max(1, pause.Microseconds()), ramp.Microseconds(), rampMost.Microseconds()))
}

// Resume ends a pause at once, and the gradual opening after one. It is Pause's opposite, by hand.
func (l *Limiter) Resume(ctx context.Context, r Reservation) error {
	return l.told(ctx, r, "resume", "0 0 0")
}

// Left says how many units the far side has left, until it resets, by its answer to the reservation's
// call. What was granted since is taken off; if the windows would let out more, they do not: others
// use the same key. The scopes are those of Pause. Units are 0 to MaxLimit, reset is above 0 and at most MaxPeriod.
func (l *Limiter) Left(ctx context.Context, r Reservation, unit string, units int64, reset time.Duration) error {
	bad := func(field string, value any, mend string) error {
		return &RequestError{Policy: r.Policy, Field: field, Value: value, Mend: mend}
	}
	switch {
	case !nameShape.MatchString(unit):
		return bad("unit", unit, nameMend)
	case units < 0 || units > MaxLimit:
		return bad("left", units, fmt.Sprintf("must be 0 to %d", int64(MaxLimit)))
	case reset <= 0 || reset > MaxPeriod:
		return bad("reset", reset, fmt.Sprintf("must be above 0 and at most %v", MaxPeriod))
	}
	return l.told(ctx, r, "left", fmt.Sprintf("%s %d %d", unit, units, max(1, reset.Microseconds())))
}

// told runs the part of settle.lua that is about the far side's word.
func (l *Limiter) told(ctx context.Context, r Reservation, what, word string) error {
	if r.Nonce == "" {
		r.Nonce = what // not used, but every call has one
	}
	c, err := l.newCall(ctx, r.Request)
	if err != nil {
		return err
	}
	var places, all []string
	for i, attributes := range c.scopes {
		place := strconv.Itoa(i + 1)
		all = append(all, place)
		if slices.Contains(attributes, TenantAttribute) == (c.Remote == RemoteTenant) {
			places = append(places, place)
		}
	}
	if len(places) == 0 {
		places = all
	}
	_, err = l.settle(ctx, c, r, what, strings.Join(places, ","), word)
	return err
}

func (l *Limiter) settle(ctx context.Context, c *call, r Reservation, what, more, word string) (Decision, error) {
	at := int64(0)
	if !r.At.IsZero() {
		at = r.At.UnixMicro()
	}
	ticket, budget := l.lineArguments("")
	args := c.arguments(l.now(), what, nonceKept.Milliseconds(), c.lineFields(ticket, budget, planOptions{}), at, more, word)
	d, err := l.run(ctx, c, c.scripts.settle, args)
	if err == nil && c.waits && !l.Listening() {
		// Somebody waits for what this may have given back, and nobody here calls: whoever leads the line
		// hears of it within a second or two.
		if _, err := l.Lead(ctx, c.Name, time.Second, Leads{Tell: []string{c.lineTenant()}}); err != nil {
			return d, err
		}
	}
	return d, err
}

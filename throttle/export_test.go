package throttle

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/sluice-go/sluice/throttle/internal/script"
)

// SetNow hands the scripts a time in microseconds instead of the clock of Redis.
func (l *Limiter) SetNow(now func() int64) { l.now = now }

// EditScripts changes the text of every script. An edit that finds nothing to change is an
// error: it was written for another text.
func (l *Limiter) EditScripts(edits ...func(string) string) error {
	var mu sync.Mutex
	found := make([]bool, len(edits))
	l.library = script.Library{Prefix: l.library.Prefix, Edit: func(text string) string {
		mu.Lock()
		defer mu.Unlock()
		for i, edit := range edits {
			edited := edit(text)
			found[i] = found[i] || edited != text
			text = edited
		}
		return text
	}}
	if err := l.SetPolicies(l.Policies()); err != nil {
		return err
	}
	if slices.Contains(found, false) {
		return errors.New("throttle: an edit finds nothing to change in any script")
	}
	return nil
}

var expiry = regexp.MustCompile(`(redis\.call\('SET', .*), '[PE]X', .*\)( end)?\n`)

// WithoutExpiry lets every key live for ever.
func WithoutExpiry(text string) string {
	return strings.Replace(expiry.ReplaceAllString(text, "$1)$2\n"), "redis.call('EXPIRE', key, seconds)", "", 1)
}

var shortExpiry = regexp.MustCompile(`(redis\.call\('SET', .*), 'PX', .*\)( end)?\n`)

// WithoutShortExpiry lets every key live for ever, but those that are kept for a day.
func WithoutShortExpiry(text string) string { return shortExpiry.ReplaceAllString(text, "$1)$2\n") }

// MergeFrom lets sliding windows merge their grants from so many entries on, not from 128.
func MergeFrom(entries string) func(string) string {
	return func(text string) string {
		return strings.Replace(text, "local ENTRIES = 128\n", "local ENTRIES = "+entries+"\n", 1)
	}
}

// ShiftClock lets the clock of Redis differ by so many microseconds.
func ShiftClock(us int64) func(string) string {
	return func(text string) string {
		return strings.Replace(text, "+ t[2]\n", fmt.Sprintf("+ t[2] + %d\n", us), 1)
	}
}

// Refresh does at once what the first take after SetPolicies does in the background.
func (l *Limiter) Refresh(ctx context.Context, policy string) error {
	cp, err := l.find(policy, false)
	if err != nil {
		return err
	}
	cp.refreshAt.Store(math.MaxInt64)
	return l.refresh(ctx, cp)
}

// A Call is a Reserve, a Peek or, with a reservation, a Cancel.
type Call struct {
	Peek    bool
	Request Request
	Cancel  *Reservation
}

// Together makes calls in one call to Redis.
func (l *Limiter) Together(ctx context.Context, calls ...Call) ([]Decision, error) {
	var operations []*operation
	var asks []script.Request
	for _, c := range calls {
		r, op := c.Request, script.Reserve
		if c.Cancel != nil {
			r = c.Cancel.Request
		}
		cp, err := l.find(r.Policy, false)
		if err != nil {
			return nil, err
		}
		o, err := l.operation(ctx, cp, r)
		if err != nil {
			return nil, err
		}
		switch {
		case c.Cancel != nil:
			op = script.Cancel
		case c.Peek:
			op = script.Peek
		case o.tenant.Exempt:
			op = script.Exempt
		}
		ask := o.waiting(op, reservationID(r))
		if c.Cancel != nil {
			ask = o.ask(op, c.Cancel.ID)
			ask.At = c.Cancel.At.UnixMicro()
		} else if c.Peek {
			ask.Once = ""
		}
		operations, asks = append(operations, o), append(asks, ask)
	}
	answers, err := operations[0].batcher.Do(ctx, operations[0].script, asks...)
	if err != nil {
		return nil, err
	}
	decisions := make([]Decision, len(answers))
	for i, a := range answers {
		decisions[i] = operations[i].decision(a)
		if asks[i].Op != script.Cancel && !calls[i].Peek && decisions[i].Granted {
			decisions[i].Reservation = Reservation{Request: calls[i].Request, At: decisions[i].At, ID: asks[i].ID, limiter: l}
		}
	}
	return decisions, nil
}

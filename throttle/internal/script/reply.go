package script

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/sluice-go/sluice/internal/redischeck"
)

// The statuses of answers. Tickets of a take have others: see lua/take.lua.
const (
	Denied       = 0
	Granted      = 1
	Done         = Granted // of a verb that grants nothing
	Waits        = 3       // joined the line
	OverMaxWait  = 4       // refused
	BacklogFull  = 5       // refused: Backlog
	WaitedBefore = 6       // was in line already
	OverDeadline = 7       // refused
	Nothing      = 8       // depends on the verb: see lua/decide.lua
	Failed       = 9
)

// Values of Answer.Binds that are no window: Slots, a handler slot, and Paused, the pause in Answer.Pause.
const Slots, Paused = -1, -2

// An Answer answers a request. Times are microseconds by the clock of Redis. Fields that calls carry as JSON have
// tags.
type Answer struct {
	Status   int64         `json:"-"`
	At       int64         `json:"-"`         // when this was decided, or was granted by an earlier copy of the call
	Time     int64         `json:"time"`      // the expected start
	Latest   int64         `json:"latest"`    // the expected start's upper bound; 0 if none is known
	Binds    int64         `json:"binds"`     // the number of the window that delays it for longest, from 1; Slots, Paused, or 0
	Behind   int64         `json:"behind"`    // how far the clock is behind the windows
	Nudge    bool          `json:"nudge"`     // a server should be woken for the ticket
	Pause    PauseAnswer   `json:"pause"`     // zero without one
	Adapted  AdaptedAnswer `json:"adapted"`   // zero while the published rate applies
	Left     Left          `json:"left"`      // zero if unknown
	OldCosts []int64       `json:"old_costs"` // by window, the cost until this correction; nil if it was never corrected
	Fits     []int64       `json:"fits"`      // by window, when the cost fits (0: at once): after tickets that go first, unless it joins
	Used     []int64       `json:"-"`         // by window, its units; nil unless hasWindows
	Resets   []int64       `json:"-"`         // by window, when nothing is counted any more
	Err      error         `json:"-"`         // *ReplyError, if the status is Failed, or of go-redis, if there is no answer

	seq, index int64 // if no answer came: the call's number, and the request's in it, from 1
}

// A PauseAnswer is the longest pause in force for a request.
type PauseAnswer struct {
	Whose    int64  `json:"whose"`    // operators': 1 for Policy.Paused, 2 for Settings.Paused; 0 for the upstream's
	Until    int64  `json:"ends"`     // nothing is granted until then
	At       int64  `json:"reported"` // when it was reported; like the fields below, only of the upstream's
	Reporter string `json:"reporter"`
	Cause    string `json:"cause"`
	Tenant   string `json:"tenant"` // whose call was refused
}

// An AdaptedAnswer is a window's rate after refusals by the upstream.
type AdaptedAnswer struct {
	Rate     int64 `json:"rate"`  // in millionths of the published rate
	Since    int64 `json:"since"` // the first refusal
	Refusals int64 `json:"refusals"`
	Window   int64 `json:"window"` // its number, from 1
	Changed  int64 `json:"cut"`    // when a refusal last cut the rate, or began to spread grants
	Until    int64 `json:"spread"` // until when grants are spread
}

// A ReplyError names the malformed value of a reply, or quotes why the script could not decide a request:
// SLUICE_STATE or SLUICE_CLOCK, and a reason.
type ReplyError struct{ Reason string }

func (e *ReplyError) Error() string { return e.Reason }

// ScriptFailed reports whether an error of Redis means that a script failed, rather than that it cannot run now.
func ScriptFailed(err error) bool {
	text := err.Error()
	return errors.As(err, new(redis.Error)) && (strings.Contains(text, "SLUICE_") ||
		strings.HasPrefix(text, "ERR ") && strings.Contains(text, "script") && !redischeck.CannotServe(err))
}

// hasWindows reports whether an answer has the state of every window.
func hasWindows(op string) bool {
	return op == Reserve || op == Exempt || op == Observe || op == Peek || op == Expect || op == Cancel
}

// A reader reads a flat reply value by value, up to the first malformed one.
type reader struct {
	reply []any
	index int
	bad   bool
}

func (r *reader) text() string { return next[string](r) }

// integer reads an integer. None in a reply may be below 0.
func (r *reader) integer() int64 {
	n := next[int64](r)
	r.bad = r.bad || n < 0
	return n
}

func next[T any](r *reader) (value T) {
	ok := !r.bad && r.index < len(r.reply)
	if ok {
		value, ok = r.reply[r.index].(T)
	}
	if r.bad = !ok; ok {
		r.index++
	}
	return value
}

func (p *Policy) readAnswers(reply []any, requests []Request) ([]Answer, error) {
	r := &reader{reply: reply}
	answers := make([]Answer, len(requests))
	for i := range answers {
		p.readAnswer(r, requests[i].Op, &answers[i])
	}
	if r.bad || r.index != len(reply) {
		return nil, &ReplyError{fmt.Sprintf("value %d of %d for %d requests", r.index+1, len(reply), len(requests))}
	}
	return answers, nil
}

func (p *Policy) readAnswer(r *reader, op string, a *Answer) {
	a.Status = r.integer()
	r.bad = r.bad || a.Status > Failed
	if a.Status == Failed {
		a.Err = &ReplyError{r.text()}
		return
	}
	a.At = r.integer()
	a.Time, a.Latest = a.At, a.At
	if fields := r.text(); fields != "" {
		r.bad = json.Unmarshal([]byte(fields), a) != nil || a.Latest < 0 || uint64(a.Pause.Whose) > 2 || r.bad
		p := &a.Pause
		p.Reporter, p.Cause, p.Tenant = Unescape(p.Reporter), Unescape(p.Cause), Unescape(p.Tenant)
	}
	if !hasWindows(op) {
		return
	}
	r.bad = r.bad || a.Fits != nil && len(a.Fits) != len(p.Windows)
	for range p.Windows {
		a.Used, a.Resets = append(a.Used, r.integer()), append(a.Resets, r.integer())
	}
}

// Sections returns the sections of a scope's value, by label: see lua/scope.lua.
func Sections(value string) map[string]string {
	found := map[string]string{}
	for i := 8; i+11 <= len(value); {
		payload := i + 11 + int(value[i+10])
		end := payload + int(value[i+7])<<16 + int(value[i+8])<<8 + int(value[i+9])
		if end > len(value) {
			break
		}
		found[value[i+11:payload]] = value[payload:end]
		i = end
	}
	return found
}

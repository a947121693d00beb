package dispatch

import (
	"time"

	"github.com/sluice-go/sluice/worker/internal/outage"
)

// A schedule says what a line needs of this server next, and when.
//
//	state    what is known                                     it is asked
//	resting  nobody waits, or another server watches the line  when there is news
//	waiting  tickets wait, and this server watches the line    at its appointment
//	passed   it was due without a free slot: others are asked  when a slot is free
//	failing  the last take failed                              after a pause, which doubles
//
//	event                                resting  waiting          passed   failing
//	a take is answered, tickets wait     waiting  waiting          waiting  waiting
//	a take is answered, nobody waits     resting  resting          resting  resting
//	a take fails                         failing  failing          failing  failing
//	news: a join, a nudge, units that    waiting  waiting, sooner  waiting  -
//	  are back, nobody watches the line
//	due for 20 ms, and no slot is free   -        passed           -        -
//	the server stops                     -        passed           -        -
//
// A take that is on its way may not have seen what was news meanwhile: it is news again after the
// answer.
type schedule struct {
	state  state
	at     time.Time      // of the next take, unless it rests
	news   time.Time      // when to ask for what came since the last take was sent; zero: nothing
	passed time.Time      // when it was passed on last
	taken  time.Time      // when tickets were picked that are not acknowledged yet; zero: none
	failed outage.Backoff // of takes
}

type state int

const (
	stateResting state = iota
	stateWaiting
	statePassed
	stateFailing
)

// An action is something that a line needs of this server.
type action int

const (
	actionAsk         action = iota // a take, for a free slot
	actionPassOn                    // no slot is free: others are asked to ask the line
	actionAcknowledge               // of the last take, as no other one has followed
)

const (
	// keptFor is how late a server without a free slot may be for an appointment.
	keptFor = 20 * time.Millisecond

	// passEvery is how often the same line is passed on.
	passEvery = time.Second

	// acknowledgeAfter is when a take is acknowledged by a call of its own: a server that has an
	// appointment asks within 2 s, and after 5 s others put back what was taken.
	acknowledgeAfter = 2500 * time.Millisecond
)

// next returns when the line needs an action next, or the zero time for never.
func (s *schedule) next(do action) time.Time {
	switch {
	case do == actionAsk && s.state != stateResting:
		return s.at
	case do == actionPassOn && s.state == stateWaiting:
		return later(s.at.Add(keptFor), s.passed.Add(passEvery))
	case do == actionAcknowledge && !s.taken.IsZero():
		return s.taken.Add(acknowledgeAfter)
	}
	return time.Time{}
}

// sent notes that a take is on its way. It also acknowledges the one before.
func (s *schedule) sent() { s.news, s.taken = time.Time{}, time.Time{} }

// answered notes when to ask again, or by the zero time that nobody waits.
func (s *schedule) answered(next time.Time) {
	s.failed = outage.Backoff{}
	s.state, s.at = stateWaiting, next
	if next.IsZero() {
		s.state = stateResting
	}
	if !s.news.IsZero() {
		s.expect(s.news)
	}
}

// fails notes that a take failed.
func (s *schedule) fails(now time.Time) {
	s.failed.Fail(now)
	s.state, s.at = stateFailing, s.failed.Until
}

// expect notes that there is news, for which to ask at a time.
func (s *schedule) expect(at time.Time) {
	s.news = sooner(s.news, at)
	if s.state == stateResting || s.state != stateFailing && at.Before(s.at) {
		s.state, s.at = stateWaiting, at
	}
}

// isDue reports whether a time has come that is not never.
func isDue(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// later returns the later of two times, sooner the earlier one, where the zero time is never.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

package limitertest

import (
	"slices"
	"time"
)

// Events happen at their times, one after the other: nothing takes real time but what they do.
type Events struct {
	Clock *Clock // is set to their times, if there is one
	Now   time.Duration

	list []timedEvent // the next one first
}

type timedEvent struct {
	at time.Duration
	do func()
}

// At adds an event, after others at its time.
func (e *Events) At(at time.Duration, do func()) {
	i, _ := slices.BinarySearchFunc(e.list, at, func(one timedEvent, at time.Duration) int {
		if one.at <= at {
			return -1
		}
		return 1
	})
	e.list = slices.Insert(e.list, i, timedEvent{at, do})
}

// Next lets the next event happen. It returns false if there is none until then.
func (e *Events) Next(until time.Duration) bool {
	if len(e.list) == 0 || e.list[0].at > until {
		return false
	}
	one := e.list[0]
	e.list, e.Now = e.list[1:], one.at
	if e.Clock != nil {
		e.Clock.Set(e.Now)
	}
	one.do()
	return true
}

package throttle

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

// panicsEvery is the shortest time between two logged panics of one function.
const panicsEvery = time.Minute

// panics logs the panics of a Config's functions, with their stacks.
type panics struct {
	logger *slog.Logger
	logged sync.Map // function -> time.Time; two goroutines may log at once
}

func (p *panics) log(function string, value any) {
	if last, ok := p.logged.Load(function); ok && time.Since(last.(time.Time)) < panicsEvery {
		return
	}
	p.logged.Store(function, time.Now())
	p.logger.Error("throttle: a function of the limiter's Config panicked",
		"function", function, "panic", fmt.Sprint(value), "stack", string(debug.Stack()))
}

// guarded returns an observer that has all functions, which return after a panic.
func (o Observer) guarded(p *panics) Observer {
	return Observer{
		Called:    func(c Call) { p.guard("Called", o.Called != nil, func() { o.Called(c) }) },
		Corrected: func(c Correction) { p.guard("Corrected", o.Corrected != nil, func() { o.Corrected(c) }) },
		Decided:   func(d Decision) { p.guard("Decided", o.Decided != nil, func() { o.Decided(d) }) },
		Followed: func(version int64, err error) {
			p.guard("Followed", o.Followed != nil, func() { o.Followed(version, err) })
		},
		Joined: func(policy, tenant string, place Place) {
			p.guard("Joined", o.Joined != nil, func() { o.Joined(policy, tenant, place) })
		},
		Refused: func(r Refusal) { p.guard("Refused", o.Refused != nil, func() { o.Refused(r) }) },
		Started: func(s Start) { p.guard("Started", o.Started != nil, func() { o.Started(s) }) },
		Taken: func(policy string, tickets []TakenTicket) {
			p.guard("Taken", o.Taken != nil, func() { o.Taken(policy, tickets) })
		},
		Unavailable: func(policy, tenant string, err error) {
			p.guard("Unavailable", o.Unavailable != nil, func() { o.Unavailable(policy, tenant, err) })
		},
	}
}

// guard calls an Observer's function, if there is one.
func (p *panics) guard(name string, known bool, call func()) {
	defer func() {
		if value := recover(); value != nil {
			p.log("Observer."+name, value)
		}
	}()
	if known {
		call()
	}
}
